"""Sketched layers in shards: what is summed over shards is the sketch, not the features.

All four matrices are cut along features, so each shard has its part of all parameters and of all
work. Between the two products the sketch is summed: 2 r numbers for each row, where a dense layer
sums its output. Signs of a shard are made from the seed, and never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lockstep.nn.sharded.layers import ShardedModule
from lockstep.nn.sharded.regions import Region
from lockstep.nn.sharded.sharded_tensor import ShardedTensor
from lockstep.parallel.layout import Range, split
from lockstep.systems.sketched.linear import SKLinear
from lockstep.systems.sketched.products import Fused, SignKey, from_sketch, into_sketch, sign_matrix


class SketchedColumn(ShardedModule, SKLinear):  # type: ignore[misc]
    """A sketched layer whose input and output features are cut."""

    kinds = ("sketched",)
    cut_dims = MappingProxyType({"S1": 1, "S2": 1, "bias": 0})

    def cut(self, num_shards: int, made: dict[int, Any], name: str) -> None:
        """See `ShardedModule.cut`; signs are made for each shard from now on."""
        super().cut(num_shards, made, name)
        if self.sketch_kind != "data":
            self.U1 = self.U2 = None  # type: ignore[assignment]
        self._signs: dict[tuple[str, Range], Tensor] = {}

    def made(self, seed: int, layer: int) -> dict[str, Tensor]:
        """See `Sketched.made`; nothing once it is cut."""
        if self.region is None:
            return super().made(seed, layer)
        self._signs = {}  # another key may have been loaded
        return {}

    def forward(self, x: Any) -> Any:
        """[..., in], whole or cut into shards, to [..., out], cut into shards."""
        if self.region is None:
            return super().forward(x)
        return ShardedTensor(self._expanded(self.region, x), self.region)

    def _expanded(self, region: Region, x: Any) -> list[Tensor]:
        """The output features of each shard of this rank."""
        parts = [self._fused(shard) for shard in region.shards]
        if isinstance(x, ShardedTensor):
            inputs = x.parts
        else:
            inputs = region.slice(x, [len(r) for r in self._ranges(self.in_features)])
        sketch = region.gather(
            [self._sketch_of(x, fused) for x, fused in zip(inputs, parts, strict=True)]
        )
        spread = region.spread(sketch)
        return [self._expand_of(h, fused) for h, fused in zip(spread, parts, strict=True)]

    def _sketch_of(self, x: Tensor, fused: Fused) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        h_2 = into_sketch(rows, fused.U2, self.rank, fused.first_in)
        return torch.cat([rows @ fused.S1.t(), h_2], 1).view(*x.shape[:-1], 2 * self.rank)

    def _expand_of(self, h: Tensor, fused: Fused) -> Tensor:
        h_1, h_2 = h.reshape(-1, 2 * self.rank).chunk(2, dim=1)
        y = from_sketch(h_1, h_2, fused)
        return y.view(*h.shape[:-1], y.shape[-1])

    def _fused(self, shard: int) -> Fused:
        own_in = self._ranges(self.in_features)[shard]
        own_out = self._own_out(shard)
        return Fused(
            getattr(self, f"S1_{shard}"),
            self._of_shard("S2", shard),
            self._signs_of("U1", own_out),
            self._signs_of("U2", own_in),
            self._of_shard("bias", shard),
            self.scale,
            own_in.first,
            own_out.first,
        )

    def _own_out(self, shard: int) -> Range:
        return self._ranges(self.out_features)[shard]

    def _of_shard(self, key: str, shard: int) -> Any:
        if key not in self.whole_shapes:
            return getattr(self, key)
        return getattr(self, f"{key}_{shard}")

    def _ranges(self, features: int) -> Sequence[Range]:
        return split(features, self.num_shards)

    def _signs_of(self, name: str, features: Range) -> Tensor:
        """U1 or U2 of some features; made once."""
        if (name, features) not in self._signs:
            self._signs[name, features] = self._made_for(name, features)
        return self._signs[name, features]

    def _made_for(self, name: str, features: Range) -> Tensor:
        if self.sketch_kind == "data":
            whole: Tensor = getattr(self, name)
            return whole[:, features.first : features.last].contiguous()
        like: Tensor = self._parameters["S1_0"]  # type: ignore[assignment]
        seed, layer = self.key()
        is_fold = self.sketch_kind == "fold"
        num_rows = 1 if is_fold else self.rank
        key, columns = SignKey(seed, layer, name), range(*features)
        full = sign_matrix(key, num_rows, columns, like.dtype, like.device)
        return full[0] if is_fold else full


class SketchedRow(SketchedColumn):
    """A sketched layer whose input features are cut, and whose output is whole on every rank."""

    kinds = ("sketched_row",)
    cut_dims = MappingProxyType({"S1": 1})

    def forward(self, x: Any) -> Any:
        """[..., in], whole or cut into shards, to [..., out]."""
        if self.region is None:
            return super().forward(x)
        parts = [self._fused(shard) for shard in self.region.shards]
        if isinstance(x, ShardedTensor):
            inputs = x.parts
        else:
            inputs = self.region.slice(x, [len(r) for r in self._ranges(self.in_features)])
        sketch = self.region.gather(
            [self._sketch_of(x, fused) for x, fused in zip(inputs, parts, strict=True)]
        )
        # Every rank expands the whole sketch: the output belongs to no shard.
        return self._expand_of(sketch, parts[0])

    def _own_out(self, shard: int) -> Range:
        return Range(0, self.out_features)
