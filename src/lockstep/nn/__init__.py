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

_HOMES: Mapping[str, str] = MappingProxyType(
    {
        "ColumnLinear": "sharded.layers",
        "Heads": "sharded.plan",
        "Pipeline": "pipeline",
        "RowLinear": "sharded.layers",
        "ShardedLogits": "sharded.logits",
        "ShardedTensor": "sharded.sharded_tensor",
        "SparseEmbedding": "sparse_embedding",
        "VocabularyEmbedding": "sharded.layers",
        "VocabularyLinear": "sharded.layers",
        "shard": "sharded.plan",
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
