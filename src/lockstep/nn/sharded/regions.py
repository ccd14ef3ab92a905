"""Entering and leaving a region in which features are cut into shards.

`spread` and `gather` are all there is of tensor parallelism, and each is the other's gradient
(Shoeybi et al. 2019, section 3, name them f and g): a replicated tensor goes to each shard, and the
parts of all shards are summed. Both sums go along the canonical tree over shards, so no result
depends on which rank computes which shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.data.random import Stream, forked_generators, random_key, seed_torch
from lockstep.parallel.axes import ShardAxis

T = TypeVar("T")

Moment = Literal["shards_forward", "shards_backward"]
"""Before a sum over shards, in a forward and in a backward pass."""


def _nothing(moment: Moment) -> None:
    pass


def _no_model() -> None:
    return None


class Region:
    """The axis of features as the layers of a model use it.

    Attributes:
        axis: which shards this rank computes, and their sums.
        model: function that gives the model whose layers use it, for messages, or None.
        calls: where functions were called on tensors in shards, by name, if that is noted.
    """

    def __init__(self, axis: ShardAxis, at: Callable[[Moment], None] = _nothing) -> None:
        self.axis = axis
        self.model: Callable[[], nn.Module | None] = _no_model
        self.calls: dict[str, str] | None = None
        self._at = at
        self._spread: tuple[weakref.ref[Tensor], bool, list[Tensor]] | None = None

    @property
    def shards(self) -> range:
        """The shards that this rank computes."""
        return range(*self.axis.own)

    def spread(self, x: Tensor) -> list[Tensor]:
        """A replicated tensor for each shard of this rank; its gradient is summed over all shards.

        Layers that take the same tensor one after another share what was spread, so that their
        gradients are summed over shards once.
        """
        with_gradient = torch.is_grad_enabled()
        if self._spread is not None:
            known, with_gradient_then, parts = self._spread
            if known() is x and with_gradient == with_gradient_then:
                return parts
        if not (with_gradient and x.requires_grad):
            return [x for _ in self.shards]
        parts = list(_Spread.apply(self, x))  # type: ignore[no-untyped-call]
        self._spread = (weakref.ref(x), with_gradient, parts)
        return parts

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of all shards' parts, on every rank; each part gets its whole gradient."""
        self._spread = None
        total: Tensor = _Gather.apply(self, *parts)  # type: ignore[no-untyped-call]
        return total

    def join(self, parts: Sequence[Tensor], dim: int, widths: Sequence[int]) -> Tensor:
        """All shards' parts one behind the other along a dimension, on every rank.

        Args:
            parts: tensors of this rank's shards; sizes differ in `dim` only.
            dim: dimension that is cut.
            widths: size in `dim` of each shard, for all shards.
        """
        self._spread = None
        joined: Tensor = _Join.apply(self, dim, tuple(widths), *parts)  # type: ignore[no-untyped-call]
        return joined

    def slice(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """The parts of a replicated tensor's last dim for each shard of this rank.

        Its gradient is put together from those of all shards.

        Args:
            x: [..., n].
            widths: size of each shard's part, for all shards.
        """
        if not (torch.is_grad_enabled() and x.requires_grad):
            return _sliced(x, widths, self.shards)
        return list(_Slice.apply(self, tuple(widths), x))  # type: ignore[no-untyped-call]

    def sum(self, parts: Sequence[Tensor], moment: Moment) -> Tensor:
        """The sum over all shards, without a gradient; a collective."""
        self._at(moment)
        return self.axis.total(parts)

    def each(self, compute: Callable[[int], T], draws: bool) -> list[T]:
        """What `compute` makes for each shard of this rank, by its place among them.

        Random numbers that it draws depend on the shard and on the state of torch's generators,
        never on which other shards this rank computes.

        Args:
            compute: function from 0, 1, … to a result.
            draws: whether it may draw random numbers.
        """
        if not draws:
            return [compute(place) for place in range(len(self.shards))]
        key = int(torch.randint(2**62, (), dtype=torch.int64))
        results = []
        with forked_generators():
            for place, shard in enumerate(self.shards):
                seed_torch(random_key(key, Stream.SHARD, shard))
                results.append(compute(place))
        return results


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, x: Tensor) -> tuple[Tensor, ...]:
        ctx.region = region
        return tuple(x.view_as(x) for _ in region.shards)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        # Strides may change which kernels run later, and so what they round.
        parts = [g.contiguous() for g in gradients]
        return None, ctx.region.sum(parts, "shards_backward")


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, *parts: Tensor) -> Tensor:
        ctx.num_parts = len(parts)
        total = region.sum([p.contiguous() for p in parts], "shards_forward")
        # Of one shard the sum is the shard itself, which a function must not return as it came.
        return total.view_as(total) if any(total is p for p in parts) else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return (None, *[gradient] * ctx.num_parts)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: Region, dim: int, widths: Sequence[int], *parts: Tensor
    ) -> Tensor:
        ctx.region, ctx.dim, ctx.widths = region, dim, widths
        region._at("shards_forward")
        return _joined(region, dim, widths, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        pieces = gradient.split(ctx.widths, ctx.dim)  # type: ignore[no-untyped-call]
        return (None, None, None, *(pieces[shard].contiguous() for shard in ctx.region.shards))


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, widths: Sequence[int], x: Tensor) -> tuple[Tensor, ...]:
        ctx.region, ctx.widths = region, widths
        return tuple(_sliced(x, widths, region.shards))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.region._at("shards_backward")
        return None, None, _joined(ctx.region, -1, ctx.widths, gradients)


def _sliced(x: Tensor, widths: Sequence[int], shards: range) -> list[Tensor]:
    pieces = torch.split(x, list(widths), -1)
    # Each of its own memory: strides may change which kernels run, and so what they round.
    return [pieces[shard].clone(memory_format=torch.contiguous_format) for shard in shards]


def _joined(region: Region, dim: int, widths: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    # Shards may differ in width, and what is exchanged has one shape: the widest shard's.
    padded = []
    for part in parts:
        shape = list(part.shape)
        shape[dim] = max(widths)
        padded.append(part.new_zeros(shape))
        padded[-1].narrow(dim, 0, part.shape[dim]).copy_(part)
    everyone = region.axis.all(padded)
    return torch.cat(
        [part.narrow(dim, 0, width) for part, width in zip(everyone, widths, strict=True)], dim
    )
