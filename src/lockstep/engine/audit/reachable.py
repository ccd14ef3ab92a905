"""What an object refers to: looked through for state that nobody else knows of."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

_DEPTH = 8
_OPAQUE = (
    type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module, optim.Optimizer,
)  # fmt: skip


def optimizers_in(optimizer: optim.Optimizer) -> dict[str, optim.Optimizer]:
    """An optimizer under the name "", and those it holds under the paths of its attributes."""
    optimizers: dict[str, optim.Optimizer] = {}
    _collect(optimizer, "", optimizers)
    return optimizers


def fingerprints(values: Mapping[str, Any], without: Set[int]) -> dict[str, object]:
    """For all that `values` refers to, by path, something that changes when it does.

    Modules, optimizers and functions are not looked into.

    Args:
        values: objects by name.
        without: addresses of the storages of tensors that are left out.
    """
    marks: dict[str, object] = {}
    seen: set[int] = set()

    def walk(value: Any, path: str, depth: int) -> None:
        if isinstance(value, _OPAQUE) or depth > _DEPTH:
            return
        mark = _mark(value, without)
        if mark is not None:
            marks[path] = mark
        elif id(value) not in seen:
            seen.add(id(value))
            for name, inner in _inside(value):
                walk(inner, path + name, depth + 1)

    for name, value in values.items():
        walk(value, name, 0)
    return marks


def _mark(value: Any, without: Set[int]) -> object | None:
    """Tells values of a leaf apart; None if it is no leaf."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value._version
        if value.untyped_storage().data_ptr() in without:
            return ""
        # Exact, whatever the order of the sum.
        total = value.detach().contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64)
        return value.dtype, tuple(value.shape), int(total)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, (np.random.RandomState, random.Random)):
        state = value.getstate() if isinstance(value, random.Random) else value.get_state()
        return repr(state)
    return None


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for index, (key, inner) in enumerate(value.items()):
            yield f"[{key!r}]" if isinstance(key, (str, int)) else f"[{index}]", inner
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{i}]", inner) for i, inner in enumerate(value))
    elif not isinstance(value, Iterable):
        yield from ((f".{k}", inner) for k, inner in getattr(value, "__dict__", {}).items())


def _collect(value: Any, path: str, optimizers: dict[str, optim.Optimizer]) -> None:
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, optim.Optimizer):
        if any(value is known for known in optimizers.values()):
            return
        optimizers[path] = value
        own = ("state", "param_groups", "defaults")
        inside = [(k, v) for k, v in vars(value).items() if k not in own]
    elif isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    for key, inner in inside:
        _collect(inner, f"{path}.{key}" if path else str(key), optimizers)
