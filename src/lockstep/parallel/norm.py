"""The global norm of a flat gradient, in an order fixed by its layout alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.parallel.arena import BLOCK
from lockstep.parallel.layout import Range


def block_norms(flat: Tensor) -> Tensor:
    """The Euclidean norm of each block of `BLOCK` elements, [numel / BLOCK]."""
    norms: Tensor = torch.linalg.vector_norm(flat.view(-1, BLOCK), dim=1)
    return norms


def global_norm(segments: Sequence[Tensor]) -> float:
    """The Euclidean norm of all segments together."""
    return _combine([block_norms(s) for s in segments])


def sharded_global_norm(
    transport: Transport, segments: Sequence[Tensor], slices: Sequence[Sequence[Range]]
) -> float:
    """`global_norm`, to the bit, where each rank holds only the slice it owns."""
    norms = []
    for segment, ranges in zip(segments, slices, strict=True):
        own = ranges[transport.rank]
        counts = [len(r) // BLOCK for r in ranges]
        everyone = torch.empty(sum(counts), dtype=segment.dtype, device=segment.device)
        transport.all_gather(block_norms(segment[own.first : own.last]), everyone, counts)
        norms.append(everyone)
    return _combine(norms)


def _combine(norms: Sequence[Tensor]) -> float:
    return math.hypot(*(norm for part in norms for norm in part.tolist()))
