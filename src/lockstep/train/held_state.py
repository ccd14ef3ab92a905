"""State that a task holds outside the engine's sight: counters, generators, tensors in attributes.

What a batch leaves behind in plain attributes depends on how many batches this process has seen,
and so on the number of ranks. `held_state` makes it visible: two snapshots of the same objects can
be compared by path.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.generators import GENERATORS, AnyGenerator, generator_state, is_global

_MOST_OBJECTS = 50_000
_MOST_ITEMS = 1_000
"""Of one container that are looked at: half of them from its start, half from its end."""
_MOST_BYTES = 1 << 20
"""Of one array that are hashed; of larger ones as many, evenly spread."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_STATEFUL = (
    int, float, Tensor, np.ndarray, list, dict, set, deque, itertools.count, types.GeneratorType,
    types.FunctionType, *GENERATORS,
)  # fmt: skip
"""Of the global variables of a script, those that are looked at, beside objects of its classes."""
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "lockstep"})
"""Classes from these keep no state of a run in themselves."""
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType)


def held_state(roots: Mapping[str, object]) -> dict[str, str]:
    """What can be reached from some objects through attributes, containers and closures.

    Parameters and buffers of modules are left out, as are the global random generators, which the
    engine sets itself.

    Args:
        roots: name to object; a value is reported under the first name it is reached by.

    Returns:
        For each path, such as `task.calls`, a text that differs when its value does.
    """
    walk = _Walk()
    for name, value in roots.items():
        walk.visit(name, value)
    return walk.found


def held_generators(roots: Mapping[str, object]) -> dict[str, AnyGenerator]:
    """The random generators among what `held_state` sees, by path."""
    walk = _Walk()
    for name, value in roots.items():
        walk.visit(name, value)
    return walk.generators


def module_globals(kind: type) -> dict[str, object]:
    """The global variables of the module of a class that may hold state, by dotted name."""
    module = sys.modules.get(kind.__module__)
    return {
        f"{kind.__module__}.{name}": value
        for name, value in (vars(module) if module else {}).items()
        if not name.startswith("__")
        and (isinstance(value, _STATEFUL) or type(value).__module__ == kind.__module__)
    }


class _Walk:
    """Visits each object once, up to a bound on their number."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.generators: dict[str, AnyGenerator] = {}
        self._seen: dict[int, object] = {}

    def visit(self, path: str, value: object) -> None:
        if isinstance(value, _PLAIN):
            self.found[path] = _short(repr(value))
            return
        if isinstance(value, _OPAQUE) or is_global(value):
            return
        if id(value) in self._seen or len(self._seen) >= _MOST_OBJECTS:
            return
        self._seen[id(value)] = value  # kept alive, so that its id stays its own
        if isinstance(value, GENERATORS):
            self.generators[path] = value
        text = _leaf(value)
        if text is not None:
            self.found[path] = text
            return
        for name, child in _children(value):
            self.visit(path + name, child)


def _leaf(value: object) -> str | None:
    """A text for objects without parts of their own; None for all others."""
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else _tensor(value)
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, GENERATORS):
        return _short(repr(generator_state(value)))
    if isinstance(value, (itertools.count, range, slice)):
        return repr(value)
    return None


def _children(value: object) -> Iterator[tuple[str, object]]:
    """What an object is made of, each with what is to be added to its path."""
    if isinstance(value, Mapping):
        yield "!", len(value)
        yield from ((f"[{_short(repr(k))}]", v) for k, v in _ends(value.items(), len(value)))
    elif isinstance(value, (list, tuple, deque)):
        yield "!", len(value)
        yield from ((f"[{i}]", v) for i, v in _ends(enumerate(value), len(value)))
    elif isinstance(value, (set, frozenset)):
        yield "!", len(value)
    elif isinstance(value, types.GeneratorType):
        yield "!", value.gi_frame.f_lasti if value.gi_frame else None
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f".{name}", _content(cell)) for name, cell in cells)
        yield ".__defaults__", (value.__defaults__, value.__kwdefaults__)
        yield from ((f".{name}", child) for name, child in vars(value).items())
    else:
        yield from _attributes(value)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    try:
        found = dict(vars(value))
    except TypeError:
        found = {}
    if isinstance(value, nn.Module):
        modules = found.pop("_modules", {})
        for hidden in ("_parameters", "_buffers", "training"):
            found.pop(hidden, None)
        found |= modules
    for kind in type(value).__mro__:
        for name in _slots(kind):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            own = {n: v for n, v in vars(kind).items() if not n.startswith("__")}
            found = own | found
    yield from ((f".{name}", child) for name, child in list(found.items()))


def _slots(kind: type) -> tuple[str, ...]:
    # Types of C have descriptors of their own, which may compute; only Python's are read.
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _ends(items: Any, count: int) -> Iterator[Any]:
    if count <= _MOST_ITEMS:
        yield from list(items)
        return
    half = _MOST_ITEMS // 2
    yield from itertools.islice(items, half)
    yield from itertools.islice(items, count - _MOST_ITEMS, None)


def _tensor(value: Tensor) -> str:
    if value.layout != torch.strided or value.device.type == "meta":
        return f"{value.layout} {tuple(value.shape)} {value._version}"
    flat = value.detach().reshape(-1)
    stride = max(1, flat.numel() * flat.element_size() // _MOST_BYTES)
    data = flat[::stride].cpu().contiguous()
    digest = _short(data.view(torch.uint8).numpy().tobytes())
    return f"{value.dtype} {tuple(value.shape)} {digest}"


def _array(value: np.ndarray[Any, Any]) -> str:
    if value.dtype.hasobject:
        return f"{value.dtype} {value.shape}"
    flat = value.reshape(-1) if value.flags.c_contiguous else value.flat[:0]
    stride = max(1, flat.nbytes // _MOST_BYTES)
    return f"{value.dtype} {value.shape} {_short(flat[::stride].tobytes())}"


def _short(value: str | bytes) -> str:
    if isinstance(value, str):
        if len(value) <= 40:
            return value
        value = value.encode(errors="surrogatepass")
    return hashlib.sha256(value).hexdigest()[:16]
