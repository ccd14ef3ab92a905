"""What compression keeps from step to step, as far as reductions have to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class LeafState:
    """What compression keeps of one microbatch; nobody changes its tensors.

    Attributes:
        errors: for each segment, what was cut off its leaves and not sent yet; empty without error
            feedback.
        exponents: for each segment, the exponents of its blocks to expect next, int16 [blocks];
            empty unless leaves become integers.
    """

    errors: Sequence[Tensor] = field(default=())
    exponents: Sequence[Tensor] = field(default=())


class LeafStates(Protocol):
    """States of this rank's microbatches, and what all ranks have agreed on."""

    @property
    def key(self) -> int:
        """Random key of the present step, the same on all ranks."""

    @property
    def expected(self) -> Sequence[Tensor]:
        """For each segment, the greatest exponents that any microbatch expects, int16 [blocks]."""

    def of_leaf(self, microbatch: int) -> LeafState | None:
        """The committed state of a microbatch; None if it has none yet."""

    def make_leaf(self, microbatch: int, state: LeafState) -> None:
        """Note the state that a microbatch has after this step, if it is applied."""

    def expect(self, exponents: Sequence[Tensor]) -> None:
        """Note what the `expected` of the next step is, if this one is applied."""
