"""Reasoning models: what they have in common, the hierarchical and the tiny recursive one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError, TaskError
from lockstep.systems.hrm.reasoning.blocks import (
    Attention,
    AttentionKind,
    Block,
    Blocks,
    SwiGLU,
    check_sizes,
    embed,
    linear,
    rotary_tables,
    truncated_normal_,
)

State = dict[str, Tensor]
"""The states `z_H` and `z_L` of a batch, [B, positions, dim] each."""

_KEYS = ("z_H", "z_L")
_HALTING_BIAS = -5.0
"""An untrained model hardly ever halts, whatever its input, since the weights start at 0."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a reasoning model; the defaults are those published for Sudoku.

    Attributes:
        vocabulary: number of tokens, of inputs as of answers.
        length: tokens of an example.
        dim: size of a token's state.
        num_heads: heads of attention.
        expansion: inner width of gated layers, times 2/3, as a multiple of dim.
        multiple: inner widths are rounded up to a multiple of this.
        puzzle_dim: size of a puzzle's row in a table; 0 for models without rows.
        num_leading: number of tokens in front of the example that a row is reshaped to, padded with
            zeros; None for the smallest number.
        attention: how attention is computed, as `Attention.kind`.
        theta: base of the angles of rotary positions.
    """

    vocabulary: int
    length: int
    dim: int = 512
    num_heads: int = 8
    expansion: float = 4.0
    multiple: int = 256
    puzzle_dim: int = 0
    num_leading: int | None = None
    attention: AttentionKind = "fused"
    theta: float = 10000.0

    def __post_init__(self) -> None:
        """Check that sizes fit together.

        Raises:
            ConfigError: they do not; names the field.
        """
        check_sizes(vocabulary=self.vocabulary, length=self.length, dim=self.dim)
        if self.puzzle_dim < 0:
            raise ConfigError(f"puzzle_dim={self.puzzle_dim}: must be at least 0")
        least = math.ceil(self.puzzle_dim / self.dim)
        if self.num_leading is not None and self.num_leading < least:
            raise ConfigError(
                f"num_leading={self.num_leading}: a row of puzzle_dim={self.puzzle_dim} takes at "
                f"least {least} tokens of dim={self.dim}"
            )
        if self.num_leading and not self.puzzle_dim:
            raise ConfigError(f"num_leading={self.num_leading}: needs a puzzle_dim above 0")

    @property
    def leading(self) -> int:
        """Number of tokens in front of the example."""
        if self.num_leading is not None:
            return self.num_leading
        return math.ceil(self.puzzle_dim / self.dim)

    @property
    def positions(self) -> int:
        """Number of tokens of an example and in front of it."""
        return self.leading + self.length

    def attending(self, num_blocks: int) -> Blocks:
        """Blocks of attention and gated layers, with random initial values."""
        check_sizes(num_blocks=num_blocks)
        return Blocks(
            [
                Block(Attention(self.dim, self.num_heads, self.attention), self._gated(self.dim))
                for _ in range(num_blocks)
            ]
        )

    def mixing(self, num_blocks: int) -> Blocks:
        """Blocks of gated layers along the tokens and along their features."""
        check_sizes(num_blocks=num_blocks)
        return Blocks(
            [Block(self._gated(self.positions), self._gated(self.dim)) for _ in range(num_blocks)]
        )

    def _gated(self, dim: int) -> SwiGLU:
        return SwiGLU(dim, self.expansion, self.multiple)


class ReasoningModel(nn.Module):
    """A model that refines its answer repeatedly: each call is a segment.

    Under autocast, states within a segment and answers have autocast's dtype; halting is always
    computed in float32. A subclass defines how a segment updates the states.

    Attributes:
        sizes: sizes of the model.
        tokens: table of input tokens.
        puzzles: table of the rows of puzzles, or None for a model that gets rows from its caller,
            or has none.
        answer: linear layer from states to logits of tokens.
        halting: linear layer from the first position's state to logits of halting.
        initial_H: initial state z_H [dim] of every position; not trained.
        initial_L: initial state z_L.
        tables: rotary positions, or None for a model without them.
    """

    initial_H: Tensor
    initial_L: Tensor
    tables: Tensor | None

    def __init__(
        self,
        sizes: Sizes,
        num_halting: int,
        has_rotary: bool = True,
        puzzles: nn.Module | None = None,
    ) -> None:
        """A model with random initial values.

        Args:
            sizes: sizes of the model.
            num_halting: number of logits of halting: 1, or 2 with one for going on.
            has_rotary: whether its blocks take rotary positions.
            puzzles: function from identifiers of puzzles to their rows, such as a
                `lockstep.nn.SparseEmbedding(num, sizes.puzzle_dim)`, for `rows`.

        Raises:
            ConfigError: sizes do not fit together.
        """
        super().__init__()
        self.sizes, self.puzzles = sizes, puzzles
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.dim)
        truncated_normal_(self.tokens.weight, sizes.dim**-0.5)
        self.answer = linear(sizes.dim, sizes.vocabulary)
        self.halting = nn.Linear(sizes.dim, num_halting)
        nn.init.zeros_(self.halting.weight)
        nn.init.constant_(self.halting.bias, _HALTING_BIAS)
        for key in ("initial_H", "initial_L"):
            self.register_buffer(key, truncated_normal_(torch.empty(sizes.dim), 1.0))
        tables = None
        if has_rotary:
            check_sizes(num_heads=sizes.num_heads)
            tables = rotary_tables(sizes.positions, sizes.dim // sizes.num_heads, sizes.theta)
            tables = tables.to(self.answer.weight.device)
        self.register_buffer("tables", tables, persistent=False)

    def initial(self, batch_size: int, dtype: torch.dtype | None = None) -> State:
        """The states before the first segment, equal for all samples and positions.

        Args:
            batch_size: number of samples B.
            dtype: dtype of the states; None for that of the parameters. A segment returns states of
                the dtype of its arguments.

        Returns:
            `z_H` and `z_L`, [B, positions, dim] each.
        """
        shape = (batch_size, self.sizes.positions, self.sizes.dim)
        starts = (self.initial_H, self.initial_L)
        return {
            key: start.to(dtype or start.dtype).expand(shape).clone()
            for key, start in zip(_KEYS, starts, strict=True)
        }

    def rows(self, identifiers: Tensor) -> Tensor:
        """The rows of puzzles, for `forward`.

        Args:
            identifiers: identifiers of puzzles, integers [B].

        Returns:
            [B, puzzle_dim], float32; gradients go to the table.

        Raises:
            TaskError: there is no table, or no such row.
        """
        if self.puzzles is None:
            raise TaskError("the model has no table of puzzles; give it one when it is made")
        rows: Tensor = self.puzzles(identifiers)
        return rows

    def forward(
        self, state: Mapping[str, Tensor], inputs: Tensor, rows: Tensor | None = None
    ) -> tuple[State, Tensor, Tensor, Tensor | None]:
        """One segment.

        Args:
            state: from `initial` or an earlier segment; a constant to autograd.
            inputs: tokens, integers [B, length].
            rows: the rows of the samples' puzzles, [B, puzzle_dim]; None for rows of zeros.

        Returns:
            State after the segment, detached; logits of tokens [B, length, vocabulary]; logits of
            halting, and of going on or None: [B], float32.

        Raises:
            TaskError: a shape is wrong, or the model does not take rows.
        """
        self._check(state, inputs, rows)
        x = self._embedded(inputs, rows)
        with torch.no_grad():
            before = [state[key].to(x.dtype) for key in _KEYS]
        after = self.segment(x, *before)
        logits = self.answer(after[0][:, self.sizes.leading :])
        q = self._halting(after[0][:, 0])
        new = {
            key: value.detach().to(state[key].dtype)
            for key, value in zip(_KEYS, after, strict=True)
        }
        return new, logits, q[:, 0], q[:, 1] if q.shape[1] > 1 else None

    def segment(self, x: Tensor, z_H: Tensor, z_L: Tensor) -> tuple[Tensor, Tensor]:
        """The states z_H and z_L after a segment, from the embedded input and those before it."""
        raise NotImplementedError

    def _embedded(self, inputs: Tensor, rows: Tensor | None) -> Tensor:
        x = embed(self.tokens, inputs.long())
        sizes = self.sizes
        if sizes.leading:
            if rows is None:
                rows = x.new_zeros(len(x), sizes.puzzle_dim)
            padded = F.pad(rows.to(x.dtype), (0, sizes.leading * sizes.dim - sizes.puzzle_dim))
            leading = padded.view(len(x), sizes.leading, sizes.dim)
            x = torch.cat([leading * math.sqrt(sizes.dim), x], 1)
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

    def _halting(self, first: Tensor) -> Tensor:
        with torch.autocast(first.device.type, enabled=False):
            weight, bias = self.halting.weight, self.halting.bias
            return F.linear(first.to(weight.dtype), weight, bias).float()

    def _check(self, state: Mapping[str, Tensor], inputs: Tensor, rows: Tensor | None) -> None:
        sizes = self.sizes
        if inputs.dim() != 2 or inputs.shape[1] != sizes.length or inputs.is_floating_point():
            raise TaskError(
                f"inputs are {inputs.dtype} {[*inputs.shape]}, must be integers [B, {sizes.length}]"
            )
        shape = (len(inputs), sizes.positions, sizes.dim)
        for key in _KEYS:
            if key not in state or state[key].shape != shape:
                found = [*state[key].shape] if key in state else "missing"
                raise TaskError(f"the state's {key} is {found}, must be {[*shape]}; see initial()")
        if rows is not None and not sizes.puzzle_dim:
            raise TaskError("rows are given to a model without; set puzzle_dim in its sizes")
        if rows is not None and rows.shape != (len(inputs), sizes.puzzle_dim):
            raise TaskError(f"rows are {[*rows.shape]}, must be {[len(inputs), sizes.puzzle_dim]}")


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
