"""Values that outlive a pass and are put back for a while, to see whether results depend on them.

Caches are cleared: their content can be computed again, and the results are the same. What was
stored of an earlier model, of other samples or of a count of passes cannot. What evaluation batches
have left anywhere is undone: the steps that follow may not depend on it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from lockstep.data.attributes import WatchedAttribute
from lockstep.engine.audit.hidden_state import HOOKS, Walk
from lockstep.engine.audit.reachable import cached_functions, is_library
from lockstep.engine.passes.buffers import same_bits
from lockstep.nn.holding import is_released

_MOST_NOTED = 1 << 20
"""Greatest size, in bytes, of content that is noted before an evaluation."""
_MOST_BYTES = 64 << 20
"""Greatest size of all copies together; larger containers are not cleared."""
_ITEM_BYTES = 64
"""Rough size of an item of a container."""
_IN_ONE = (list, deque, set, bytearray, Tensor, np.ndarray)
"""Types whose content is put back in one piece."""
_PARTS = ("_modules", "_buffers")
"""Dicts of a module whose entries seem to be its attributes."""
_ALL, _ABSENT = object(), object()
"""The key of such a content; and what stands for a value that is not there."""


class Caches:
    """Containers that passes have changed, and cached functions.

    Attributes:
        leftovers: what evaluation batches have changed.
    """

    def __init__(self, kinds: Iterable[type], more: Iterable[str] = ()) -> None:
        """Find the cached functions of some classes and of their modules.

        Args:
            kinds: classes of the task, its datasets and its hooks.
            more: names of more modules.
        """
        self._first: dict[str, tuple[Any, Any]] = {}
        self._num_bytes = 0
        self._now: list[tuple[Any, Any]] = []
        self._functions = list(cached_functions(kinds, more))
        self.leftovers = Leftovers()

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
        self._now = [(value, _content(value)) for value, _ in self._first.values()]
        for value, content in self._first.values():
            _put(value, content)
        for owner, name, function in self._functions if with_functions else ():
            again = functools.lru_cache(**function.cache_parameters())(function.__wrapped__)
            _put_entry(owner, name, again)
        self.leftovers.put_back()

    def recall(self) -> None:
        """Undo `forget`."""
        self.leftovers.restore()
        for value, content in self._now:
            _put(value, content)
        self._now = []
        for owner, name, function in self._functions:
            _put_entry(owner, name, function)


class _Holders(Walk):
    """What can hold values that are replaced: containers, classes, and objects with attributes.

    Attributes:
        found: each with its path, and with what is before a key in paths: `.` or `[`.
    """

    def __init__(self, roots: Mapping[str, object], without: Iterable[object]) -> None:
        self.found: list[tuple[str, str, Any]] = []
        super().__init__(roots, without)

    def _is_empty(self, function: object) -> bool:
        return False  # it may get attributes

    def _visit(self, path: str, value: object) -> Iterable[tuple[str, object]]:
        kinds = [k for k in type(value).__mro__ if id(k) not in self._seen]
        num_seen = len(self._seen)
        parts = super()._visit(path, value)
        if len(self._seen) > num_seen:
            # By the type, not by `isinstance`: a proxy or a mock only seems to be of a class.
            self.found.append((path, "[" if issubclass(type(value), dict) else ".", value))
            # An object's class has what the object seems to have.
            self.found += [(path, ".", kind) for kind in kinds if not is_library(kind.__module__)]
            own = vars(value) if issubclass(type(value), nn.Module) else {}
            self.found += [(path, ".", own[name]) for name in _PARTS if name in own]
            self.found += [(f"{path}.{name}", "[", own[name]) for name in HOOKS if name in own]
        return parts


class _Change(NamedTuple):
    """A value that was replaced."""

    path: str
    holder: Any
    key: Any
    before: Any
    left: Any


class Leftovers:
    """What evaluation batches have changed, and whether it can be put back for a while."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, str, Any, dict[Any, Any]]] = []
        self._changes: dict[tuple[int, Any], _Change] = {}
        self._put_back: list[tuple[Any, Any, Any]] = []

    @property
    def paths(self) -> list[str]:
        """The paths of what has been changed."""
        return [change.path for change in self._changes.values()]

    def drop(self) -> None:
        """Put nothing back that has been changed so far."""
        self._changes = {}

    def note(self, roots: Mapping[str, object], without: Iterable[object]) -> None:
        """Note the values before an evaluation.

        Args:
            roots: objects by name; modules have their variables among them.
            without: objects that are left out.
        """
        found = _Holders(roots, without).found
        names = {path.rpartition(".")[0] for path in roots}
        found += [(name, ".", sys.modules[name]) for name in names if name in sys.modules]
        self._noted, num_bytes = [], 0
        for path, mark, holder in [*found, ("os.environ", "[", os.environ)]:
            size = _size(holder) if _is_in_one(holder) else 0
            if size <= _MOST_NOTED and num_bytes + size <= _MOST_BYTES:
                num_bytes += size
                self._noted.append((path, mark, holder, _entries(holder)))

    def collect(self, is_left_out: Callable[[str], bool]) -> bool:
        """Keep what an evaluation has changed since `note`; returns whether there is any of it.

        Args:
            is_left_out: whether no result depends on a path.
        """
        noted, self._noted = self._noted, []
        num_found = 0
        for path, mark, holder, before in noted:
            now = _entries(holder)
            for key in {**before, **now}:
                old, new = before.get(key, _ABSENT), now.get(key, _ABSENT)
                at = path
                if key is not _ALL:
                    at += f".{key}" if mark == "." else f"[{key!r}]"
                if not _is_same(old, new) and not is_left_out(at):
                    num_found += 1
                    first = self._changes.get((id(holder), key))
                    old = first.before if first is not None else old
                    self._changes[id(holder), key] = _Change(at, holder, key, old, new)
        return num_found > 0

    def put_back(self) -> None:
        """Give back the values from before, where nothing else has been put there since."""
        for _, holder, key, before, left in self._changes.values():
            entries = holder if issubclass(type(holder), dict) else _entries(holder)
            now = entries.get(key, _ABSENT)
            if not _is_same(now, left):
                continue
            if isinstance(before, nn.Module):
                before.train()  # it has missed the end of the evaluation
            with suppress(Exception):  # of a foreign container, or an array that is read-only
                _put_entry(holder, key, before)
                self._put_back.append((holder, key, now))

    def restore(self) -> None:
        """Undo `put_back`."""
        for holder, key, value in self._put_back:
            _put_entry(holder, key, value)
        self._put_back = []


def _is_in_one(holder: object) -> bool:
    """Whether the content of a holder is put back in one piece."""
    return issubclass(type(holder), _IN_ONE) and not (
        isinstance(holder, nn.Parameter) or (isinstance(holder, Tensor) and is_released(holder))
    )


def _entries(holder: Any) -> dict[Any, Any]:
    """What a holder has, by key or by the name of an attribute; copied where it is in one piece."""
    kind = type(holder)
    if issubclass(kind, dict) or holder is os.environ:
        return dict(holder)
    if _is_in_one(holder):
        return {_ALL: _content(holder)}
    if kind is ContextVar:
        with suppress(LookupError):
            return {_ALL: holder.get()}
    is_config = issubclass(kind, BaseModel)
    kind = holder if issubclass(kind, type) else kind
    if kind.__module__.startswith("lockstep.") and not is_config:
        return {}  # the engine's, not a user's
    return {
        name: value
        for name, value in _attributes(holder).items()
        if not (name.startswith("__") or name == "training" or type(value) is WatchedAttribute)
        # These are looked after by the guard of attributes.
        and not any(type(vars(k).get(name)) is WatchedAttribute for k in kind.__mro__)
    }


def _attributes(holder: object) -> dict[str, Any]:
    if issubclass(type(holder), threading.local):
        return holder.__dict__  # of this thread
    own: dict[str, Any] = {}
    with suppress(AttributeError):  # without `__getattr__`, and without noting that it was read
        own = object.__getattribute__(holder, "__dict__")
    return own


def _put_entry(holder: Any, key: Any, value: Any) -> None:
    if type(holder) is ContextVar:
        holder.set(None if value is _ABSENT else value)
    elif key is _ALL:
        _put(holder, value)
    elif issubclass(type(holder), type):
        with suppress(AttributeError, TypeError):  # a class may refuse
            if value is _ABSENT:
                type.__delattr__(holder, key)
            else:
                type.__setattr__(holder, key, value)
    else:
        is_one = issubclass(type(holder), (dict, os._Environ))
        there = holder if is_one else _attributes(holder)
        if value is _ABSENT:
            there.pop(key, None)
        else:
            there[key] = value


def _is_same(a: Any, b: Any) -> bool:
    """Whether two entries are the same object, or copies that are equal."""
    if a is b or not issubclass(type(a), (list, Tensor, np.ndarray, str)):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and same_bits(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and a.tobytes() == b.tobytes()
    return isinstance(a, str) and bool(a == b)


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
