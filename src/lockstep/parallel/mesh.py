"""Where a run is computed: how many ranks there are, and what each of them holds.

The mesh never decides what is computed. Today its one axis is that of the data.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.parallel.layout import Range, split


@dataclass(frozen=True)
class Mesh:
    """The places of a group of ranks.

    Attributes:
        num_microbatches: of each step, 1 or more.
        size: how many ranks there are.
    """

    num_microbatches: int
    size: int

    @property
    def microbatches(self) -> list[Range]:
        """For each rank, the microbatches it computes unless speeds are known to differ."""
        return split(self.num_microbatches, self.size)

    @property
    def num_spares(self) -> int:
        """How many ranks, the last ones, have nothing to compute."""
        return max(0, self.size - self.num_microbatches)
