"""torch's compiler: imported when something is compiled, and then for each shape by itself.

Its import takes longer than that of all else in torch, and the first optimizer of a process asks
for it, only to tell the compiler what to leave alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import optim

_COMPILER = "torch._dynamo"
_DISABLED = "__dynamo_disable"
"""Where `torch._disable_dynamo` keeps what it calls instead of a function."""

_MANY = 2**30


def keep_compiler_out() -> None:
    """Have the compiler imported by nothing but code that compiles.

    From then on every shape is compiled by itself, whichever shapes were there before. Else a
    kernel for any size, or none, takes over after the first few shapes, rounds otherwise, and
    ranks meet shapes in different orders. Who compiles with `dynamic=True` asks for that.
    """
    if _COMPILER in sys.modules:
        _compile_by_shape()
    elif not any(isinstance(finder, _Awaited) for finder in sys.meta_path):
        for method in _disabled_methods():
            vars(method)[_DISABLED] = method
        sys.meta_path.insert(0, _Awaited())


class _Awaited(MetaPathFinder):
    """Waits for the import of the compiler."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loaded(spec.loader)
        return spec


class _Loaded(Loader):
    """Loads the compiler as another loader does, and then says what it may go by."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "it is being imported"
        module.__loader__ = module.__spec__.loader = self._loader
        for method in _disabled_methods():
            vars(method).pop(_DISABLED, None)
        self._loader.exec_module(module)
        _compile_by_shape()


def _disabled_methods() -> Iterator[Callable[..., Any]]:
    """Methods of optimizers that the compiler is to leave alone, as they were written."""
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        method = getattr(optim.Optimizer, name)
        if hasattr(method, "__wrapped__"):
            yield method.__wrapped__


def _compile_by_shape() -> None:
    config = sys.modules[_COMPILER].config
    config.automatic_dynamic_shapes = False
    config.recompile_limit = _MANY
    config.accumulated_recompile_limit = _MANY
