"""What compression keeps from step to step, as far as reductions have to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class LeafStates(Protocol):
    """What was cut off this rank's microbatches, and what all ranks have agreed on.

    Nobody changes any of these tensors once the step that has made them is summed.
    """

    @property
    def key(self) -> int:
        """Random key of the present step, the same on all ranks."""

    @property
    def agreed(self) -> Sequence[Tensor]:
        """What the sums of the step before have come to beside the gradient; on all ranks.

        Of integers, for each segment, the greatest exponents that any microbatch expects, int16
        [blocks]; of low rank, for each matrix, the right factor of its sum.
        """

    def agree(self, tensors: Sequence[Tensor]) -> None:
        """Note what the next step's `agreed` is, if this step is applied."""

    def of_leaf(self, microbatch: int) -> Sequence[Tensor]:
        """For each segment, what was cut off a microbatch's leaves and not sent; maybe nothing."""

    def make_leaf(self, microbatch: int, errors: Sequence[Tensor]) -> None:
        """Note what `of_leaf` gives after this step, if it is applied."""
