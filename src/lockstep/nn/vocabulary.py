"""A vocabulary cut into shards: embedding, output layer, and cross entropy without whole logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import TaskError
from lockstep.nn.layers import ColumnLinear, ShardedModule
from lockstep.nn.regions import Region
from lockstep.nn.sharded_tensor import ShardedTensor
from lockstep.parallel.layout import Range, split

_KEEP_CLASSES = frozenset(
    getattr(Tensor, name)
    for name in (
        "float", "double", "half", "bfloat16", "to", "type", "contiguous", "clone", "detach",
        "__mul__", "__rmul__", "__truediv__", "__getitem__", "flatten", "view", "reshape", "mul",
        "div",
    )
) | {torch.flatten, torch.reshape}  # fmt: skip


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
            place, is_here = _places(input, ranges[shard])
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


class ShardedLogits(ShardedTensor):
    """Logits [..., classes] of which each shard has those of some classes.

    `torch.nn.functional.cross_entropy` and `argmax` over the classes work without whole logits;
    `whole` gives these.

    Attributes:
        num_classes: number of classes of all shards.
    """

    def __init__(self, parts: Sequence[Tensor], region: Region, num_classes: int) -> None:
        super().__init__(parts, region)
        self.num_classes = num_classes

    @property
    def ranges(self) -> list[Range]:
        """The classes of each shard of this rank."""
        everyone = split(self.num_classes, self.region.axis.num_shards)
        return [everyone[shard] for shard in self.region.shards]

    def whole(self) -> Tensor:
        """The logits of all classes [..., classes], on every rank."""
        widths = [len(r) for r in split(self.num_classes, self.region.axis.num_shards)]
        return self.region.join(self.parts, -1, widths)

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """As `torch.nn.functional.cross_entropy` of [N, classes] and class numbers [N].

        Raises:
            TaskError: an argument is not supported for logits in shards.
        """
        flat = [part for part in self.parts if part.dim() == 2]
        if weight is not None or target.is_floating_point() or len(flat) != len(self.parts):
            raise TaskError(
                "cross_entropy: logits in shards of the vocabulary (num_shards) must be "
                "[N, classes], the target class numbers [N], and weight None; give "
                "logits.whole() otherwise"
            )
        counts = target != ignore_index
        # The greatest logit only shifts all of them: it needs no gradient.
        top = self.region.axis.maximum([part.detach().amax(-1) for part in self.parts])
        exps = [(part - top.unsqueeze(-1)).exp().sum(-1) for part in self.parts]
        log_total = self.region.gather(exps).log() + top
        right = []
        for part, own in zip(self.parts, self.ranges, strict=True):
            place, is_here = _places(target, own)
            picked = part.gather(-1, place.unsqueeze(-1)).squeeze(-1)
            right.append(picked.masked_fill(~is_here, 0.0))
        losses = log_total - self.region.gather(right)
        if label_smoothing:
            mean = self.region.gather([part.sum(-1) for part in self.parts]) / self.num_classes
            losses = (1 - label_smoothing) * losses + label_smoothing * (log_total - mean)
        losses = losses.masked_fill(~counts, 0.0)
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The class of the greatest logit, the first of equals, as `torch.argmax` over classes.

        Raises:
            TaskError: it is asked for over another dimension.
        """
        last = self.parts[0].dim() - 1
        if dim not in (-1, last):
            raise TaskError(
                f"argmax: dim={dim}: logits in shards of the vocabulary (num_shards) have one over "
                "the classes, the last dimension; use logits.whole() otherwise"
            )
        best = [part.detach().max(-1) for part in self.parts]
        numbers = [b.indices + r.first for b, r in zip(best, self.ranges, strict=True)]
        values = self.region.axis.all([b.values for b in best])
        everyone = self.region.axis.all(numbers)
        top, number = values[0], everyone[0]
        for value, other in zip(values[1:], everyone[1:], strict=True):
            is_better = value > top  # of equals the first shard's, as in one tensor
            top, number = torch.where(is_better, value, top), torch.where(is_better, other, number)
        return number.unsqueeze(-1) if keepdim else number

    def _instead(self, func: Callable[..., Any]) -> Callable[..., Any] | None:
        return _INSTEAD.get(func)

    def _like(self, func: Callable[..., Any], parts: Sequence[Tensor]) -> ShardedTensor:
        widths = [len(r) for r in self.ranges]
        if func in _KEEP_CLASSES and [part.shape[-1:] for part in parts] == [(w,) for w in widths]:
            return ShardedLogits(parts, self.region, self.num_classes)
        return ShardedTensor(parts, self.region)


_INSTEAD: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        F.cross_entropy: lambda input, *args, **kwargs: input.cross_entropy(*args, **kwargs),
        torch.argmax: ShardedLogits.argmax,
        Tensor.argmax: ShardedLogits.argmax,
    }
)
"""What is called instead of functions that need all classes."""


def _places(numbers: Tensor, own: Range) -> tuple[Tensor, Tensor]:
    """Where numbers lie in a shard's range, 0 for those that do not, and which ones do."""
    is_here = (numbers >= own.first) & (numbers < own.last)
    return (numbers - own.first).masked_fill(~is_here, 0), is_here
