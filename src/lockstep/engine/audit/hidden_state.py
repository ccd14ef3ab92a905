"""State of a task that the engine does not manage: counters, generators, tensors in attributes.

What a batch changes in plain attributes depends on how many batches this process has seen, and so
on the number of ranks. `hidden_state` makes it visible: two snapshots of the same objects can be
compared by path.
"""

from __future__ import annotations

import array
import contextvars
import functools
import gc
import itertools
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from lockstep.data.attributes import WatchedAttribute
from lockstep.data.random import GENERATORS, AnyGenerator, is_global
from lockstep.engine.audit.reachable import (
    MEMORY,
    MOST_BYTES,
    STREAMS,
    has_text,
    is_library,
    leaf,
    short,
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
"""Types of most objects: neither opaque, nor generators, nor of a user's own class."""
_ITERATORS: tuple[type[Any], ...] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), type(iter({})),
    type(iter({}.values())), type(iter({}.items())), type(iter(set())), type(reversed([])),
    reversed, zip, map, filter, enumerate, itertools.chain, itertools.cycle, itertools.islice,
    itertools.repeat, itertools.accumulate, itertools.starmap, itertools.takewhile,
    itertools.dropwhile, itertools.compress, itertools.product, itertools.permutations,
)  # fmt: skip
"""Types of iterators whose position can be read, since they can be pickled."""
_CONTAINERS = (dict, list, set, deque, bytearray, np.ndarray, Tensor)
"""Types that passes may keep something in, and whose content can be restored."""
_COLLECTIONS = (dict, list, tuple, deque, set, frozenset)
"""Types whose subclasses have attributes beside their items."""
_LINK = "_lru_list_elem"
HOOKS = frozenset(n for n, v in vars(nn.Module()).items() if isinstance(v, OrderedDict))
"""Attributes of each module. Empty, they would be half of all objects, and are left out."""
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_STATEFUL = (
    int, float, np.generic, bytearray, array.array, Tensor, np.ndarray, list, dict, set, deque,
    itertools.count, types.GeneratorType, types.FunctionType, functools.partial,
    functools._lru_cache_wrapper, types.MethodType, types.BuiltinMethodType, contextvars.ContextVar,
    threading.local, *_ITERATORS, *_WEAK,
    *MEMORY, *STREAMS, *GENERATORS,
)  # fmt: skip
"""Types of a script's global variables that are looked at, beside objects of its classes."""
_STATEFUL_TYPES = frozenset(_STATEFUL)
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


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in memory that others may share."""
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def module_globals(
    kind: type, modules: Mapping[str, types.ModuleType] | None = None
) -> dict[str, object]:
    """The global variables that may hold state, of a class's module and others.

    Args:
        kind: the class.
        modules: modules by name, as of `modules_around`; without, the class's own.

    Returns:
        Modules by dotted name; one that is named like a root has the name of its file in it.
    """
    name = kind.__module__
    own = sys.modules.get(name)
    if own is None:
        return {}
    modules = {name: own, **(modules or {})}
    return {
        f"{f'{name}.py' if name in ('task', 'model') else name}.{variable}": value
        for name, module in modules.items()
        for variable, value in list(vars(module).items())
        if not variable.startswith("__") and _may_hold_state(value, modules)
    }


def _may_hold_state(value: object, modules: Mapping[str, object]) -> bool:
    kind = type(value)
    if kind in _STATEFUL_TYPES:  # most of them
        return True
    if isinstance(value, type):
        return value.__module__ in modules
    return isinstance(value, _STATEFUL) or kind.__module__ in modules or has_text(value)


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
        modules = [root for root in roots.values() if isinstance(root, nn.Module)]
        self._known = {id(t) for m in modules for t in (*m.parameters(), *m.buffers())}
        waiting = list(roots.items())[::-1]
        while waiting:
            path, value = waiting.pop()
            if type(value) in _PLAIN_TYPES:  # half of all
                self.texts[path] = short(repr(value))
                continue
            parts: list[tuple[str, object]] = []
            with suppress(Exception):  # foreign properties, lengths and texts may raise any
                parts.extend(self._visit(path, value))
            waiting += [(_bounded(path + name), part) for name, part in reversed(parts)]

    def _visit(self, path: str, value: object) -> Iterable[tuple[str, object]]:
        if isinstance(value, _PLAIN):
            self.texts[path] = short(repr(value))
            return ()
        if id(value) in self._seen or len(self._seen) >= _MOST_OBJECTS:
            return ()
        if type(value) in _BUILT_IN:
            self._seen[id(value)] = value
            if type(value) is not tuple:
                self.containers[path] = value
            return _children(value)
        if type(value) is types.FunctionType:  # half of the rest, and few of them keep anything
            if is_library(value.__module__):
                return ()
            self._seen[id(value)] = value
            return _parts_of_function(value)
        if _is_opaque(value):
            return ()
        self._seen[id(value)] = value  # kept alive, so that no other object gets its id
        if isinstance(value, GENERATORS):
            self.generators[path] = value
        if _is_of_own_class(value):
            self.objects[path] = value
        if isinstance(value, _CONTAINERS) and id(value) not in self._known:
            self.containers[path] = value
        text = leaf(value, self._most_bytes)
        if text is not None and id(value) not in self._known:
            self.texts[path] = text
            if isinstance(value, Tensor):
                self.tensors[path] = value
        if text is None or isinstance(value, Tensor):
            self._seen |= {id(kind): kind for kind in type(value).__mro__}  # their state is in it
            return _children(value)
        return ()


def _is_opaque(value: object) -> bool:
    if isinstance(value, _OPAQUE) or (isinstance(value, GENERATORS) and is_global(value)):
        return True
    if isinstance(value, type):
        return is_library(value.__module__)
    if isinstance(value, (threading.local, *_WEAK)) or has_text(value):
        return False
    if isinstance(value, types.MethodType):  # hooks of the engine's own
        return str(value.__module__).startswith("lockstep.engine.")
    module = type(value).__module__
    if module.startswith(_OF_ENGINE):  # a model in slices or stages refers to them
        return not module.startswith("lockstep.engine.task")
    return module.partition(".")[0] in _OPAQUE_MODULES


def _is_of_own_class(value: object) -> bool:
    """Whether it is an object of a class that a user has written in Python."""
    if isinstance(value, (type, types.FunctionType, types.MethodType, Tensor, BaseModel)):
        return False
    kind = type(value)
    return bool(kind.__flags__ & _HEAP_TYPE) and not is_library(kind.__module__)


def _children(value: object) -> Iterator[tuple[str, object]]:
    """What an object is made of, each with what is to be added to its path."""
    if isinstance(value, _COLLECTIONS) and type(value) not in _BUILT_IN:
        yield from ((f".{name}", child) for name, child in _attributes(value).items())
    if isinstance(value, dict):  # other mappings may be files
        yield "!", f"{dict.__len__(value)}{KEYS}"
        yield from ((f"[{_key(k)}]", v) for k, v in _items(value))
    elif isinstance(value, (list, tuple, deque)):
        base: Any = next(b for b in (list, tuple, deque) if isinstance(value, b))
        count = base.__len__(value)
        yield "!", count
        yield from ((f"[{i}]", base.__getitem__(value, i)) for i in _ends(count))
    elif isinstance(value, np.ndarray):
        yield from ((f"[{i}]", value.flat[i]) for i in _ends(value.size))
    elif isinstance(value, (set, frozenset)):
        yield "!", len(value)
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        yield "!", frame.f_lasti if frame else None
        yield from ((f".{name}", part) for name, part in (frame.f_locals if frame else {}).items())
    elif isinstance(value, _ITERATORS):
        yield ".__reduce__", value.__reduce__()[1:]  # without the function that makes one of it
    elif isinstance(value, threading.local):
        own = value.__dict__ | _attributes(value)  # the first is of this thread
        yield from ((f".{name}", part) for name, part in own.items())
    elif isinstance(value, contextvars.ContextVar):
        yield ".get()", value.get(None)
    elif isinstance(value, _WEAK):
        yield "!", f"{len(value)}{KEYS}"
        yield from ((f"[{i}]", part) for i, part in enumerate(value.values()))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from ((f".{name}", part) for name, part in _attributes(value).items())
        yield ".cache", _cached(value)
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.BuiltinMethodType):
        yield "", value.__self__  # a module's, or of a generator: `rng.random`
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, (staticmethod, classmethod)):
        yield "", value.__func__
    elif isinstance(value, property):
        yield "", value.fget
    elif isinstance(value, type):
        yield from ((f".{name}", child) for name, child in own_attributes(value).items())
    else:
        yield from ((f".{name}", child) for name, child in _attributes(value).items())


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    if function.__closure__:
        cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
        yield from ((f".{name}", _content(cell)) for name, cell in cells)
    if function.__defaults__ or function.__kwdefaults__:
        yield ".__defaults__", (function.__defaults__, function.__kwdefaults__)
    yield from ((f".{name}", child) for name, child in vars(function).items())


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
    watched = [name for name, value in own.items() if isinstance(value, WatchedAttribute)]
    for name in watched:
        attribute: Any = own.pop(name)
        if not attribute.is_empty:
            own[name] = attribute.plain
    return own


def _slots(kind: type, value: object) -> dict[str, object]:
    slots: dict[str, object] = {}
    # Types of C have descriptors of their own, which may compute; only Python's are read.
    for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
        if isinstance(slot, types.MemberDescriptorType):
            with suppress(AttributeError):  # not assigned yet
                slots[name] = slot.__get__(value)
    return slots


def _cached(function: Any) -> list[object]:
    """The results that a function of `functools.lru_cache` keeps, some with their keys."""
    held = gc.get_referents(function)
    dicts = [i for i, part in enumerate(held) if type(part) is dict and part is not vars(function)]
    if function.cache_parameters()["maxsize"] is None:
        return list(held[dicts[0]].values())
    # A dict of links follows what they lead to: key, result and the type of each link.
    links = [i for i in dicts if all(type(v).__name__ == _LINK for v in held[i].values())]
    return [part for part in held[: links[-1]] if not isinstance(part, type)]


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
