"""Carries in one flat tensor, as they travel between ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.carry.tree import Carry
from lockstep.engine.optimizer.optimizer_state import DTYPES, dtype_name

_WORD = 8
"""Bytes of an element: transports count elements, of which there may be 2 GiB."""


Carries = Mapping[int, Carry | None]
"""Carries by number of their microbatch; None for a microbatch that has none yet."""


def num_words(carries: Carries) -> int:
    """How long `pack` makes them, which their values are nothing to."""
    sizes = [tensor.nbytes for tensor in _tensors(carries)]
    return 1 + sum(map(_words, [len(_index(carries)), *sizes]))


def pack(carries: Carries, device: torch.device) -> Tensor:
    """Carries in one tensor [words] of int64.

    Args:
        carries: carries.
        device: device of the tensor.
    """
    text = torch.from_numpy(np.frombuffer(_index(carries), dtype=np.uint8).copy())
    pieces = [text, *map(_bytes, _tensors(carries))]
    sizes = [_words(len(piece)) for piece in pieces]
    packed = torch.zeros(1 + sum(sizes), dtype=torch.int64, device=device)
    packed[0] = len(text)
    first = 1
    for piece, size in zip(pieces, sizes, strict=True):
        packed[first : first + size].view(torch.uint8)[: len(piece)] = piece
        first += size
    return packed


def unpack(packed: Tensor) -> dict[int, Carry | None]:
    """The inverse of `pack`; tensors have memory of their own."""
    length = int(packed[0])
    first = 1 + _words(length)
    text = packed[1:first].view(torch.uint8)[:length].cpu().numpy().tobytes()
    carries: dict[int, Carry | None] = {}
    for number, described in json.loads(text):
        if described is None:
            carries[number] = None
            continue
        structure, rows = described
        tensors = {}
        for name, dtype, shape in rows:
            num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
            raw = packed[first : first + _words(num_bytes)].view(torch.uint8)[:num_bytes].clone()
            tensors[name] = raw.view(DTYPES[dtype]).view(shape)
            first += _words(num_bytes)
        carries[number] = Carry(structure, tensors)
    return carries


def _index(carries: Carries) -> bytes:
    index = [
        [number, carry and [carry.structure, _described(carry.tensors)]]
        for number, carry in carries.items()
    ]
    return json.dumps(index).encode()


def _tensors(carries: Carries) -> list[Tensor]:
    return [t for carry in carries.values() if carry for t in carry.tensors.values()]


def _described(tensors: Mapping[str, Tensor]) -> list[list[object]]:
    return [[name, dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _words(num_bytes: int) -> int:
    return -(-num_bytes // _WORD)
