"""Layers that several ranks have together: cut into shards, or tables with rows on all ranks."""

from lockstep.nn.row import Pipeline
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
from lockstep.nn.units import stages, units

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
    "stages",
    "units",
]
