"""Clearing for a while what passes have stored, to see whether it is a cache.

The content of a cache can be computed again, and the results are the same. What was stored of an
earlier model, of other samples or of a count of passes cannot.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.audit.hidden_state import is_library

_MOST_BYTES = 64 << 20
"""Greatest size of all copies together; larger containers are not cleared."""
_ITEM_BYTES = 64
"""Rough size of an item of a container."""


class Caches:
    """Containers that passes have changed, and cached functions."""

    def __init__(self, kinds: Iterable[type]) -> None:
        """Find the cached functions of some classes and of their modules.

        Args:
            kinds: classes of the task, its datasets and its hooks.
        """
        self._first: dict[str, tuple[Any, Any]] = {}
        self._num_bytes = 0
        self._now: list[tuple[Any, Any]] = []
        self._functions = list(_cached_functions(kinds))
        self._is_forgotten = False

    @property
    def paths(self) -> list[str]:
        """The paths of what `forget` clears."""
        return [*self._first, *(f"{owner.__name__}.{name}" for owner, name, _ in self._functions)]

    def note(self, containers: Mapping[str, object]) -> None:
        """Copy the content of containers, by path, unless they are known already."""
        for path, value in containers.items():
            size = _size(value)
            if path not in self._first and self._num_bytes + size <= _MOST_BYTES:
                self._num_bytes += size
                self._first[path] = value, _content(value)

    def forget(self, with_functions: bool = True) -> None:
        """Give all containers the content that they had when they were noted.

        Args:
            with_functions: whether the results of cached functions are cleared too.
        """
        self._is_forgotten = True
        self._now = [(value, _content(value)) for value, _ in self._first.values()]
        for value, content in self._first.values():
            _put(value, content)
        for owner, name, function in self._functions if with_functions else ():
            again = functools.lru_cache(**function.cache_parameters())(function.__wrapped__)
            _set(owner, name, again)

    def recall(self) -> None:
        """Undo `forget`; does nothing without it."""
        if not self._is_forgotten:
            return
        self._is_forgotten = False
        for value, content in self._now:
            _put(value, content)
        self._now = []
        for owner, name, function in self._functions:
            _set(owner, name, function)


def _cached_functions(kinds: Iterable[type]) -> Iterable[tuple[Any, str, Any]]:
    """Functions of `functools.lru_cache` with what they are attributes of, and their names."""
    own = {base for kind in kinds for base in kind.__mro__}
    names = {base.__module__ for base in own}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    owners: list[Any] = [*sorted(own, key=lambda kind: kind.__qualname__), *modules]
    for owner in owners:
        if is_library(getattr(owner, "__module__", owner.__name__)):
            continue
        for name, value in list(vars(owner).items()):
            if isinstance(value, functools._lru_cache_wrapper):
                yield owner, name, value


def _set(owner: Any, name: str, value: object) -> None:
    with suppress(AttributeError, TypeError):  # a class may refuse
        if isinstance(owner, type):
            type.__setattr__(owner, name, value)
        else:
            setattr(owner, name, value)


def _size(value: Any) -> int:
    is_array = isinstance(value, (Tensor, np.ndarray))
    return int(value.nbytes) if is_array else _ITEM_BYTES * len(value)


def _content(value: Any) -> Any:
    """A copy that `_put` takes; items are the same objects."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return dict(value) if isinstance(value, dict) else list(value)


def _put(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, (list, bytearray)):
        value[:] = content
    else:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(content)
