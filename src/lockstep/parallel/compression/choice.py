"""Which reduction a kind of compression is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.parallel.arena import Segment
from lockstep.parallel.compression.codes import GreatestCode, SignCode
from lockstep.parallel.compression.drawn_sums import DrawnReduction
from lockstep.parallel.compression.gathered_sums import GatheredReduction
from lockstep.parallel.compression.integer_sums import IntegerReduction
from lockstep.parallel.compression.integers import exponents
from lockstep.parallel.compression.low_rank import matrices
from lockstep.parallel.compression.low_rank_sums import LowRankReduction
from lockstep.parallel.compression.memory import LeafMemory, Places, in_blocks
from lockstep.parallel.compression.reduction import CompressedReduction, Summed

INTEGERS = {"int8": torch.int8, "int16": torch.int16}
"""Integers that travel, by the name of the kind."""


def compressed_reduction(summed: Summed, name: str, ratio: float, rank: int) -> CompressedReduction:
    """The reduction for a kind of compression.

    Args:
        summed: what is to be summed.
        name: `int8`, `int16`, `topk`, `randomk`, `onebit` or `lowrank`.
        ratio: part of each tensor's elements to send (topk, randomk).
        rank: columns of the factors of a matrix (lowrank).
    """
    if name in INTEGERS:
        return IntegerReduction(summed, INTEGERS[name])
    if name == "randomk":
        return DrawnReduction(summed, ratio)
    if name == "topk":
        return GatheredReduction(summed, partial(GreatestCode, ratio=ratio), is_blocked=False)
    if name == "lowrank":
        return LowRankReduction(summed, rank)
    assert name == "onebit", "there are no others"
    return GatheredReduction(summed, SignCode, is_blocked=True)


def error_segments(name: str, segments: Sequence[Segment], places: Places) -> list[Segment]:
    """Dtype and number of elements of what is cut off each segment of a leaf."""
    if name in INTEGERS or name == "onebit":
        return in_blocks(segments, places)[0]
    return list(segments)


def first_agreed(
    name: str,
    rank: int,
    segments: Sequence[Segment],
    places: Places,
    tensors: Callable[[], Sequence[Tensor | None]],
    device: torch.device,
) -> list[Tensor]:
    """What ranks have agreed on before the first step (`LeafStates.agreed`).

    Of integers, the exponents of a leaf; of low rank, zeros, in place of which the seed draws.

    Args:
        name: kind of compression.
        rank: columns of the factors of a matrix.
        segments: dtype and number of elements of each segment of the flat gradient.
        places: for each of them, the (offset, shape) of each tensor.
        tensors: gives tensors of the leaf; None counts as zeros.
        device: device of the gradients.

    Raises:
        ConfigError: no tensor is a matrix that becomes smaller.
    """
    if name in INTEGERS:
        memory = LeafMemory(*in_blocks(segments, places), device)
        memory.take(tensors())
        return [exponents(segment) for segment in memory.segments]
    if name != "lowrank":
        return []
    found = matrices(places, rank)
    if not found:
        raise ConfigError(
            f"compression.rank={rank}: no parameter is a matrix that two factors of this rank make "
            "smaller; set a smaller one, or another compression.name"
        )
    return [
        torch.zeros(m.columns, m.rank, dtype=segments[m.segment].dtype, device=device)
        for m in found
    ]
