"""Texts that differ when values without parts of their own do."""

from __future__ import annotations

import array
import ctypes
import hashlib
import io
import itertools
import mmap
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.generators import GENERATORS, generator_state

MOST_BYTES = 1 << 20

MEMORY = (memoryview, mmap.mmap, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
"""Types of objects that are memory, of which others may have a view."""
STREAMS = (io.BytesIO, io.StringIO)
"""Types of files that are in memory."""

_BY_MODULE: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("_hashlib", "_blake2", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3"),
            lambda value: str(value.hexdigest()),
        ),
        "sqlite3": lambda connection: str(connection.total_changes),
        "multiprocessing.sharedctypes": lambda value: _memory(value.get_obj(), MOST_BYTES),
    }
)
"""Texts of objects of other modules' types: sums so far, changes of a data base, shared values."""


def leaf(value: object, most_bytes: int = MOST_BYTES) -> str | None:
    """A text for objects without parts of their own, and for tensors; None for all others.

    Args:
        value: the object.
        most_bytes: number of bytes of an array that are hashed; those of a larger one are evenly
            spread.
    """
    if isinstance(value, Tensor):
        return _tensor(value, most_bytes)
    if isinstance(value, np.ndarray):
        return None if value.dtype == object else _array(value, most_bytes)
    if isinstance(value, (bytes, bytearray, array.array)):
        stride = max(1, len(value) // most_bytes)
        return f"{len(value)} {short(bytes(value[::stride]))}"
    if isinstance(value, GENERATORS):
        return short(repr(generator_state(value)))
    if isinstance(value, (itertools.count, range, slice)):
        return repr(value)
    if isinstance(value, MEMORY):
        return _memory(value, most_bytes)
    if isinstance(value, STREAMS):
        return f"{value.tell()} {short(value.getvalue())}"
    text = _BY_MODULE.get(type(value).__module__)
    return None if text is None else text(value)


def has_text(value: object) -> bool:
    """Whether `leaf` has a text for an object of another module's type."""
    return isinstance(value, STREAMS) or type(value).__module__ in _BY_MODULE


def _memory(value: Any, most_bytes: int) -> str:
    view = memoryview(value)
    data = view.cast("B") if view.c_contiguous else view.tobytes()
    stride = max(1, len(data) // most_bytes)
    return f"{len(data)} {short(bytes(data[::stride]))}"


def _tensor(value: Tensor, most_bytes: int) -> str:
    if value.layout != torch.strided or value.device.type == "meta":
        return f"{value.layout} {tuple(value.shape)} {value._version}"
    value = value.detach()
    stride = max(1, value.numel() * value.element_size() // most_bytes)
    if value.is_contiguous() or stride == 1:
        sample = value.reshape(-1)[::stride]
    else:  # without a copy of all of it
        indices = torch.arange(0, value.numel(), stride, device=value.device)
        sample = value[torch.unravel_index(indices, value.shape)]
    data = sample.cpu().resolve_conj().resolve_neg().contiguous()
    digest = short(data.view(torch.uint8).numpy().tobytes())
    return f"{value.dtype} {tuple(value.shape)} {digest}"


def _array(value: np.ndarray[Any, Any], most_bytes: int) -> str:
    if value.dtype.hasobject:
        return f"{value.dtype} {value.shape}"
    flat = value.reshape(-1) if value.flags.c_contiguous else value.flat
    stride = max(1, value.nbytes // most_bytes)
    return f"{value.dtype} {value.shape} {short(flat[::stride].tobytes())}"


def short(value: str | bytes) -> str:
    """Itself if it is a short text, else the beginning of its SHA-256."""
    if isinstance(value, str):
        if len(value) <= 40:
            return value
        value = value.encode(errors="surrogatepass")
    return hashlib.sha256(value).hexdigest()[:16]
