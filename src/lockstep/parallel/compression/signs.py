"""One bit for each element: its sign, and for each block the mean of its magnitudes."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.parallel.compression.memory import BLOCK

_BYTE = 8


def pack(values: Tensor) -> Tensor:
    """A bit for each element that is not negative, the first one lowest in its byte.

    Args:
        values: [numel], a multiple of 8.

    Returns:
        uint8 [numel / 8].
    """
    bits = (values >= 0).view(-1, _BYTE).to(torch.uint8)
    return (bits << _places(values.device)).sum(dim=1, dtype=torch.uint8)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The signs: 1 for each bit that is set, -1 for the others; [8 x len(packed)]."""
    bits = (packed[:, None] >> _places(packed.device)) & 1
    return bits.view(-1).to(dtype).mul_(2).sub_(1)


def magnitudes(values: Tensor, counts: Tensor) -> Tensor:
    """The mean magnitude of each block.

    Args:
        values: [blocks x BLOCK], zero where a block is padded.
        counts: number of elements of each block that are not padding, [blocks]; at least 1.

    Returns:
        [blocks] of the dtype of `values`; NaN or infinite where an element is.
    """
    return values.view(-1, BLOCK).abs().sum(dim=1) / counts


def signed(packed: Tensor, magnitudes: Tensor) -> Tensor:
    """What `pack` and `magnitudes` have kept, [blocks x BLOCK]."""
    signs = unpack(packed, magnitudes.dtype).view(-1, BLOCK)
    return (signs * magnitudes[:, None]).view(-1)


def _places(device: torch.device) -> Tensor:
    return torch.arange(_BYTE, dtype=torch.uint8, device=device)
