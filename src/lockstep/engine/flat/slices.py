"""Slices of flat memory: what a rank steps, and where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lockstep.engine.flat.flat_tensors import FlatTensors
from lockstep.parallel.layout import Range


class Slice(NamedTuple):
    """Elements of a segment that a rank steps."""

    range: Range
    """Which elements."""
    parameters: Tensor
    """Their memory."""
    gradient: Tensor
    """Memory of their mean gradient."""

    def of(self, part: Range) -> Tensor:
        """The gradient of those elements of `part` that are among these."""
        first, last = self.range
        return self.gradient[max(part.first - first, 0) : max(min(part.last, last) - first, 0)]


def slices_of(
    flat: FlatTensors, gradients: Sequence[Tensor], owned: Sequence[Sequence[Range]]
) -> list[list[Slice]]:
    """Slices for each segment, as parts of whole flat tensors.

    Args:
        flat: parameters in flat memory.
        gradients: mean gradient, laid out as `flat.flats`.
        owned: ranges of elements, for each segment.
    """
    return [
        [Slice(r, parameters[r.first : r.last], gradient[r.first : r.last]) for r in ranges]
        for parameters, gradient, ranges in zip(flat.flats, gradients, owned, strict=True)
    ]


def storages(slices: Sequence[Sequence[Slice]]) -> set[int]:
    """Addresses of the memory that lies outside of an optimizer."""
    tensors = [t for of_segment in slices for s in of_segment for t in (s.parameters, s.gradient)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def is_in(part: Range, whole: Range) -> bool:
    """Whether all of a part is among the elements of another range."""
    return whole.first <= part.first and part.last <= whole.last


def within(part: Range, whole: Range) -> slice:
    """Where a part is, counted from the start of what it is a part of."""
    return slice(part.first - whole.first, part.last - whole.first)
