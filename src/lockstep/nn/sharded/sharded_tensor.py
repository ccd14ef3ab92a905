"""A tensor whose features are cut into shards, for code that was written for whole tensors.

Between a column and a row layer each shard is computed by itself. `ShardedTensor` takes any torch
function, applies it to this rank's shards one after another, and gives the results as one again. So
a model's own code between the two layers (activations, attention by heads, dropout) stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.config.parsing import shown
from lockstep.errors import LockstepError, TaskError
from lockstep.nn.sharded.regions import Region

_INNER = ("torch", "lockstep.nn", "lockstep.parallel")
"""Packages that a user's code calls; their lines are left out of messages."""
_OUTER = ("lockstep.engine",)
"""Packages that call the user's code."""


def callers() -> Iterator[FrameType]:
    """The frames of the present calls, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(trace: TracebackType | None) -> list[FrameType]:
    """The frames that an exception went through, the innermost first."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def location(model: nn.Module | None, frames: Iterable[FrameType]) -> str:
    """Where that is: " in blocks.0.norm (LayerNorm) at model.py:12", as far as it is known.

    Args:
        model: model whose modules are named.
        frames: frames of calls, the innermost first.
    """
    frames = list(takewhile(lambda frame: not _is_in(frame, _OUTER), frames))
    owners = (frame.f_locals.get("self") for frame in frames)
    module = next((owner for owner in owners if isinstance(owner, nn.Module)), None)
    known = {id(m): name for name, m in model.named_modules()} if model is not None else {}
    where = ""
    if module is not None:
        name, kind = known.get(id(module), ""), type(module).__name__
        where = f" in {name} ({kind})" if name else f" in {kind}"
    line = next((frame for frame in frames if not _is_in(frame, _INNER)), None)
    if line is None:
        return where
    return f"{where} at {Path(line.f_code.co_filename).name}:{line.f_lineno}"


def name_of(model: nn.Module | None, tensor: Tensor) -> str:
    """What to call a tensor: "buffer norm.mean" if it is one of a model's, or a view of one."""
    named = [] if model is None else [("buffer", *pair) for pair in model.named_buffers()]
    named += [] if model is None else [("parameter", *pair) for pair in model.named_parameters()]
    for kind, name, own in named:
        if (
            tensor is own
            or tensor._base is own
            or (tensor.data_ptr() == own.data_ptr() and tensor.numel() > 0)
        ):
            return f"{kind} {name}"
    return f"a tensor of shape {tuple(tensor.shape)}"


def _is_in(frame: FrameType, packages: Sequence[str]) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return any(module == package or module.startswith(f"{package}.") for package in packages)


_DROPOUTS = frozenset(
    getattr(F, name)
    for name in (
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    )
)  # fmt: skip
_RANDOM = frozenset({F.rrelu, F.gumbel_softmax}) | frozenset(
    getattr(torch, name)
    for name in (
        "dropout", "alpha_dropout", "feature_dropout", "bernoulli", "rand_like", "randn_like",
        "randint_like", "multinomial", "normal", "poisson", "rrelu", "native_dropout",
    )
)  # fmt: skip
"""Other functions that may draw random numbers."""
_IN_PLACE = frozenset(
    {
        "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
        "__ipow__", "__iand__", "__ior__", "__ixor__", "__setitem__",
    }
)  # fmt: skip


class ShardedTensor:
    """This rank's shards of a tensor.

    It has the attributes and methods of a tensor: those of each shard. Attributes that are no
    tensors, such as `shape`, are those of this rank's first shard.

    Attributes:
        parts: tensors of this rank's shards.
        region: region that they are in.
        remedy: what to do about a function that does not work for each shard by itself.
    """

    remedy: ClassVar[str] = (
        "what needs all features at once, such as a norm or a softmax over them, belongs before "
        "the layer that cuts them or behind the row layer that sums them; else leave these layers "
        "out of the plan of lockstep.nn.shard"
    )

    def __init__(self, parts: Sequence[Tensor], region: Region) -> None:
        self.parts = list(parts)
        self.region = region

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply a torch function to each shard of this rank.

        Raises:
            TaskError: it does not work for each shard by itself, changes a tensor that is not in
                shards, draws random numbers that would depend on the rank, or gives shards results
                that are no tensors and not the same.
        """
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        region = next(leaf.region for leaf in leaves if isinstance(leaf, ShardedTensor))
        own = next(leaf for leaf in leaves if isinstance(leaf, ShardedTensor))
        instead = own._instead(func)
        if instead is not None:
            return instead(*args, **(kwargs or {}))
        if region.calls is not None:
            region.calls.setdefault(name_of_function(func), own._call(func))
        own._check_unchanged(func, _changed_by(func, args, kwargs or {}))
        others = [t for t in leaves if isinstance(t, Tensor) and not t.is_inference()]
        versions = [t._version for t in others]
        # What is replicated and enters here has a part of its gradient from every shard.
        leaves = [_entering(leaf, region) for leaf in leaves]

        def compute(place: int) -> Any:
            own = [leaf[place] if type(leaf) is _Each else leaf for leaf in leaves]
            inner_args, inner_kwargs = pytree.tree_unflatten(own, spec)
            return func(*inner_args, **inner_kwargs)

        draws = _may_draw(func, args, kwargs or {})
        before = None if draws else torch.default_generator.get_state()
        results = own._for_each(func, compute, draws)
        own._check_unchanged(
            func, [t for t, version in zip(others, versions, strict=True) if t._version != version]
        )
        if before is not None and not torch.equal(before, torch.default_generator.get_state()):
            raise TaskError(
                f"{own._call(func)}: draws random numbers for features that are cut into shards "
                "(num_shards), other ones on each rank; use torch.nn.functional.dropout, or draw "
                "before the layer that cuts"
            )
        return own._merged(func, results)

    def _instead(self, func: Callable[..., Any]) -> Callable[..., Any] | None:
        """What is to be called instead of a function that needs all shards at once, if any."""
        return None

    def _like(self, func: Callable[..., Any], parts: Sequence[Tensor]) -> ShardedTensor:
        """The result of a function of this tensor."""
        return ShardedTensor(parts, self.region)

    def _call(self, func: Callable[..., Any]) -> str:
        """The present call of a function, with its place in the model's code, for messages."""
        return name_of_function(func) + location(self.region.model(), callers())

    def _for_each(
        self, func: Callable[..., Any], compute: Callable[[int], Any], draws: bool
    ) -> list[Any]:
        """What a function gives for each shard.

        Raises:
            TaskError: it does not work for a shard by itself.
        """
        try:
            return self.region.each(compute, draws)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, LockstepError | torch.OutOfMemoryError):
                raise
            what = str(error).splitlines()[:1]
            raise TaskError(
                f"{self._call(func)}: does not work for each shard of features by itself "
                f"(num_shards): {''.join(what)}; {self.remedy}"
            ) from error

    def _check_unchanged(self, func: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        """Refuse a change of a tensor that is not in shards: each rank would make another one.

        Raises:
            TaskError: there is such a tensor; naming it.
        """
        if tensors:
            raise TaskError(
                f"{self._call(func)}: changes {name_of(self.region.model(), tensors[0])} "
                "by features that are cut into shards (num_shards), to other values on each rank; "
                "change it by features that are whole, before the layer that cuts them or behind "
                "the row layer that sums them, or leave these layers out of the plan of "
                "lockstep.nn.shard"
            )

    def _merged(self, func: Callable[..., Any], results: Sequence[Any]) -> Any:
        _, spec = pytree.tree_flatten(results[0])
        columns = list(zip(*(pytree.tree_flatten(r)[0] for r in results), strict=True))
        merged: list[Any] = []
        for column in columns:
            if isinstance(column[0], Tensor):
                merged.append(self._like(func, column))
            elif other := [value for value in column if not _equal(value, column[0])]:
                raise TaskError(
                    f"{self._call(func)}: gives {shown(column[0])} for one shard of features and "
                    f"{shown(other[0])} for another (num_shards); {self.remedy}"
                )
            else:
                merged.append(column[0])
        return pytree.tree_unflatten(merged, spec)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = getattr(Tensor, name)
        if callable(member):
            return lambda *args, **kwargs: self.__torch_function__(
                member, (ShardedTensor,), (self, *args), kwargs
            )
        value = getattr(self.parts[0], name)
        if isinstance(value, Tensor):
            return self._like(member, [getattr(part, name) for part in self.parts])
        return value

    def __repr__(self) -> str:
        """The shapes of the shards."""
        shapes = ", ".join(str(tuple(part.shape)) for part in self.parts)
        return f"ShardedTensor({shapes})"

    def __len__(self) -> int:
        """Size of the first dimension."""
        return len(self.parts[0])

    def __iter__(self) -> Iterator[Any]:
        """Slices along the first dimension."""
        return iter(self.unbind(0))

    def __bool__(self) -> bool:
        """Refuse: shards may differ.

        Raises:
            TaskError: always.
        """
        raise TaskError(
            "a condition depends on a tensor whose features are cut into shards (num_shards); use "
            "torch.where, or decide before the layer that cuts"
        )


class _Each(list[Tensor]):
    """What each shard gets in place of one argument."""


def _entering(leaf: Any, region: Region) -> Any:
    if isinstance(leaf, ShardedTensor):
        if leaf.region is not region:
            raise TaskError("tensors that are cut into shards by two models were mixed")
        return _Each(leaf.parts)
    if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
        return _Each(region.spread(leaf))
    return leaf


def _changed_by(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors not in shards that a call is made to change."""
    name, changed = name_of_function(func), [kwargs.get("out")]
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        changed += args[:1]
    is_training = kwargs.get("training") or kwargs.get("use_input_stats")
    if func in (F.batch_norm, F.instance_norm) and is_training:
        changed += args[1:3]  # running mean and variance; kernels do not count it as a change
    return [tensor for tensor in changed if isinstance(tensor, Tensor)]


def _may_draw(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may draw random numbers: the same on all ranks."""

    def argument(name: str, place: int, default: Any) -> Any:
        return kwargs.get(name, args[place] if len(args) > place else default)

    if func in _DROPOUTS:
        return bool(argument("training", 2, True)) and argument("p", 1, 0.5) > 0
    if func is F.scaled_dot_product_attention:
        return bool(argument("dropout_p", 4, 0.0) > 0)
    return func in _RANDOM


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # arrays
        return False


def name_of_function(func: Callable[..., Any]) -> str:
    """The name of a function of torch, for messages."""
    return str(getattr(func, "__name__", func))


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def operate(self: ShardedTensor, *args: Any) -> Any:
        return ShardedTensor.__torch_function__(function, (ShardedTensor,), (self, *args))

    operate.__name__ = name
    return operate


for _op in (
    "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__",
    "__imul__", "__truediv__", "__rtruediv__", "__itruediv__", "__pow__", "__rpow__", "__mod__",
    "__floordiv__", "__matmul__", "__rmatmul__", "__neg__", "__abs__", "__invert__", "__and__",
    "__or__", "__xor__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    "__getitem__", "__setitem__",
):  # fmt: skip
    setattr(ShardedTensor, _op, _operator(_op))
