"""The model of a run, for its puzzles."""

from __future__ import annotations

from lockstep.nn import SparseEmbedding
from lockstep.nn.reasoning import HierarchicalModel, ReasoningModel, RecursiveModel, Sizes
from lockstep.optim import RowSignSGD
from lockstep.recipes.hrm.config import HrmConfig
from lockstep.recipes.hrm.puzzles import Puzzles


def model_of(config: HrmConfig, puzzles: Puzzles) -> ReasoningModel:
    """The model that `config.model` names, for the tokens and identifiers of puzzles.

    Raises:
        ConfigError: sizes do not fit together.
    """
    has_rows = config.puzzle_ids
    sizes = Sizes(
        puzzles.vocabulary,
        puzzles.length,
        config.dim,
        config.num_heads,
        config.expansion,
        config.inner_multiple,
        config.row_dim if has_rows else 0,
        config.puzzle_tokens if has_rows else None,
    )
    table = _table(config, puzzles.num_identifiers) if has_rows else None
    blocks, high, low = config.num_blocks, config.high_cycles, config.low_cycles
    if config.model == "hierarchical":
        return HierarchicalModel(sizes, blocks, blocks, high, low, table)
    return RecursiveModel(sizes, blocks, high, low, config.mixing, table)


def _table(config: HrmConfig, num_identifiers: int) -> SparseEmbedding:
    """Rows that begin as zeros, and go by the sign of their gradient, as published."""
    lr = config.scaled(config.puzzle_lr)
    return SparseEmbedding(
        num_identifiers, config.row_dim, RowSignSGD(lr, config.puzzle_weight_decay)
    )
