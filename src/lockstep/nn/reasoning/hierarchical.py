"""The hierarchical reasoning model: a slow and a fast module that inform one another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.nn.reasoning.blocks import check_sizes
from lockstep.nn.reasoning.frame import ReasoningModel, Sizes


class HierarchicalModel(ReasoningModel):
    """Two modules of blocks with a state each, trained by the gradient of their last steps.

    Wang et al. 2025, "Hierarchical Reasoning Model" (arXiv:2506.21734). In a segment, each of
    `h_cycles` cycles has `l_cycles` steps z_L ← L(z_L, z_H + x) and then one z_H ← H(z_H, z_L). All
    but the last step of L and of H are without gradient: their states are constants.

    Attributes:
        H: blocks of the slow module.
        L: blocks of the fast module.
        h_cycles: steps of H in a segment.
        l_cycles: steps of L for each one of H.
    """

    def __init__(
        self,
        sizes: Sizes,
        h_blocks: int = 4,
        l_blocks: int = 4,
        h_cycles: int = 2,
        l_cycles: int = 2,
        puzzles: nn.Module | None = None,
    ) -> None:
        """A model with random start values.

        Args:
            sizes: sizes of the model.
            h_blocks: blocks of H.
            l_blocks: blocks of L.
            h_cycles: steps of H in a segment.
            l_cycles: steps of L for each one of H.
            puzzles: table of the rows of puzzles; None for a model that is given rows, or none.

        Raises:
            ConfigError: a number is below 1, or sizes do not fit together.
        """
        check_sizes(h_cycles=h_cycles, l_cycles=l_cycles)
        super().__init__(sizes, num_halting=2, puzzles=puzzles)
        self.h_cycles, self.l_cycles = h_cycles, l_cycles
        self.H, self.L = sizes.attending(h_blocks), sizes.attending(l_blocks)

    def segment(self, x: Tensor, z_H: Tensor, z_L: Tensor) -> tuple[Tensor, Tensor]:
        """The states z_H and z_L after a segment, from the embedded input and those before it."""
        with torch.no_grad():
            for cycle in range(self.h_cycles):
                is_last = cycle == self.h_cycles - 1
                for _ in range(self.l_cycles - is_last):
                    z_L = self.L(z_L, z_H + x, self.tables)
                if not is_last:
                    z_H = self.H(z_H, z_L, self.tables)
        z_L = self.L(z_L, z_H + x, self.tables)
        z_H = self.H(z_H, z_L, self.tables)
        return z_H, z_L
