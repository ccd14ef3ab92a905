"""The hierarchical and the tiny recursive reasoning model."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.systems.hrm.reasoning.base import ReasoningModel, Sizes
from lockstep.systems.hrm.reasoning.blocks import check_sizes

Mixing = Literal["attention", "mlp"]


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
        """A model with random initial values.

        Args:
            sizes: sizes of the model.
            h_blocks: blocks of H.
            l_blocks: blocks of L.
            h_cycles: steps of H in a segment.
            l_cycles: steps of L for each one of H.
            puzzles: table of the rows of puzzles; None for a model that gets rows from its caller,
                or none.

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


class RecursiveModel(ReasoningModel):
    """One network for both states, trained by the gradient of a whole recursion.

    Jolicoeur-Martineau 2025, "Less is More: Recursive Reasoning with Tiny Networks"
    (arXiv:2510.04871). A recursion has `num_updates` steps z ← net(x + y + z) of the latent state,
    then y ← net(y + z) for the answer. A segment has `num_recursions`, all but the last without
    gradient. It halts by one logit, without a second pass for the value of going on. The state
    `z_H` is y and `z_L` is z.

    Attributes:
        net: blocks of the network.
        num_recursions: recursions of a segment, T in the paper.
        num_updates: steps of the latent state in a recursion, n in the paper.
    """

    def __init__(
        self,
        sizes: Sizes,
        num_blocks: int = 2,
        num_recursions: int = 3,
        num_updates: int = 6,
        mixing: Mixing = "attention",
        puzzles: nn.Module | None = None,
    ) -> None:
        """A model with random initial values.

        Args:
            sizes: sizes of the model.
            num_blocks: blocks of the network.
            num_recursions: recursions of a segment.
            num_updates: steps of the latent state in a recursion.
            mixing: how tokens are mixed: `attention` with rotary positions, or `mlp`, a gated layer
                along the tokens, which suits small examples of a fixed length, such as Sudokus.
            puzzles: table of the rows of puzzles; None for a model that gets rows from its caller,
                or none.

        Raises:
            ConfigError: a number is below 1, sizes do not fit together, or there is no such mixing.
        """
        check_sizes(num_recursions=num_recursions, num_updates=num_updates)
        if mixing not in get_args(Mixing):
            raise ConfigError(f"mixing={mixing!r}: must be attention or mlp")
        attends = mixing == "attention"
        super().__init__(sizes, num_halting=1, has_rotary=attends, puzzles=puzzles)
        self.num_recursions, self.num_updates = num_recursions, num_updates
        self.net = (sizes.attending if attends else sizes.mixing)(num_blocks)

    def segment(self, x: Tensor, z_H: Tensor, z_L: Tensor) -> tuple[Tensor, Tensor]:
        """The states z_H and z_L after a segment, from the embedded input and those before it."""
        with torch.no_grad():
            for _ in range(self.num_recursions - 1):
                z_H, z_L = self._recursion(x, z_H, z_L)
        return self._recursion(x, z_H, z_L)

    def _recursion(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.num_updates):
            z = self.net(z, y + x, self.tables)
        return self.net(y, z, self.tables), z
