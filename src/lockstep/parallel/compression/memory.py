"""Memory in which a leaf lies while it is compressed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.parallel.arena import BLOCK as OWNED
from lockstep.parallel.arena import Segment

BLOCK = 256
"""Elements of one tensor that have a scale in common; the last ones of a tensor are padded."""

Places = Sequence[Sequence[tuple[int, torch.Size]]]
"""For each segment, the (offset, shape) of each tensor; offsets in elements."""


class LeafMemory:
    """One flat tensor for each segment, zero wherever no tensor is: who writes there keeps it so.

    Attributes:
        segments: flat tensors, of one dimension.
        places: where tensors lie in them.
    """

    def __init__(self, segments: Sequence[Segment], places: Places, device: torch.device) -> None:
        self.places = [list(of) for of in places]
        self.segments = [torch.zeros(s.numel, dtype=s.dtype, device=device) for s in segments]
        self._views = [
            segment[offset : offset + shape.numel()].view(shape)
            for segment, of in zip(self.segments, self.places, strict=True)
            for offset, shape in of
        ]

    def take(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy a leaf in here.

        Args:
            tensors: tensors of the leaf in the order of `places`; None counts as zeros.
        """
        there = [tensor for tensor in tensors if tensor is not None]
        if len(there) < len(self._views):
            torch._foreach_zero_(self._views)
        pairs = zip(self._views, tensors, strict=True)
        views = [view for view, tensor in pairs if tensor is not None]
        if views:
            torch._foreach_copy_(views, there)

    def give(self, other: LeafMemory) -> None:
        """Copy all tensors to the same ones of another memory, wherever they lie there."""
        torch._foreach_copy_(other._views, self._views)


def in_blocks(
    segments: Sequence[Segment], places: Places
) -> tuple[list[Segment], list[list[tuple[int, torch.Size]]]]:
    """The same tensors, each at the beginning of a block, so that no block has parts of two.

    Args:
        segments: dtype and number of elements of each segment.
        places: where tensors lie in them.
    """
    padded, moved = [], []
    for segment, of in zip(segments, places, strict=True):
        end, own = 0, []
        for _, shape in of:
            own.append((end, shape))
            end += -(-shape.numel() // BLOCK) * BLOCK
        padded.append(Segment(segment.dtype, -(-end // OWNED) * OWNED))
        moved.append(own)
    return padded, moved
