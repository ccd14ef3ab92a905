"""Which reduction a kind of compression is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lockstep.parallel.arena import Segment
from lockstep.parallel.compression.codes import GreatestCode, SignCode
from lockstep.parallel.compression.drawn_sums import DrawnReduction
from lockstep.parallel.compression.gathered_sums import GatheredReduction
from lockstep.parallel.compression.integer_sums import IntegerReduction
from lockstep.parallel.compression.integers import exponents
from lockstep.parallel.compression.memory import LeafMemory, Places, in_blocks
from lockstep.parallel.compression.reduction import CompressedReduction, Summed

INTEGERS = {"int8": torch.int8, "int16": torch.int16}
"""Integers that travel, by the name of the kind."""


def compressed_reduction(summed: Summed, name: str, ratio: float) -> CompressedReduction:
    """The reduction for a kind of compression.

    Args:
        summed: what is to be summed.
        name: `int8`, `int16`, `topk`, `randomk` or `onebit`.
        ratio: part of each tensor's elements to send (topk, randomk).
    """
    if name in INTEGERS:
        return IntegerReduction(summed, INTEGERS[name])
    if name == "randomk":
        return DrawnReduction(summed, ratio)
    if name == "topk":
        return GatheredReduction(summed, partial(GreatestCode, ratio=ratio), is_blocked=False)
    assert name == "onebit", "there are no others"
    return GatheredReduction(summed, SignCode, is_blocked=True)


def error_segments(name: str, segments: Sequence[Segment], places: Places) -> list[Segment]:
    """Dtype and number of elements of what is cut off each segment of a leaf."""
    if name in INTEGERS or name == "onebit":
        return in_blocks(segments, places)[0]
    return list(segments)


def first_exponents(
    segments: Sequence[Segment], places: Places, tensors: Sequence[Tensor | None]
) -> list[Tensor]:
    """The exponents of each segment's blocks that the first step expects: those of a leaf.

    Args:
        segments: dtype and number of elements of each segment of the flat gradient.
        places: for each of them, the (offset, shape) of each tensor.
        tensors: tensors of the leaf; None counts as zeros.
    """
    device = next((t.device for t in tensors if t is not None), torch.device("cpu"))
    memory = LeafMemory(*in_blocks(segments, places), device)
    memory.take(tensors)
    return [exponents(segment) for segment in memory.segments]
