"""Leaves whose order of summation shows in the bits, and their sum by the plain definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.parallel.fold import BLOCK, Row, Segment

SEGMENTS = [Segment(torch.float32, 3 * BLOCK), Segment(torch.float64, 2 * BLOCK)]
PLACES = [
    [(0, torch.Size([40, 50])), (2000, torch.Size([])), (2016, torch.Size([7, 3, 5]))],
    [(0, torch.Size([1025])), (1040, torch.Size([2, 4]))],
]
NUM_SCALARS = 6


@dataclass
class Leaf:
    tensors: list[Tensor | None]
    scalars: Tensor

    def values(self) -> list[Tensor]:
        """Everything that is summed, with zeros for what is missing."""
        shapes = [(s.dtype, shape) for s, p in zip(SEGMENTS, PLACES, strict=True) for _, shape in p]
        tensors = [
            torch.zeros(shape, dtype=dtype) if t is None else t
            for (dtype, shape), t in zip(shapes, self.tensors, strict=True)
        ]
        return [*tensors, self.scalars]


def wild(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values of magnitudes from 1e-8 to 1e8, and zeros of both signs."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values *= 10.0 ** (16 * torch.rand(shape, generator=generator, dtype=torch.float64) - 8)
    kind = torch.rand(shape, generator=generator)
    values[kind < 0.2] = -0.0
    values[kind < 0.1] = 0.0
    return values.to(dtype)


def wild_leaves(num: int, seed: int = 0, missing: float = 0.0) -> list[Leaf]:
    """`num` leaves, each of whose tensors is None with probability `missing`."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num):
        tensors: list[Tensor | None] = []
        for segment, places in zip(SEGMENTS, PLACES, strict=True):
            for _, shape in places:
                tensor = wild(shape, segment.dtype, generator)
                absent = float(torch.rand((), generator=generator)) < missing
                tensors.append(None if absent else tensor)
        found.append(Leaf(tensors, wild([NUM_SCALARS], torch.float64, generator)))
    return found


def tree_sum(leaves: Sequence[Leaf]) -> list[bytes]:
    """The bits of the sum along the canonical tree."""

    def node(first: int, size: int) -> list[Tensor]:
        if size == 1:
            return leaves[first].values()
        left = node(first, size // 2)
        middle = first + size // 2
        if middle >= len(leaves):
            return left
        right = node(middle, size // 2)
        return [a + b for a, b in zip(left, right, strict=True)]

    return bits(node(0, 1 << (len(leaves) - 1).bit_length()))


def left_to_right_sum(leaves: Sequence[Leaf]) -> list[bytes]:
    sums = leaves[0].values()
    for leaf in leaves[1:]:
        sums = [a + b for a, b in zip(sums, leaf.values(), strict=True)]
    return bits(sums)


def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    return [t.detach().contiguous().numpy().tobytes() for t in tensors]


def row_bits(row: Row) -> list[bytes]:
    """The bits of a row's tensors and scalars; its padding must be zero."""
    tensors = []
    for segment, places in zip(row.segments, PLACES, strict=True):
        padding = segment.clone()
        for offset, shape in places:
            part = slice(offset, offset + shape.numel())
            tensors.append(segment[part].view(shape))
            padding[part] = 0
        assert not padding.any()
    return bits([*tensors, row.scalars])
