"""Layers that several ranks have together: cut into shards, or tables with rows on all ranks.

    from lockstep.nn import shard

Names are loaded from their modules when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.nn.pipeline import Pipeline
    from lockstep.nn.sharded.layers import (
        ColumnLinear,
        RowLinear,
        VocabularyEmbedding,
        VocabularyLinear,
    )
    from lockstep.nn.sharded.logits import ShardedLogits
    from lockstep.nn.sharded.plan import Heads, shard
    from lockstep.nn.sharded.sharded_tensor import ShardedTensor
    from lockstep.nn.sparse_embedding import SparseEmbedding

__all__ = [
    "ColumnLinear",
    "Heads",
    "Pipeline",
    "RowLinear",
    "ShardedLogits",
    "ShardedTensor",
    "SparseEmbedding",
    "VocabularyEmbedding",
    "VocabularyLinear",
    "shard",
]

if not TYPE_CHECKING:  # else type checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(__name__)
