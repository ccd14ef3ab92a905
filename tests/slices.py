"""Slices of flat tensors, for tests of optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.engine.flat_tensors import FlatTensors, Slice
from lockstep.parallel.layout import Range


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
