"""Values that change when an object, or something that it refers to, does."""

from __future__ import annotations

import array
import contextvars
import ctypes
import dis
import functools
import gc
import hashlib
import io
import itertools
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from lockstep.data.random import GENERATORS, generator_state
from lockstep.engine.digests import bytes_of

MOST_BYTES = 1 << 20

MEMORY = (memoryview, mmap.mmap, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
"""Types of objects that are memory, of which others may have a view."""

STREAMS = (io.BytesIO, io.StringIO)
"""Types of files that are in memory."""

ITERATORS: tuple[type[Any], ...] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), type(iter({})),
    type(iter({}.values())), type(iter({}.items())), type(iter(set())), type(reversed([])),
    reversed, zip, map, filter, enumerate, itertools.chain, itertools.cycle, itertools.islice,
    itertools.repeat, itertools.accumulate, itertools.starmap, itertools.takewhile,
    itertools.dropwhile, itertools.compress, itertools.product, itertools.permutations,
)  # fmt: skip
"""Types of iterators whose position can be read, since they can be pickled."""
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_BY_MODULE: Mapping[str, Callable[[Any, int], str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("_hashlib", "_blake2", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3"),
            lambda value, _: str(value.hexdigest()),
        ),
        "sqlite3": lambda connection, _: str(connection.total_changes),
        "multiprocessing.sharedctypes": lambda value, most: _memory(value.get_obj(), most),
        # Frozen, and a third of what is reached from most tasks.
        "lockstep.config.sections": lambda section, _: short(repr(vars(section))),
    }
)
"""Texts for objects of these modules: sums so far, changes of a database, shared values, keys."""
_STATEFUL = (
    int, float, np.generic, bytearray, array.array, Tensor, np.ndarray, list, dict, set, deque,
    itertools.count, GeneratorType, FunctionType, MethodType, BuiltinMethodType, functools.partial,
    functools._lru_cache_wrapper, contextvars.ContextVar, threading.local, *ITERATORS, *WEAK,
    *MEMORY, *STREAMS, *GENERATORS,
)  # fmt: skip
"""Types of a script's global variables that are looked at, beside objects of its classes."""
_STATEFUL_TYPES = frozenset(_STATEFUL)
_LINK = "_lru_list_elem"
_DEPTH = 8
_MOST_MODULES = 50
"""Modules of which what they refer to is looked at."""
_LIBRARIES = frozenset({
    *sys.stdlib_module_names, "torch", "numpy", "pydantic", "lockstep", "lightning",
    "lightning_utilities", "pytorch_lightning", "torchmetrics",
})  # fmt: skip
"""Libraries whose classes have no state of a run."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages."""

_OPAQUE = (
    type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module, optim.Optimizer,
)  # fmt: skip


def text_of(kind: type) -> Callable[[Any, int], str | None] | None:
    """A function that has texts for objects without parts of their own, and for tensors.

    Args:
        kind: type of the objects.

    Returns:
        None for all other objects. The function takes one of them, and the number of bytes of an
        array that are hashed; those of a larger one are evenly spread.
    """
    texts = (text for kinds, text in _TEXTS if issubclass(kind, kinds))
    return next(texts, _BY_MODULE.get(kind.__module__))


def has_text(kind: type) -> bool:
    """Whether `text_of` knows a text for another module's type."""
    return issubclass(kind, STREAMS) or kind.__module__ in _BY_MODULE


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in memory that others may share."""
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def _memory(value: Any, most_bytes: int) -> str:
    view = memoryview(value)
    data = view.cast("B") if view.c_contiguous else view.tobytes()
    stride = max(1, len(data) // most_bytes)
    return f"{len(data)} {short(bytes(data[::stride]))}"


def _tensor(value: Tensor, most_bytes: int) -> str:
    if not has_memory(value):
        return f"{value.layout} {tuple(value.shape)} {value._version}"
    if value.numel() and not value.untyped_storage().nbytes():
        return f"{value.dtype} {tuple(value.shape)} without memory"  # a view of a closed block
    value = value.detach()
    stride = max(1, value.numel() * value.element_size() // most_bytes)
    if value.is_contiguous() or stride == 1:
        sample = value.reshape(-1)[::stride]
    else:  # without a copy of all of it
        indices = torch.arange(0, value.numel(), stride, device=value.device)
        sample = value[torch.unravel_index(indices, value.shape)]
    data = sample.cpu().resolve_conj().resolve_neg().contiguous()
    # Not by way of numpy, after which a tensor cannot give back its memory (`FlatTensors.close`).
    digest = short(bytes(bytes_of(data)))
    return f"{value.dtype} {tuple(value.shape)} {digest}"


def _array(value: np.ndarray[Any, Any], most_bytes: int) -> str | None:
    if value.dtype == object:
        return None
    if value.dtype.hasobject:
        return f"{value.dtype} {value.shape}"
    flat = value.reshape(-1) if value.flags.c_contiguous else value.flat
    stride = max(1, value.nbytes // most_bytes)
    return f"{value.dtype} {value.shape} {short(flat[::stride].tobytes())}"


_TEXTS: tuple[tuple[Any, Callable[[Any, int], str | None]], ...] = (
    (Tensor, _tensor),
    (np.ndarray, _array),
    (GENERATORS, lambda value, _: short(repr(generator_state(value)))),
    ((itertools.count, range, slice), lambda value, _: repr(value)),
    ((bytes, bytearray, array.array, *MEMORY), _memory),
    (STREAMS, lambda value, _: f"{value.tell()} {short(value.getvalue())}"),
)
"""Texts for objects of these types."""


def short(value: str | bytes) -> str:
    """A short text itself, or the beginning of the SHA-256 of anything else."""
    if isinstance(value, str):
        if len(value) <= 40:
            return value
        value = value.encode(errors="surrogatepass")
    return hashlib.sha256(value).hexdigest()[:16]


def optimizers_in(optimizer: optim.Optimizer) -> dict[str, optim.Optimizer]:
    """An optimizer under the name "", and those inside of it under the paths of its attributes."""
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
    """A value that differs when a leaf does; None if it is not a leaf."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value._version
        if value.untyped_storage().data_ptr() in without:
            return ""
        # A sum of integers is exact in any order.
        total = value.detach().contiguous().reshape(-1).view(torch.uint8).sum(dtype=torch.int64)
        return value.dtype, tuple(value.shape), int(total)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, GENERATORS):
        return repr(generator_state(value))
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


def attributes_read(kind: type, method: str) -> set[str]:
    """Names of the attributes that a method reads, itself or in methods of its class it refers to.

    Args:
        kind: class that has the method.
        method: name of the method.
    """
    names: set[str] = set()
    waiting = [method]
    while waiting:
        function = getattr(kind, waiting.pop(), None)
        if isinstance(function, FunctionType):
            read = {
                str(instruction.argval)
                for code in codes(function)
                for instruction in dis.get_instructions(code)
                if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
            }
            waiting += read - names
            names |= read
    return names


def codes(function: FunctionType) -> Iterator[CodeType]:
    """The code of a function, and that of functions and comprehensions inside of it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def modules_around(kinds: Iterable[type], with_folders: bool = True) -> dict[str, ModuleType]:
    """The loaded modules of users that classes' modules refer to, directly or through others.

    Args:
        kinds: the classes; those of libraries have none.
        with_folders: whether to begin with all modules of the classes' folders.
    """
    found = {n: sys.modules[n] for n in sorted({k.__module__ for k in kinds}) if _is_of_user(n)}
    if with_folders:
        by_folder = _names_by_folder(len(sys.modules), next(reversed(sys.modules)))
        beside = {n for m in found.values() for n in by_folder.get(_folder(m), ())}
        found |= {n: sys.modules[n] for n in sorted(beside & sys.modules.keys())}
    waiting = [*found]
    for name in waiting:  # which grows: the nearest first
        homes = {_home(value) for value in list(vars(found[name]).values())} - {*found}
        new = sorted(filter(_is_of_user, homes))[: max(0, _MOST_MODULES - len(waiting))]
        found |= {name: sys.modules[name] for name in new}
        waiting += new
    return found


def module_globals(
    kind: type, modules: Mapping[str, ModuleType] | None = None
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


def _may_hold_state(value: Any, modules: Mapping[str, object]) -> bool:
    kind = type(value)
    if kind in _STATEFUL_TYPES:  # most of them
        return True
    if issubclass(kind, type):
        return value.__module__ in modules
    return issubclass(kind, _STATEFUL) or kind.__module__ in modules or has_text(kind)


def _home(value: Any) -> str:
    """Name of the module that a global variable is, or that its function or class is from."""
    kind = type(value)  # `isinstance` would ask a proxy, which may fail
    if issubclass(kind, ModuleType):
        return str(value.__name__)
    return str((value if issubclass(kind, (type, FunctionType)) else kind).__module__)


def _is_of_user(name: str) -> bool:
    folder = None if is_library(name) else _folder(sys.modules.get(name))
    return folder is not None and _INSTALLED.isdisjoint(folder.split(os.sep))


@functools.lru_cache(maxsize=1)  # there are thousands, and they are asked for at each start
def _names_by_folder(_count: int, _newest: str) -> Mapping[str | None, list[str]]:
    """Names of all loaded modules, as long as there are so many and the newest is this one."""
    names: dict[str | None, list[str]] = {}
    for name, module in list(sys.modules.items()):
        names.setdefault(_folder(module), []).append(name)
    return names


def _folder(module: object) -> str | None:
    file = getattr(module, "__dict__", {}).get("__file__")
    return file.rpartition(os.sep)[0] if isinstance(file, str) else None


def cached_functions(
    kinds: Iterable[type], more: Iterable[str] = ()
) -> Iterable[tuple[Any, str, Any]]:
    """Functions of `functools.lru_cache` with what they are attributes of, and their names."""
    own = {base for kind in kinds for base in kind.__mro__}
    names = {*(base.__module__ for base in own), *more}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    owners: list[Any] = [*sorted(own, key=lambda kind: kind.__qualname__), *modules]
    for owner in owners:
        if is_library(getattr(owner, "__module__", owner.__name__)):
            continue
        for name, value in list(vars(owner).items()):
            if type(value) is functools._lru_cache_wrapper:
                yield owner, name, value


def results_kept(function: Any) -> list[object]:
    """The results that a function of `functools.lru_cache` keeps, some with their keys."""
    held = gc.get_referents(function)
    dicts = [i for i, part in enumerate(held) if type(part) is dict and part is not vars(function)]
    if function.cache_parameters()["maxsize"] is None:
        return list(held[dicts[0]].values())
    # A dict of links follows what they lead to: key, result and the type of each link.
    links = [i for i in dicts if all(type(v).__name__ == _LINK for v in held[i].values())]
    return [part for part in held[: links[-1]] if not isinstance(part, type)]


def is_library(module: object) -> bool:
    """Whether a module is one whose classes and functions keep no state of a run."""
    return str(module).partition(".")[0] in _LIBRARIES
