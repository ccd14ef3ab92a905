"""Writing safetensors files one tensor after the other, so that they need not all be in memory.

The format (github.com/huggingface/safetensors): the length of the header as 8 bytes, the header in
JSON with dtype, shape and place of each tensor, then the tensors without gaps. What reads it may
want tensors at multiples of their element size, so those with the largest elements come first.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from lockstep.engine.digests import memory_of

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_ALIGNMENT = 8
"""Bytes: the header ends at a multiple of it."""


class Kind(NamedTuple):
    """What a header tells of a tensor."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.shape.numel() * self.dtype.itemsize


class Tensors(NamedTuple):
    """The tensors of a file, which come when they are asked for."""

    kinds: Mapping[str, Kind]
    """Of each tensor by name, those of the largest elements first."""
    content: Iterable[Tensor]
    """The tensors in that order, on any device."""


def in_memory(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors by name as the content of a file."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    kinds = {name: Kind(tensors[name].dtype, tensors[name].shape) for name in names}
    return Tensors(kinds, (tensors[name] for name in names))


def write_tensors(path: Path, tensors: Tensors) -> dict[str, Any]:
    """Write a file, and return when it is on disk.

    Returns:
        Its entry in a manifest: SHA-256 in hexadecimal, and size in bytes.

    Raises:
        KeyError: a dtype that the format lacks.
        OSError: the disk is full, read-only, or gone.
    """
    with path.open("wb") as file:
        digested = _Digested(file)
        digested.write(_header(tensors.kinds))
        for tensor in tensors.content:
            plain = tensor.detach().cpu().contiguous()
            digested.write(memory_of(plain))
        file.flush()
        os.fsync(file.fileno())
    return digested.entry()


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """As `write_tensors`, for a file of any content."""
    with path.open("wb") as file:
        digested = _Digested(file)
        digested.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digested.entry()


def _header(kinds: Mapping[str, Kind]) -> bytes:
    header, first = {}, 0
    for name, kind in kinds.items():
        last = first + kind.num_bytes
        place = {"shape": list(kind.shape), "data_offsets": [first, last]}
        header[name] = {"dtype": _NAMES[kind.dtype], **place}
        first = last
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class _Digested:
    """A file, and the SHA-256 of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha, self._num_bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._sha.update(view)
        self._num_bytes += len(view)

    def entry(self) -> dict[str, Any]:
        return {"sha256": self._sha.hexdigest(), "bytes": self._num_bytes}
