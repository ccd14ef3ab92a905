"""What a forward or backward pass must leave as it is: parameters, and buffers that are constant.

What a pass changes there happens once for each microbatch of this rank, so the result would depend
on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lockstep.errors import TaskError
from lockstep.train.buffers import changed_in_pass, tensor_places


class Constants:
    """Notices changes by the version counters of tensors, which cost nothing to read.

    Changes through `tensor.data` and those of batch norm's kernels are not counted there; the
    trial at the start and the digests at checkpoints are for these.
    """

    def __init__(self, model: nn.Module, changing: Collection[str]) -> None:
        """Watch all parameters, and all buffers but those named in `changing`."""
        self._places = [p for p in tensor_places(model) if p.name not in changing]
        self._versions: list[int] = []
        self.mark()

    def mark(self) -> None:
        """Take the present state as the right one."""
        self._versions = [place.tensor._version for place in self._places]

    def check(self, when: str) -> None:
        """Make sure that nothing has changed since `mark`.

        Args:
            when: for the message.

        Raises:
            TaskError: naming the first tensor that has.
        """
        for place, version in zip(self._places, self._versions, strict=True):
            if place.tensor._version != version or place.held_in[place.key] is not place.tensor:
                raise TaskError(f"{when}: {changed_in_pass(place.name)}")
