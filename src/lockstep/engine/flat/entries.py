"""What lies where in flat memory: tensors, units of the model, groups of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lockstep.nn.units import Unit
from lockstep.parallel.layout import Range


@dataclass(frozen=True)
class Entry:
    """One tensor's place: `shape` elements from `offset` of segment `segment`."""

    name: str
    segment: int
    group: int
    offset: int
    shape: torch.Size

    @property
    def range(self) -> Range:
        """The elements of the segment it occupies."""
        return Range(self.offset, self.offset + self.shape.numel())


class Part(NamedTuple):
    """The blocks of a segment that belong to one unit of the model.

    Attributes:
        segment: number of the segment.
        unit: unit; `EVERYWHERE` for tensors that every rank holds.
        num_blocks: number of blocks of `BLOCK` elements.
    """

    segment: int
    unit: Unit
    num_blocks: int


@dataclass(frozen=True)
class Piece:
    """The elements of a segment that belong to one optimizer group, padding included."""

    segment: int
    group: int
    range: Range
