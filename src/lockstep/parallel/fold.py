"""Adding up a rank's own microbatches along the canonical tree, as they come.

One contiguous block of bytes, so that a node, or all of them, travel as one message without being
copied together first:

    | header | row 0: segments, scalars | row 1 | ... |

A row is one node: the flat gradient in one segment a dtype, then the sums of the scalars (loss,
weight, metrics) in float64. The header belongs to the rank, not to a node, and is not summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.parallel.layout import Assigned, Range, leaves, merges, split, stack_depth

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


TensorSpecs = Sequence[Sequence[tuple[int, torch.Size]]]
"""For each segment, the offset in elements and the shape of each tensor that lies in it."""


def views(segment: Tensor, specs: Sequence[tuple[int, torch.Size]]) -> list[Tensor]:
    """The tensors that lie in a segment."""
    return [segment[offset : offset + shape.numel()].view(shape) for offset, shape in specs]


def laid_out(
    segments: Sequence[Segment], shapes: Sequence[Sequence[torch.Size]], unit: int
) -> tuple[list[Segment], list[list[tuple[int, torch.Size]]]]:
    """Segments of the same dtypes that hold tensors of these shapes, and where they lie.

    Args:
        segments: segments whose dtypes are taken.
        shapes: for each segment, the shapes of its tensors.
        unit: each tensor begins at a multiple of so many elements.
    """
    laid, specs = [], []
    for segment, of in zip(segments, shapes, strict=True):
        lengths = [-(-shape.numel() // unit) * unit for shape in of]
        offsets = accumulate(lengths, initial=0)
        specs.append(list(zip(offsets, of, strict=False)))
        laid.append(Segment(segment.dtype, -(-sum(lengths) // BLOCK) * BLOCK))
    return laid, specs


def slice_up(segments: Sequence[Segment], size: int) -> list[list[Range]]:
    """For each segment, the range of elements of each of `size` ranks: whole blocks."""
    return [split_blocks(Range(0, segment.numel), size) for segment in segments]


def split_blocks(whole: Range, size: int) -> list[Range]:
    """A range of whole blocks in `size` such ranges."""
    return [
        Range(whole.first + part.first * BLOCK, whole.first + part.last * BLOCK)
        for part in split(len(whole) // BLOCK, size)
    ]


def parts_of(slices: Sequence[Range], start: int, length: int) -> list[Range]:
    """Of each slice, the elements from `start` on, at most `length` of them."""
    return [
        Range(min(s.first + start, s.last), min(s.first + start + length, s.last)) for s in slices
    ]


def buckets(
    slices: Sequence[Range], bucket_bytes: int, width: int, unit: int = BLOCK
) -> Iterator[list[Range]]:
    """Parts of all ranks' slices that are exchanged at a time.

    Args:
        slices: elements that each rank owns.
        bucket_bytes: greatest number of bytes that a rank receives at a time.
        width: bytes that a rank receives for each element of its part.
        unit: parts are multiples of so many elements, and at least one, however small the bucket.
    """
    length = max(bucket_bytes // width // unit, 1) * unit
    for start in range(0, max(map(len, slices)), length):
        yield parts_of(slices, start, length)


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

    def copy_(self, other: Row) -> None:
        """Copy another row's values."""
        for mine, theirs in zip(self.segments, other.segments, strict=True):
            mine.copy_(theirs)
        self.scalars.copy_(other.scalars)


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

    def copy_small(self, other: Arena) -> None:
        """Copy the header and the scalars of another arena."""
        self.header.copy_(other.header)
        for mine, theirs in zip(self.rows, other.rows, strict=False):
            mine.scalars.copy_(theirs.scalars)

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
        memory = aligned_memory(sum(sizes), device)
        parts = zip(torch.split(memory, sizes), num_rows, strict=True)
        return memory, [Arena(self, part, n) for part, n in parts]

    def parts(self, row: Row) -> list[tuple[int, Tensor]]:
        """The segments and the scalars of a row, each with the byte of the row it begins at."""
        parts = [*row.segments, row.scalars]
        sizes = (_aligned(part.numel() * part.itemsize) for part in parts)
        return list(zip(accumulate(sizes, initial=0), parts, strict=False))

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


def aligned_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Memory that begins at a multiple of `ALIGNMENT`, all zero: uint8 [num_bytes]."""
    memory = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -memory.data_ptr() % ALIGNMENT
    return memory[skip : skip + num_bytes]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


_is_absent = partial(is_, None)


def rows_needed(microbatches: Assigned, num_microbatches: int) -> int:
    """Rows of an arena that the fold of these microbatches uses, at least one.

    Args:
        microbatches: range of microbatches of this rank; may be empty.
        num_microbatches: number of microbatches of the whole global batch.
    """
    counts, _ = merges(leaves(microbatches), num_microbatches)
    return max(1, stack_depth(counts))


class LateGradientError(Exception):
    """A leaf has a gradient, or another one, of a part that was summed earlier.

    Attributes:
        index: number of the tensor among those of the leaf.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"gradient {index} came after its part of the leaf was summed")
        self.index = index


class Fold:
    """A stack of partial sums in rows of memory: a binary counter of flat gradients.

    Attributes:
        nodes: nodes of the canonical tree in the rows 0, 1, … once all leaves are in.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        specs: TensorSpecs,
        microbatches: Assigned,
        num_microbatches: int,
    ) -> None:
        """Prepare to fold `microbatches`.

        Args:
            rows: memory: at least `rows_needed` rows.
            specs: where the tensors of a leaf lie in each segment.
            microbatches: range of microbatches of this rank.
            num_microbatches: number of microbatches of the whole global batch.
        """
        self._rows = rows
        self._merges, self.nodes = merges(leaves(microbatches), num_microbatches)
        self._views = [
            [v for segment, of in zip(row.segments, specs, strict=True) for v in views(segment, of)]
            for row in rows
        ]
        self._next = 0
        self._height = 0
        self._early: dict[int, tuple[Tensor, int]] = {}

    def restart(self) -> None:
        """Forget all leaves."""
        # Rows need not be cleared: the first leaf of each overwrites what is there.
        self._next = self._height = 0
        self._early.clear()

    @property
    def summed(self) -> Sequence[Row]:
        """The rows of all nodes; none before all leaves are in."""
        return self._rows[: len(self.nodes)] if self._next == len(self._merges) else ()

    @property
    def is_last(self) -> bool:
        """Whether the next leaf is the last one."""
        return self._next == len(self._merges) - 1

    def add_early(self, index: int, tensor: Tensor) -> None:
        """Add one tensor of the last leaf, before the others are there.

        Args:
            index: its number among those of the leaf.
            tensor: the tensor; `add` makes sure that it stays as it is.

        Raises:
            LateGradientError: it was added before, and has changed since.
        """
        if index in self._early:
            raise LateGradientError(index)
        self._early[index] = tensor, tensor._version
        self._add_last(index, tensor)

    def _add_last(self, index: int, tensor: Tensor | None) -> None:
        """Add one tensor of the last leaf, and the sums of earlier leaves as far as they go."""
        count, top = self._merges[-1], self._height
        row = self._views[top - 1 if count else top]
        _store(
            [row[index]],
            [tensor],
            torch._foreach_add_ if count else torch._foreach_copy_,
            _add_zero if count else _zero,
        )
        for height in range(top - 1, top - count, -1):
            self._views[height - 1][index].add_(self._views[height][index])

    def _add_rest(self, tensors: Sequence[Tensor | None], scalars: Tensor) -> None:
        """Add what `add_early` has not added of the last leaf."""
        for index, tensor in enumerate(tensors):
            if index not in self._early:
                self._add_last(index, tensor)
                continue
            early, version = self._early[index]
            if tensor is not early or tensor._version != version:
                raise LateGradientError(index)
        count, rows = self._merges[-1], self._rows
        self._next += 1
        self._height += not count
        if not count:
            rows[self._height - 1].scalars.copy_(scalars)
            return
        rows[self._height - 1].scalars.add_(scalars)
        for _ in range(count - 1):
            self._height -= 1
            rows[self._height - 1].scalars.add_(rows[self._height].scalars)

    def add(self, tensors: Sequence[Tensor | None], scalars: Tensor) -> None:
        """Add the next leaf.

        Args:
            tensors: tensors of the leaf in the order of `specs`; None counts as zeros.
            scalars: sums of the leaf's scalars, float64 [num_scalars].

        Raises:
            LateGradientError: one that `add_early` was given is another one by now.
        """
        if self._early:
            self._add_rest(tensors, scalars)
            return
        count = self._merges[self._next]
        self._next += 1
        rows = self._rows
        if count == 0:
            # A left child, or one without a sibling here, waits in a row until others follow.
            _store(self._views[self._height], tensors, torch._foreach_copy_, _zero)
            rows[self._height].scalars.copy_(scalars)
            self._height += 1
            return
        # A right sibling is added to the left one at once, so it needs no row of its own.
        _store(self._views[self._height - 1], tensors, torch._foreach_add_, _add_zero)
        rows[self._height - 1].scalars.add_(scalars)
        for _ in range(count - 1):
            self._height -= 1
            rows[self._height - 1].add_(rows[self._height])


def _store(
    views: list[Tensor],
    tensors: Sequence[Tensor | None],
    foreach: Callable[..., Any],
    absent: Callable[[Tensor], Any],
) -> None:
    if not any(map(_is_absent, tensors)):
        if views:
            foreach(views, tensors)
        return
    for view, tensor in zip(views, tensors, strict=True):
        if tensor is None:
            absent(view)
        else:
            foreach([view], [tensor])


def _zero(view: Tensor) -> None:
    view.zero_()


def _add_zero(view: Tensor) -> None:
    # Not a no-op: it turns -0.0 into 0.0, as adding a row of zeros does on another layout.
    view.add_(0.0)
