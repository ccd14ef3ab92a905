"""Sketched layers in shards: what is summed over shards is the sketch, not the features.

All four matrices are cut along features, so each shard has its part of all parameters and of all
work. Between the two products the sketch is summed: 2 r numbers for each row, where a dense layer
sums its output. Signs of a shard are made from the seed, and never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from lockstep.nn.sharded.layers import ShardedModule
from lockstep.nn.sharded.regions import Region
from lockstep.nn.sharded.sharded_tensor import ShardedTensor
from lockstep.parallel.layout import Range, split
from lockstep.systems.sketched.linear import SKLinear
from lockstep.systems.sketched.products import Fused, SignKey, expanded_rows, sketched_rows


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
        sketch, parts = self._sketch(region, x)
        spread = region.spread(sketch)
        return [expanded_rows(h, fused) for h, fused in zip(spread, parts, strict=True)]

    def _sketch(self, region: Region, x: Any) -> tuple[Tensor, list[Fused]]:
        """The sum of all shards' sketches, and the operands of each shard of this rank."""
        parts = [self._fused(shard) for shard in region.shards]
        if isinstance(x, ShardedTensor):
            inputs = x.parts
        else:
            inputs = region.slice(x, [len(r) for r in self._ranges(self.in_features)])
        sketches = [sketched_rows(x, fused) for x, fused in zip(inputs, parts, strict=True)]
        return region.gather(sketches), parts

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
        return self.signs(SignKey(*self.key(), name), range(*features), like)


class SketchedRow(SketchedColumn):
    """A sketched layer whose input features are cut, and whose output is whole on every rank."""

    kinds = ("sketched_row",)
    cut_dims = MappingProxyType({"S1": 1})

    def forward(self, x: Any) -> Any:
        """[..., in], whole or cut into shards, to [..., out]."""
        if self.region is None:
            return super().forward(x)
        sketch, parts = self._sketch(self.region, x)
        # Every rank expands the whole sketch: the output belongs to no shard.
        return expanded_rows(sketch, parts[0])

    def _own_out(self, shard: int) -> Range:
        return Range(0, self.out_features)
