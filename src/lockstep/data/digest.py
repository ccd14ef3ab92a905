"""Digests of samples and batches, whatever they are made of."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def data_digest(value: Any) -> str:
    """SHA-256 of all tensors, arrays, numbers, texts and bytes in nested lists, tuples and dicts.

    Objects of other kinds count by their class only.
    """
    sha = hashlib.sha256()
    leaves, structure = tree_flatten(value)
    sha.update(repr(structure).encode(errors="backslashreplace"))
    for leaf in leaves:
        sha.update(_content(leaf))
    return sha.hexdigest()


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = plain.view(torch.uint8).numpy().tobytes()
        return f"{leaf.dtype} {tuple(leaf.shape)} ".encode() + data
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return f"{leaf.dtype} {leaf.shape} ".encode() + np.ascontiguousarray(leaf).tobytes()
    if isinstance(leaf, (bytes, bytearray)):
        return f"bytes {len(leaf)} ".encode() + bytes(leaf)
    if isinstance(leaf, (str, int, float, complex, bool, np.generic, type(None))):
        return f"{type(leaf).__name__} {leaf!r} ".encode(errors="backslashreplace")
    return f"{type(leaf).__name__} ".encode()
