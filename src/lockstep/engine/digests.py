"""Digests of tensors: SHA-256 of what a run comes to, and checksums to tell changes by."""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def tensor_digest(name: str, tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's name, dtype, shape and bytes."""
    sha = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    plain = tensor.detach().cpu().contiguous()
    sha.update(memory_of(plain))
    return sha.digest()


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes: three times faster than SHA-256, and than to copy and compare."""
    plain = tensor.detach().cpu().contiguous()
    return zlib.crc32(memory_of(plain))


def memory_of(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, as a buffer that does not keep it alive."""
    # Not by way of numpy, after which a tensor cannot give back its memory (`FlatTensors.close`).
    return (ctypes.c_ubyte * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())


def model_digest(model: nn.Module, more: Mapping[str, Tensor] | None = None) -> str:
    """SHA-256 of all parameters, persistent buffers and `more` tensors, by sorted name."""
    return tensors_digest(model.state_dict() | dict(more or {}))


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all tensors by sorted name."""
    return combined_digest({name: tensor_digest(name, t) for name, t in tensors.items()})


def combined_digest(digests: Mapping[str, bytes]) -> str:
    """`tensors_digest` of tensors, by their `tensor_digest` under each name."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()
