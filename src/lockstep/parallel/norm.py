"""The global norm of a flat gradient, in an order fixed by its layout alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.comm.transport import Transport
from lockstep.parallel.fold import BLOCK, Row
from lockstep.parallel.layout import Range

_AT_A_TIME = 1 << 20
"""Elements that are added up at a time where a sum is not kept."""
_FEW = 256
"""Numbers that Python adds up faster than torch."""
_FEWEST_ROWS = 16
"""With fewer, torch's CUDA kernel (`Reduce.cuh`) gives each row more threads, and so another order
of summation; but a slice of few blocks must have the norms that they have in the whole."""


def in_blocks(flat: Tensor) -> Tensor:
    """A segment [numel] as its blocks [numel / BLOCK, BLOCK]; the same memory."""
    return flat.view(-1, BLOCK)


def block_norms(blocks: Tensor) -> Tensor:
    """The Euclidean norm of each block: [num_blocks], dtype of `blocks`.

    Args:
        blocks: see `in_blocks`.
    """
    num_blocks = blocks.shape[0]  # `len` takes three times as long
    if num_blocks >= _FEWEST_ROWS or blocks.is_cpu:
        norms: Tensor = torch.linalg.vector_norm(blocks, dim=1)
        return norms
    padded = pad(blocks, (0, 0, 0, _FEWEST_ROWS - num_blocks))
    norms = torch.linalg.vector_norm(padded, dim=1)
    return norms[:num_blocks]


def norm_of_mean(rows: Sequence[Row], num_segments: int) -> float:
    """The norm of the sum of some nodes, by their weight; 0 if there are none.

    Args:
        rows: the nodes.
        num_segments: number of segments, from the first on, that count.
    """
    weight = sum(float(row.scalars[1]) for row in rows)
    squares = 0.0
    for segments in zip(*(row.segments[:num_segments] for row in rows), strict=True):
        for parts in zip(*(torch.split(one, _AT_A_TIME) for one in segments), strict=True):
            total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            squares += float(torch.linalg.vector_norm(total)) ** 2
    return math.sqrt(squares) / weight if weight else 0.0


def global_norm(segments: Sequence[Tensor]) -> float:
    """The Euclidean norm of all segments together, each seen `in_blocks`."""
    # By blocks, because a block is never cut between ranks: sharded, the numbers are the same.
    return combined([block_norms(blocks) for blocks in segments])


def sharded_block_norms(
    transport: Transport, own: Sequence[Tensor], slices: Sequence[Sequence[Range]]
) -> list[Tensor]:
    """`block_norms` of each segment, where each rank holds only the slice it owns.

    Args:
        transport: transport between the ranks, all of which call this.
        own: slice of each segment that this rank owns.
        slices: for each segment, the elements that each rank owns: whole blocks.
    """
    norms: list[Tensor] = [torch.empty(0)] * len(own)
    mine = [block_norms(in_blocks(part)) for part in own]
    for dtype in dict.fromkeys(part.dtype for part in own):
        # In one message, however many segments there are.
        segments = [s for s, part in enumerate(own) if part.dtype == dtype]
        lengths = [[len(slices[s][r]) // BLOCK for s in segments] for r in range(transport.size)]
        counts = [sum(of_rank) for of_rank in lengths]
        sent = torch.cat([mine[s] for s in segments])
        everyone = sent.new_empty(sum(counts))
        transport.all_gather(sent, everyone, counts)
        parts = torch.split(everyone, [n for of_rank in lengths for n in of_rank])
        for number, segment in enumerate(segments):
            norms[segment] = torch.cat(parts[number :: len(segments)])
    return norms


class NormPart(NamedTuple):
    """Blocks that lie side by side in a segment, and belong to one unit of the model.

    Attributes:
        kind: blocks of one kind, which have one dtype, are added up first.
        segment: number of the segment.
        unit: unit of the model.
        num_blocks: number of blocks.
    """

    kind: Hashable
    segment: int
    unit: Hashable
    num_blocks: int


class ScatteredNorms:
    """The norms of blocks in the order of the whole model, wherever they lie."""

    def __init__(self, parts: Sequence[NormPart], holders: Mapping[Any, int], rank: int) -> None:
        """Plan what each rank sends.

        Args:
            parts: parts of the whole model, in order.
            holders: for each unit, the rank that sends its norms.
            rank: rank of this process.
        """
        self._parts, self._holders, self._rank = list(parts), holders, rank

    def gather(
        self, transport: Transport, own: Sequence[Tensor], holds: Callable[[Any], bool]
    ) -> list[Tensor]:
        """Norms of the blocks of the whole model, for each kind; a collective.

        Args:
            transport: transport between all ranks.
            own: norms of this rank's blocks, for each segment.
            holds: function from a unit to whether this rank holds it.
        """
        there: list[Tensor | None] = []
        firsts = [0] * len(own)
        for part in self._parts:
            if not holds(part.unit):
                there.append(None)
                continue
            first = firsts[part.segment]
            firsts[part.segment] += part.num_blocks
            there.append(own[part.segment][first : firsts[part.segment]])
        kinds = dict.fromkeys(part.kind for part in self._parts)
        # Of a kind that this rank holds nothing of, there is an empty segment.
        likes = [own[next(p.segment for p in self._parts if p.kind == kind)] for kind in kinds]
        pairs = zip(kinds, likes, strict=True)
        return [self._of_kind(transport, kind, there, like) for kind, like in pairs]

    def _of_kind(
        self,
        transport: Transport,
        kind: Hashable,
        there: Sequence[Tensor | None],
        like: Tensor,
    ) -> Tensor:
        pairs = [(p, n) for p, n in zip(self._parts, there, strict=True) if p.kind == kind]
        if transport.size == 1:
            return torch.cat([norms for _, norms in pairs if norms is not None])
        sent = [n for p, n in pairs if n is not None and self._holders[p.unit] == self._rank]
        counts = [0] * transport.size
        for part, _ in pairs:
            counts[self._holders[part.unit]] += part.num_blocks
        everyone = like.new_empty(sum(counts))
        mine = torch.cat(sent) if sent else like.new_empty(0)
        transport.all_gather(mine, everyone, counts)
        of_rank = list(torch.split(everyone, counts))
        ordered = []
        for part, _ in pairs:
            holder = self._holders[part.unit]
            ordered.append(of_rank[holder][: part.num_blocks])
            of_rank[holder] = of_rank[holder][part.num_blocks :]
        return torch.cat(ordered)


def combined(norms: Sequence[Tensor]) -> float:
    """The norm of everything, of the norms of the blocks of each segment."""
    # hypot scales its arguments, so that squares of large or tiny norms do not over- or underflow.
    return math.hypot(*chain.from_iterable([few(part).tolist() for part in norms]))


def few(norms: Tensor) -> Tensor:
    """At most `_FEW` norms of the same vector, in an order that depends on their number alone."""
    while norms.shape[0] > _FEW:
        missing = -len(norms) % BLOCK
        rows = (pad(norms, (0, missing)) if missing else norms).view(-1, BLOCK)
        # Squares of large norms would overflow in float32.
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms
