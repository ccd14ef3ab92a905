"""Logits whose classes are cut into shards: losses and the best class without whole logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep.errors import TaskError
from lockstep.nn.sharded.regions import Region
from lockstep.nn.sharded.sharded_tensor import ShardedTensor, name_of_function
from lockstep.parallel.layout import Range, split

_ELEMENT_WISE = frozenset(
    {
        "__add__", "__iadd__", "__imul__", "__isub__", "__itruediv__", "__mul__", "__neg__",
        "__pow__", "__radd__", "__rmul__", "__rsub__", "__sub__", "__truediv__", "add", "add_",
        "bfloat16", "clamp", "clone", "contiguous", "detach", "div", "div_", "divide", "double",
        "exp", "float", "half", "log", "masked_fill", "mul", "mul_", "multiply", "nan_to_num",
        "neg", "pow", "sigmoid", "sub", "sub_", "subtract", "tanh", "to", "true_divide", "type",
        "type_as",
    }
)  # fmt: skip
"""Functions whose result is in shards of classes as its argument is."""
_OF_OTHER_DIMS = frozenset({"__getitem__", "flatten", "squeeze", "unsqueeze"})
"""Functions that may leave the classes as they are."""
_INSTEAD = frozenset(
    {"argmax", "cross_entropy", "log_softmax", "nll_loss", "reshape", "size", "softmax", "view"}
)
"""Functions of torch for which `ShardedLogits` has methods."""


class ShardedLogits(ShardedTensor):
    """Logits [..., classes] of which each shard has those of some classes.

    `cross_entropy`, `log_softmax`, `softmax` and `nll_loss` of `torch.nn.functional`, `argmax` over
    the classes, and what is done to each logit by itself, work without whole logits; `whole` gives
    these. `shape` is that of the whole logits.

    Attributes:
        num_classes: number of classes of all shards.
    """

    remedy: ClassVar[str] = (
        "logits in shards of the vocabulary are for cross_entropy, nll_loss, log_softmax, softmax, "
        "argmax(-1) and element-wise functions; use logits.whole() for others"
    )

    def __init__(self, parts: Sequence[Tensor], region: Region, num_classes: int) -> None:
        super().__init__(parts, region)
        self.num_classes = num_classes

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits of all classes."""
        return torch.Size([*self.parts[0].shape[:-1], self.num_classes])

    def size(self, dim: int | None = None) -> Any:
        """As `torch.Tensor.size` of the logits of all classes."""
        return self.shape if dim is None else self.shape[dim]

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
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """As `torch.nn.functional.cross_entropy` of [N, classes] and class numbers [N].

        Raises:
            TaskError: an argument is not supported for logits in shards.
        """
        self._check_loss("cross_entropy", target, weight, size_average, reduce)
        counts = target != ignore_index
        log_total = self._log_total()
        losses = log_total - self._picked(target)
        if label_smoothing:
            mean = self.region.gather([part.sum(-1) for part in self.parts]) / self.num_classes
            losses = (1 - label_smoothing) * losses + label_smoothing * (log_total - mean)
        return _reduced(losses, counts, reduction)

    def nll_loss(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """As `torch.nn.functional.nll_loss` of log-probabilities [N, classes] and numbers [N].

        Raises:
            TaskError: an argument is not supported for logits in shards.
        """
        self._check_loss("nll_loss", target, weight, size_average, reduce)
        return _reduced(-self._picked(target), target != ignore_index, reduction)

    def log_softmax(
        self, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3
    ) -> ShardedLogits:
        """As `torch.nn.functional.log_softmax` over the classes, in shards as the logits are.

        Raises:
            TaskError: it is asked for over another dimension.
        """
        self._check_dim("log_softmax", dim)
        logits = self if dtype is None else self.to(dtype)
        totals = self.region.spread(logits._log_total().unsqueeze(-1))
        parts = [part - total for part, total in zip(logits.parts, totals, strict=True)]
        return ShardedLogits(parts, self.region, self.num_classes)

    def softmax(
        self, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3
    ) -> ShardedLogits:
        """As `log_softmax`, the probabilities themselves."""
        self._check_dim("softmax", dim)
        parts = [part.exp() for part in self.log_softmax(dim, dtype).parts]
        return ShardedLogits(parts, self.region, self.num_classes)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The class of the greatest logit, the first of equals, as `torch.argmax` over classes.

        Raises:
            TaskError: it is asked for over another dimension.
        """
        self._check_dim("argmax", dim)
        best = [part.detach().max(-1) for part in self.parts]
        numbers = [b.indices + r.first for b, r in zip(best, self.ranges, strict=True)]
        values = self.region.axis.all([b.values for b in best])
        everyone = self.region.axis.all(numbers)
        top, number = values[0], everyone[0]
        for value, other in zip(values[1:], everyone[1:], strict=True):
            is_better = value > top  # of equals the first shard's, as in one tensor
            top, number = torch.where(is_better, value, top), torch.where(is_better, other, number)
        return number.unsqueeze(-1) if keepdim else number

    def view(self, *shape: Any) -> ShardedLogits:
        """As `reshape`."""
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> ShardedLogits:
        """As `torch.reshape` of the logits of all classes to [..., classes].

        Raises:
            TaskError: classes are not the last dimension of the new shape.
        """
        sizes = tuple(shape[0]) if shape and isinstance(shape[0], Sequence) else shape
        pairs = zip(self.parts, self.ranges, strict=True)
        try:
            if not sizes or sizes[-1] not in (self.num_classes, -1):
                raise ValueError("the last dimension is no longer that of the classes")
            parts = [part.reshape(*sizes[:-1], len(own)) for part, own in pairs]
        except (RuntimeError, TypeError, ValueError) as error:
            raise TaskError(f"{self._call(Tensor.reshape)}: to {sizes}: {self.remedy}") from error
        return ShardedLogits(parts, self.region, self.num_classes)

    def __getitem__(self, index: Any) -> ShardedLogits:
        """Logits of all classes at some places.

        Raises:
            TaskError: the index chooses among classes.
        """
        items = index if isinstance(index, tuple) else (index,)
        behind = next((i for i, item in enumerate(items) if item is Ellipsis), None)
        if behind is not None:
            may_choose = items[behind + 1 :]
        else:
            num_dims = sum(map(_num_dims, items))
            may_choose = items[-1:] if num_dims >= len(self.shape) else ()
        if any(item is not None and item != slice(None) for item in may_choose[-1:]):
            raise TaskError(f"{self._call(Tensor.__getitem__)}: {self.remedy}")
        chosen: ShardedLogits = super().__getitem__(index)  # type: ignore[misc]
        return chosen

    def _log_total(self) -> Tensor:
        """The logarithm of the sum of exponentials over all classes [...]."""
        # The greatest logit only shifts all of them: it needs no gradient.
        top = self.region.axis.maximum([part.detach().amax(-1) for part in self.parts])
        exps = [(part - top.unsqueeze(-1)).exp().sum(-1) for part in self.parts]
        return self.region.gather(exps).log() + top

    def _picked(self, target: Tensor) -> Tensor:
        """The logits of some classes [...], 0 for a number that is no class."""
        right = []
        for part, own in zip(self.parts, self.ranges, strict=True):
            place, is_here = places(target, own)
            picked = part.gather(-1, place.unsqueeze(-1)).squeeze(-1)
            right.append(picked.masked_fill(~is_here, 0.0))
        return self.region.gather(right)

    def _check_loss(self, name: str, target: Tensor, *unsupported: object) -> None:
        is_plain = all(value is None for value in unsupported)
        if not is_plain or target.is_floating_point() or self.parts[0].dim() != 2:
            raise TaskError(
                f"{name}: logits in shards of the vocabulary (num_shards) must be [N, classes], "
                "the target class numbers [N], and weight, size_average and reduce None; give "
                "logits.whole() otherwise"
            )

    def _check_dim(self, name: str, dim: int | None) -> None:
        if dim not in (-1, self.parts[0].dim() - 1):
            raise TaskError(
                f"{name}: dim={dim}: logits in shards of the vocabulary (num_shards) have one over "
                "the classes, the last dimension; use logits.whole() otherwise"
            )

    def _instead(self, func: Callable[..., Any]) -> Callable[..., Any] | None:
        name = name_of_function(func)
        if name not in _INSTEAD:
            return None

        def method(*args: Any, **kwargs: Any) -> Any:
            arguments = [*args] if args else [kwargs.pop("input", None)]
            if not isinstance(arguments[0], ShardedLogits):
                raise TaskError(f"{self._call(func)}: {self.remedy}")
            return getattr(ShardedLogits, name)(*arguments, **kwargs)

        return method

    def _like(self, func: Callable[..., Any], parts: Sequence[Tensor]) -> ShardedTensor:
        name, widths = name_of_function(func), [len(r) for r in self.ranges]
        is_known = name in _ELEMENT_WISE or name in _OF_OTHER_DIMS
        if not is_known or [part.shape[-1:] for part in parts] != [(w,) for w in widths]:
            raise TaskError(f"{self._call(func)}: {self.remedy}")
        return ShardedLogits(parts, self.region, self.num_classes)


def _num_dims(item: Any) -> int:
    """Number of dimensions that an item of an index takes."""
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.dim()
    return 0 if item is None else 1


def places(numbers: Tensor, own: Range) -> tuple[Tensor, Tensor]:
    """Where numbers lie in a shard's range, 0 for those that do not, and which ones do."""
    is_here = (numbers >= own.first) & (numbers < own.last)
    return (numbers - own.first).masked_fill(~is_here, 0), is_here


def _reduced(losses: Tensor, counts: Tensor, reduction: str) -> Tensor:
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")  # as torch says it
    losses = losses.masked_fill(~counts, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()
