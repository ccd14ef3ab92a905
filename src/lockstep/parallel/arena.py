"""Memory for the nodes of the canonical tree that a rank holds.

One contiguous block of bytes, so that a node, or all of them, travel as one message without being
copied together first:

    | header | row 0: segments, scalars | row 1 | ... |

A row is one node: the flat gradient in one segment a dtype, then the sums of the scalars (loss,
weight, metrics) in float64. The header belongs to the rank, not to a node, and is not summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.parallel.layout import Range, split

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""
BLOCK = 1024
"""Elements: segments are multiples of it, and it is the unit of ownership and of the norm.

Cuts between ranks that are multiples of every vector width leave no element to the scalar tail of
an element-wise kernel, whose rounding may differ from the vector body's.
"""


class Segment(NamedTuple):
    """One part of the flat gradient.

    Attributes:
        dtype: dtype of the elements.
        numel: number of elements, a multiple of `BLOCK`.
    """

    dtype: torch.dtype
    numel: int


def slice_up(segments: Sequence[Segment], size: int) -> list[list[Range]]:
    """For each segment, the range of elements of each of `size` ranks: whole blocks."""
    return [
        [Range(r.first * BLOCK, r.last * BLOCK) for r in split(s.numel // BLOCK, size)]
        for s in segments
    ]


@dataclass
class Row:
    """Typed views of one node's bytes.

    Attributes:
        segments: for each segment, [numel] of its dtype.
        scalars: sums of loss, weight and metrics, float64 [num_scalars].
    """

    segments: list[Tensor]
    scalars: Tensor

    def add_(self, other: Row) -> None:
        """Add another row's values."""
        for mine, theirs in zip(self.segments, other.segments, strict=True):
            mine.add_(theirs)
        self.scalars.add_(other.scalars)


class Arena:
    """A rank's header and rows, as views of one block of bytes.

    Attributes:
        header: float64 [num_header].
        rows: the rows, each the memory of one node.
    """

    def __init__(self, layout: ArenaLayout, memory: Tensor, num_rows: int) -> None:
        self._layout = layout
        self._memory = memory
        self.header = memory[: 8 * layout.num_header].view(torch.float64)
        self.rows = [layout.row(memory, r) for r in range(num_rows)]

    def message(self, num_rows: int) -> Tensor:
        """The bytes of the header and the first `num_rows` rows."""
        return self._memory[: self._layout.num_bytes(num_rows)]


class ArenaLayout:
    """The places of header, rows, segments and scalars in an arena's bytes."""

    def __init__(self, segments: Sequence[Segment], num_scalars: int, num_header: int) -> None:
        self.segments = tuple(segments)
        self.num_scalars = num_scalars
        self.num_header = num_header
        self._header_bytes = _aligned(8 * num_header)
        self._row_bytes = _aligned(8 * num_scalars) + sum(
            _aligned(s.numel * s.dtype.itemsize) for s in segments
        )

    def num_bytes(self, num_rows: int) -> int:
        """Size of an arena of `num_rows` rows, in bytes."""
        return self._header_bytes + num_rows * self._row_bytes

    def allocate(self, num_rows: Sequence[int], device: torch.device) -> tuple[Tensor, list[Arena]]:
        """Arenas one behind the other in memory, all zero.

        Args:
            num_rows: number of rows of each arena.
            device: device of the memory.

        Returns:
            The whole memory, uint8 [bytes], and the arenas.
        """
        sizes = [self.num_bytes(n) for n in num_rows]
        memory = torch.zeros(sum(sizes) + ALIGNMENT, dtype=torch.uint8, device=device)
        skip = -memory.data_ptr() % ALIGNMENT
        memory = memory[skip : skip + sum(sizes)]
        parts = zip(torch.split(memory, sizes), num_rows, strict=True)
        return memory, [Arena(self, part, n) for part, n in parts]

    def row(self, memory: Tensor, index: int) -> Row:
        """Views of row `index` of an arena in `memory`."""
        offset = self.num_bytes(index)
        segments = []
        for dtype, numel in self.segments:
            num_bytes = numel * dtype.itemsize
            segments.append(memory[offset : offset + num_bytes].view(dtype))
            offset += _aligned(num_bytes)
        scalars = memory[offset : offset + 8 * self.num_scalars].view(torch.float64)
        return Row(segments, scalars)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
