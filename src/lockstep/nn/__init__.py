"""Layers that several ranks have together: cut into shards, or tables with rows on all ranks.

    from lockstep.nn import shard

Names are loaded from their modules when they are first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.nn.layers import ColumnLinear, RowLinear
    from lockstep.nn.logits import ShardedLogits
    from lockstep.nn.pipeline import Pipeline
    from lockstep.nn.plan import Heads, shard
    from lockstep.nn.sharded_tensor import ShardedTensor
    from lockstep.nn.sketched import SketchedColumn, SketchedRow
    from lockstep.nn.tables.sparse_embedding import SparseEmbedding
    from lockstep.nn.vocabulary import VocabularyEmbedding, VocabularyLinear

__all__ = [
    "ColumnLinear",
    "Heads",
    "Pipeline",
    "RowLinear",
    "ShardedLogits",
    "ShardedTensor",
    "SketchedColumn",
    "SketchedRow",
    "SparseEmbedding",
    "VocabularyEmbedding",
    "VocabularyLinear",
    "shard",
]

_HOMES: Mapping[str, str] = MappingProxyType(
    {
        "ColumnLinear": "layers",
        "Heads": "plan",
        "Pipeline": "pipeline",
        "RowLinear": "layers",
        "ShardedLogits": "logits",
        "ShardedTensor": "sharded_tensor",
        "SketchedColumn": "sketched",
        "SketchedRow": "sketched",
        "SparseEmbedding": "tables.sparse_embedding",
        "VocabularyEmbedding": "vocabulary",
        "VocabularyLinear": "vocabulary",
        "shard": "plan",
    }
)


if not TYPE_CHECKING:  # else type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
