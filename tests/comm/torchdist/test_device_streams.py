"""What goes wrong while a device's stream waits for collectives."""

from __future__ import annotations

import pytest
import torch

from lockstep.comm.torchdist.process_group_transport import GroupTransport
from lockstep.comm.transport import GroupBroken
from lockstep.errors import DataError, NonFiniteError, shared


class Streamed(GroupTransport):
    """A rank whose group has, or has not, lost another one."""

    def __init__(self, has_lost: bool) -> None:
        super().__init__("fake", torch.device("cpu"))
        self._has_lost = has_lost

    def is_damaged(self) -> bool:
        """Whether it has."""
        return self._has_lost

    def barrier(self) -> None:
        """Nobody is waited for."""

    def close(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (DataError("what an aborted collective has left is no batch"), GroupBroken),
        (IndexError("nor is it an index"), GroupBroken),
        (shared(NonFiniteError("step 3: the gradient is NaN")), NonFiniteError),
        (GroupBroken("a rank died"), GroupBroken),
    ],
)
def test_only_errors_of_all_ranks_are_told_after_a_loss(
    error: Exception, found: type[Exception]
) -> None:
    for has_lost in (True, False):
        with (
            pytest.raises(found if has_lost else type(error), match=str(error)),
            Streamed(has_lost).in_stream(),
        ):
            raise error
