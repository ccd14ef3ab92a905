"""State of a task that the engine does not manage: counters, generators, tensors in attributes.

What a batch changes in plain attributes depends on how many batches this process has seen, and so
on the number of ranks. `hidden_state` makes it visible: two snapshots of the same objects can be
compared by path.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from lockstep.data.attributes import WatchedAttribute
from lockstep.data.random import GENERATORS, AnyGenerator, is_global
from lockstep.engine.audit.reachable import (
    ITERATORS,
    MOST_BYTES,
    WEAK,
    has_text,
    is_library,
    results_kept,
    short,
    text_of,
)

_MOST_OBJECTS = 50_000
_MOST_ITEMS = 1_000
"""Number of items of a container that are looked at: half from its start, half from its end."""
_MOST_LETTERS = 400
"""Greatest number of characters of a path; the middle of longer ones is left out."""

_PLAIN = (
    bool, int, float, complex, str, type(None), np.generic, torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_PLAIN_TYPES = frozenset({bool, int, float, complex, str, type(None)})
_BUILT_IN = frozenset({dict, list, tuple, set, OrderedDict})
"""Collections without attributes."""
_CONTAINERS = (dict, list, set, deque, bytearray, np.ndarray, Tensor)
"""Types that passes may keep something in, and whose content can be restored."""
_COLLECTIONS = (dict, list, tuple, deque, set, frozenset)
"""Types whose subclasses have attributes beside their items."""
HOOKS = frozenset(n for n, v in vars(nn.Module()).items() if isinstance(v, OrderedDict))
"""Attributes of each module. Empty, they would be half of all objects, and are left out."""
_OF_ENGINE = (
    "lockstep.comm.", "lockstep.parallel.", "lockstep.engine.", "lockstep.observe.",
    "lockstep.nn.module_row", "lockstep.nn.row_trace",
)  # fmt: skip
"""Modules whose objects have no state of users."""
KEYS = " keys"
"""The end of the text of a dict's size; that of a list is a number."""
_HEAP_TYPE = 1 << 9
"""CPython's flag of classes that are made at run time, and so can be changed."""
_OPAQUE = (types.ModuleType, types.CodeType)
_OPAQUE_MODULES = frozenset({
    "threading", "_thread", "concurrent", "queue", "_queue", "multiprocessing", "_multiprocessing",
    "logging", "asyncio", "_asyncio", "weakref", "_weakref", "_weakrefset", "io", "_io", "socket",
    "_socket", "selectors", "subprocess", "_pytest",
})  # fmt: skip
"""Modules whose objects depend on time, or on messages of other ranks; and pytest's marks."""


def hidden_state(
    roots: Mapping[str, object], without: Iterable[object] = (), most_bytes: int = MOST_BYTES
) -> dict[str, str]:
    """What can be reached from some objects through attributes, containers and closures.

    Parameters and buffers of the roots that are modules are left out, as are the global random
    generators, which the engine sets itself.

    Args:
        roots: objects by name; a value is reported under the first name that reaches it.
        without: objects that are left out, with all that is reached by them alone.
        most_bytes: number of bytes of each tensor or array that are looked at, evenly spread.

    Returns:
        For each path, such as `task.calls`, a text that differs when its value does.
    """
    return Walk(roots, without, most_bytes).texts


def differing(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The paths whose texts differ between two results of `hidden_state`."""
    return [path for path in {**before, **after} if before.get(path) != after.get(path)]


class Walk:
    """Visits what can be reached from some objects: each once, depth first, up to a bound.

    Attributes:
        texts: see `hidden_state`.
        generators: random generators by path.
        tensors: tensors by path, except parameters and buffers of roots that are modules.
        objects: objects of users' own classes by path.
        containers: containers, arrays and tensors by path.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        without: Iterable[object] = (),
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._most_bytes = most_bytes
        self.texts: dict[str, str] = {}
        self.generators: dict[str, AnyGenerator] = {}
        self.tensors: dict[str, Tensor] = {}
        self.objects: dict[str, object] = {}
        self.containers: dict[str, object] = {}
        self._seen: dict[int, object] = {id(value): value for value in without}
        modules: list[Any] = [r for r in roots.values() if issubclass(type(r), nn.Module)]
        self._known = {id(t) for m in modules for t in (*m.parameters(), *m.buffers())}
        waiting = list(roots.items())[::-1]
        while waiting:
            with suppress(Exception):  # foreign properties, lengths and texts may raise any
                self._visit_all(waiting)

    def _visit_all(self, waiting: list[tuple[str, object]]) -> None:
        while waiting:
            path, value = waiting.pop()
            kind = type(value)
            if kind in _PLAIN_TYPES:  # half of all
                self.texts[path] = short(repr(value))
            elif kind is not types.FunctionType or not self._is_empty(value):  # half of the rest
                parts = [*self._visit(path, value)]
                waiting += [(_bounded(path + name), part) for name, part in parts[::-1]]

    def _is_empty(self, function: Any) -> bool:
        """Whether a function has no parts."""
        defaults = function.__defaults__ or function.__kwdefaults__
        return not (function.__closure__ or defaults or vars(function))

    def _visit(self, path: str, value: Any) -> Iterable[tuple[str, object]]:
        about = _about(type(value))
        if about.is_plain:
            self.texts[path] = short(repr(value))
            return ()
        if id(value) in self._seen or len(self._seen) >= _MOST_OBJECTS or about.is_opaque(value):
            return ()
        self._seen[id(value)] = value  # kept alive, so that no other object gets its id
        if about.is_generator:
            self.generators[path] = value
        if about.is_own:
            self.objects[path] = value
        is_known = about.is_tensor and id(value) in self._known
        if about.is_container and not is_known:
            self.containers[path] = value
        text = about.text(value, self._most_bytes) if about.text else None
        if text is not None and not is_known:
            self.texts[path] = text
            if about.is_tensor:
                self.tensors[path] = value
        if text is None or about.is_tensor:
            self._seen |= about.bases  # their state is in it
            return about.parts(value)
        return ()


_Parts = Callable[[Any], Iterable[tuple[str, object]]]


class _About(NamedTuple):
    """What the type of objects says of them.

    Attributes:
        is_plain: whether an object is a number or a text.
        is_opaque: whether nothing of an object is looked at.
        is_own: whether they are of a class that a user has written in Python.
        is_generator: whether they are random generators.
        is_tensor: whether they are tensors.
        is_container: whether passes may keep something in them.
        text: see `text_of`.
        parts: what an object is made of, each with what is to be added to its path.
        bases: addresses of the type and of its bases, without those of libraries.
    """

    is_plain: bool
    is_opaque: Callable[[Any], bool]
    is_own: bool
    is_generator: bool
    is_tensor: bool
    is_container: bool
    text: Callable[[Any, int], str | None] | None
    parts: _Parts
    bases: Mapping[int, None]


_ABOUT: weakref.WeakKeyDictionary[type, _About] = weakref.WeakKeyDictionary()


def _about(kind: type) -> _About:
    known = _ABOUT.get(kind)  # to ask a type again for each object would take twice as long
    if known is None:
        known = _ABOUT[kind] = _About(
            is_plain=issubclass(kind, _PLAIN),
            is_opaque=_opaque(kind),
            is_own=bool(kind.__flags__ & _HEAP_TYPE)
            and not (is_library(kind.__module__) or issubclass(kind, (type, Tensor, BaseModel))),
            is_generator=issubclass(kind, GENERATORS),
            is_tensor=issubclass(kind, Tensor),
            is_container=issubclass(kind, _CONTAINERS),
            text=text_of(kind),
            parts=_parts(kind),
            bases={id(base): None for base in kind.__mro__ if not is_library(base.__module__)},
        )
    return known


def _opaque(kind: type) -> Callable[[Any], bool]:
    """Tells of an object of a type whether nothing of it is looked at."""
    if issubclass(kind, GENERATORS):
        return is_global
    if issubclass(kind, (type, types.FunctionType)):
        return lambda value: is_library(value.__module__)
    if issubclass(kind, types.MethodType):  # hooks of the engine's own
        return lambda value: str(value.__module__).startswith("lockstep.engine.")
    module = kind.__module__
    if issubclass(kind, (threading.local, *WEAK)) or has_text(kind):
        is_opaque = False
    elif module.startswith(_OF_ENGINE):  # a model in slices or stages refers to them
        is_opaque = not module.startswith("lockstep.engine.task")
    else:
        is_opaque = issubclass(kind, _OPAQUE) or module.partition(".")[0] in _OPAQUE_MODULES
    return lambda value: is_opaque


def _parts(kind: type) -> _Parts:
    parts = next(parts for kinds, parts in _PARTS if issubclass(kind, kinds))
    if issubclass(kind, _COLLECTIONS) and kind not in _BUILT_IN:
        return lambda value: [*_named(_attributes(value)), *parts(value)]
    return parts


def _named(parts: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(f".{name}", part) for name, part in parts.items()]


def _parts_of_sequence(base: Any) -> _Parts:
    def parts(value: Any) -> Iterator[tuple[str, object]]:
        count = base.__len__(value)
        yield "!", count
        yield from ((f"[{i}]", base.__getitem__(value, i)) for i in _ends(count))

    return parts


def _parts_of_generator(value: types.GeneratorType[Any, Any, Any]) -> list[tuple[str, object]]:
    frame = value.gi_frame
    return [("!", frame.f_lasti), *_named(frame.f_locals)] if frame else [("!", None)]


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    if function.__closure__:
        cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
        yield from ((f".{name}", _content(cell)) for name, cell in cells)
    if function.__defaults__ or function.__kwdefaults__:
        yield ".__defaults__", (function.__defaults__, function.__kwdefaults__)
    yield from _named(vars(function))


_PARTS: tuple[tuple[Any, _Parts], ...] = (
    (dict, lambda value: [  # other mappings may be files
        ("!", f"{dict.__len__(value)}{KEYS}"), *((f"[{_key(k)}]", v) for k, v in _items(value))
    ]),
    *((base, _parts_of_sequence(base)) for base in (list, tuple, deque)),
    (np.ndarray, lambda value: [(f"[{i}]", value.flat[i]) for i in _ends(value.size)]),
    ((set, frozenset), lambda value: [("!", len(value))]),
    (types.GeneratorType, _parts_of_generator),
    # Without the function that makes one of it.
    (ITERATORS, lambda value: [(".__reduce__", value.__reduce__()[1:])]),
    (threading.local, lambda value: _named(value.__dict__ | _attributes(value))),  # this thread's
    (contextvars.ContextVar, lambda value: [(".get()", value.get(None))]),
    (WEAK, lambda value: [
        ("!", f"{len(value)}{KEYS}"), *((f"[{i}]", v) for i, v in enumerate(value.values()))
    ]),
    (functools._lru_cache_wrapper, lambda value: [
        *_named(_attributes(value)), (".cache", results_kept(value))
    ]),
    (functools.partial, lambda value: [
        (".func", value.func), (".args", value.args), (".keywords", value.keywords)
    ]),
    (types.FunctionType, _parts_of_function),
    # A module's, or of a generator: `rng.random`.
    (types.BuiltinMethodType, lambda value: [("", value.__self__)]),
    (types.MethodType, lambda value: [("", value.__self__), ("", value.__func__)]),
    ((staticmethod, classmethod), lambda value: [("", value.__func__)]),
    (property, lambda value: [("", value.fget)]),
    (type, lambda value: _named(own_attributes(value))),
    (object, lambda value: _named(_attributes(value))),
)  # fmt: skip
"""What objects are made of, each with what is to be added to its path; by type."""


def _attributes(value: object) -> dict[str, object]:
    parts: dict[str, object] = {}
    with suppress(AttributeError):  # without `__getattr__`, which may compute
        parts |= object.__getattribute__(value, "__dict__")
    if isinstance(value, Tensor):
        hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
        return parts | {name: getattr(value, name, None) for name in hooks}
    if isinstance(value, nn.Module):
        parts.pop("training", None)
        for part in ("_parameters", "_buffers", "_modules"):
            inside: Any = parts.pop(part, {})
            parts |= inside
        parts = {name: part for name, part in parts.items() if name not in HOOKS or part}
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            parts |= _slots(kind, value)
        if not is_library(kind.__module__):
            own = own_attributes(kind)
            overridden = {n: v for n, v in own.items() if n in parts and callable(v)}
            parts |= own | parts | {f"{kind.__name__}.{n}": v for n, v in overridden.items()}
    return parts


def own_attributes(kind: type) -> dict[str, object]:
    """Attributes of a class itself."""
    own = {
        name: value
        for name, value in vars(kind).items()
        if (not name.startswith("__") and name != "_abc_impl") or type(value) is types.FunctionType
    }
    watched = [name for name, value in own.items() if type(value) is WatchedAttribute]
    for name in watched:
        attribute: Any = own.pop(name)
        if not attribute.is_empty:
            own[name] = attribute.plain
    return own


def _slots(kind: type, value: object) -> dict[str, object]:
    slots: dict[str, object] = {}
    # Types of C have descriptors of their own, which may compute; only Python's are read.
    for name, slot in vars(kind).items():
        if isinstance(slot, types.MemberDescriptorType):
            with suppress(AttributeError):  # not assigned yet
                slots[name] = slot.__get__(value)
    return slots


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _ends(count: int) -> Iterable[int]:
    """Indices of the items that are looked at."""
    if count <= _MOST_ITEMS:
        return range(count)
    half = _MOST_ITEMS // 2
    return itertools.chain(range(half), range(count - half, count))


def _items(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    items = dict.items(value)
    if len(items) <= _MOST_ITEMS:
        return list(items)
    half = _MOST_ITEMS // 2
    return [*itertools.islice(items, half), *itertools.islice(reversed(items), half)]


def _key(key: object) -> str:
    try:
        return short(repr(key))
    except Exception:
        return f"a {type(key).__name__}"


def _bounded(path: str) -> str:
    if len(path) <= _MOST_LETTERS:
        return path
    quarter = _MOST_LETTERS // 4
    return f"{path[:quarter]}…{short(path)}…{path[-quarter:]}"
