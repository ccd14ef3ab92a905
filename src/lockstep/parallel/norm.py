"""The global norm of a flat gradient, in an order fixed by its layout alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.comm.transport import Transport
from lockstep.parallel.arena import BLOCK
from lockstep.parallel.layout import Range

_FEW = 256
"""Numbers that Python adds up faster than torch."""
_FEWEST_ROWS = 16
"""With fewer, torch's CUDA kernel (`Reduce.cuh`) gives each row more threads, and so another order
of summation; but a slice of few blocks must have the norms that they have in the whole."""


def block_norms(flat: Tensor) -> Tensor:
    """The Euclidean norm of each block of `BLOCK` elements: [numel / BLOCK], dtype of `flat`."""
    rows = flat.view(-1, BLOCK)
    num_blocks = len(rows)
    if flat.is_cuda and num_blocks < _FEWEST_ROWS:
        rows = pad(rows, (0, 0, 0, _FEWEST_ROWS - num_blocks))
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms[:num_blocks]


def global_norm(segments: Sequence[Tensor]) -> float:
    """The Euclidean norm of all segments [numel] together."""
    # By blocks, because a block is never cut between ranks: sharded, the numbers are the same.
    return combined([block_norms(s) for s in segments])


def sharded_block_norms(
    transport: Transport, segments: Sequence[Tensor], slices: Sequence[Sequence[Range]]
) -> list[Tensor]:
    """`block_norms` of each segment, where each rank holds only the slice it owns.

    Args:
        transport: transport between the ranks, all of which call this.
        segments: the segments, each [numel], of which this rank's slice counts.
        slices: for each segment, the elements that each rank owns: whole blocks.
    """
    norms = []
    for segment, ranges in zip(segments, slices, strict=True):
        own = ranges[transport.rank]
        counts = [len(r) // BLOCK for r in ranges]
        everyone = torch.empty(sum(counts), dtype=segment.dtype, device=segment.device)
        transport.all_gather(block_norms(segment[own.first : own.last]), everyone, counts)
        norms.append(everyone)
    return norms


class ScatteredNorms:
    """The blocks of all ranks of a model in units, in the order of the whole model."""

    def __init__(
        self,
        parts: Sequence[tuple[int, Hashable, int]],
        holders: Mapping[Any, int],
        rank: int,
    ) -> None:
        """Plan what each rank sends.

        Args:
            parts: (segment, unit, number of blocks) of each part of the whole model, in order.
            holders: for each unit, the rank that tells its norms.
            rank: rank of this process.
        """
        self._parts, self._holders, self._rank = list(parts), holders, rank

    def gather(
        self, transport: Transport, own: Sequence[Tensor], holds: Callable[[Any], bool]
    ) -> list[Tensor]:
        """Norms of the blocks of the whole model, for each segment; a collective.

        Args:
            transport: transport between all ranks.
            own: norms of this rank's blocks, for each segment.
            holds: function from a unit to whether this rank holds it.
        """
        return [self._of_segment(transport, s, norms, holds) for s, norms in enumerate(own)]

    def _of_segment(
        self, transport: Transport, segment: int, own: Tensor, holds: Callable[[Any], bool]
    ) -> Tensor:
        parts = [(unit, blocks) for s, unit, blocks in self._parts if s == segment]
        sent, first = [], 0
        for unit, blocks in parts:
            if not holds(unit):
                continue
            if self._holders[unit] == self._rank:
                sent.append(own[first : first + blocks])
            first += blocks
        counts = [0] * transport.size
        for unit, blocks in parts:
            counts[self._holders[unit]] += blocks
        everyone = own.new_empty(sum(counts))
        mine = torch.cat(sent) if sent else own.new_empty(0)
        transport.all_gather(mine, everyone, counts)
        of_rank = list(torch.split(everyone, counts))
        ordered = []
        for unit, blocks in parts:
            holder = self._holders[unit]
            ordered.append(of_rank[holder][:blocks])
            of_rank[holder] = of_rank[holder][blocks:]
        return torch.cat(ordered)


def combined(norms: Sequence[Tensor]) -> float:
    """The norm of everything, of the norms of the blocks of each segment."""
    # hypot scales its arguments, so that squares of large or tiny norms do not over- or underflow.
    return math.hypot(*(norm for part in norms for norm in _few(part).tolist()))


def _few(norms: Tensor) -> Tensor:
    """At most `_FEW` norms of the same vector, in an order that depends on their number alone."""
    while len(norms) > _FEW:
        missing = -len(norms) % BLOCK
        rows = (pad(norms, (0, missing)) if missing else norms).view(-1, BLOCK)
        # Squares of large norms would overflow in float32.
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms
