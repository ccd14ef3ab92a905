"""What ranks compare after a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.thread_transport import ThreadTransport, on_ranks
from torch import nn

from lockstep.engine.recovery.replica_checks import check_replicas
from lockstep.errors import DivergenceError

NAME = "column 0, block 1: elements 0 to 3 of torch.float32"


def check(transport: ThreadTransport, flipped_on: int | None) -> None:
    """Each rank keeps its own slice, and that of the rank before it."""
    own = torch.full((4,), 1.0)
    if transport.rank == flipped_on:
        own.view(torch.int32)[2] ^= 1  # the last bit
    slices = {NAME: own} if transport.rank < 2 else {"another": torch.full((4,), 2.0)}
    places: Any = SimpleNamespace(world=transport, in_slices=True, is_split=False)
    state: Any = SimpleNamespace(digests=dict)
    check_replicas(places, nn.Identity(), {}, state, 7, slices)


def test_slices_that_two_ranks_keep_are_compared() -> None:
    on_ranks(3, lambda transport: check(transport, None))

    def body(transport: ThreadTransport) -> str:
        with pytest.raises(DivergenceError) as caught:
            check(transport, 1)
        return str(caught.value)

    for message in on_ranks(3, body):
        assert message.startswith(f"step 7: {NAME} on rank")
