"""A vocabulary cut into shards: the embedding and the output layer."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.nn.sharded.layers import ColumnLinear, ShardedModule
from lockstep.nn.sharded.logits import ShardedLogits, places
from lockstep.nn.sharded.sharded_tensor import ShardedTensor
from lockstep.parallel.layout import Range, split


class VocabularyEmbedding(ShardedModule, nn.Embedding):
    """An embedding of which each shard has some of the rows."""

    cut_dims = MappingProxyType({"weight": 0})
    may_be_uneven = True

    def forward(self, input: Tensor) -> Tensor:
        """Numbers of tokens [...] to embeddings [..., embedding_dim]."""
        if self.region is None:
            return super().forward(input)
        ranges = split(self.num_embeddings, self.num_shards)
        parts = []
        for shard, weight in zip(self.region.shards, self.own("weight"), strict=True):
            place, is_here = places(input, ranges[shard])
            padding = self._padding(ranges[shard])
            rows = F.embedding(place, weight, padding)
            parts.append(rows.masked_fill(~is_here.unsqueeze(-1), 0.0))
        return self.region.gather(parts)

    def _padding(self, own: Range) -> int | None:
        if self.padding_idx is None or not own.first <= self.padding_idx < own.last:
            return None
        return self.padding_idx - own.first


class VocabularyLinear(ColumnLinear):
    """An output layer of which each shard computes the logits of some tokens."""

    may_be_uneven = True

    def _result(self, parts: Sequence[Tensor]) -> ShardedTensor:
        assert self.region is not None
        return ShardedLogits(parts, self.region, self.out_features)
