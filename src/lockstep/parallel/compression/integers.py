"""Blocks of small integers with a scale in common: sums of them are exact in any order.

Scales are powers of two, so that dividing by one, multiplying by one and taking away what was
rounded are exact: what is sent and what is kept add up to the leaf, to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.parallel.compression.memory import BLOCK


class Kind(NamedTuple):
    """How the exponent of a floating-point number lies in its bits (IEEE 754)."""

    bits: torch.dtype
    """Integers of the same size."""
    shift: int
    """Bits of the mantissa, below the exponent."""
    all_ones: int
    """Exponent of infinity and NaN."""


KINDS = {
    torch.float32: Kind(torch.int32, 23, 0xFF),
    torch.float64: Kind(torch.int64, 52, 0x7FF),
}


def width(dtype: torch.dtype, num_leaves: int) -> int:
    """Bits of a leaf's magnitudes such that the sum of all leaves fits an integer.

    The greatest magnitude of a leaf is 2^width - 1.

    Args:
        dtype: signed integer of the sum.
        num_leaves: number of leaves of the sum.

    Returns:
        At least 1 if they can be summed; else 0.
    """
    most = int(torch.iinfo(dtype).max) // num_leaves
    return (most + 1).bit_length() - 1


def exponents(values: Tensor) -> Tensor:
    """The biased exponent of the greatest magnitude of each block; `all_ones` if not all finite.

    Args:
        values: [blocks x BLOCK], float32 or float64.

    Returns:
        int16 [blocks].
    """
    kind = KINDS[values.dtype]
    greatest = values.view(-1, BLOCK).abs().amax(dim=1)
    return ((greatest.view(kind.bits) >> kind.shift) & kind.all_ones).to(torch.int16)


def scales(exponents: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The scale of each block: a power of two for which integers reach what is expected.

    Args:
        exponents: biased exponents of the greatest magnitudes that are expected, int16 [blocks].
        width: bits of the magnitude of an integer.
        dtype: dtype of the leaf.

    Returns:
        [blocks] of `dtype`; never 0 or subnormal, of which there is no exact reciprocal.
    """
    kind = KINDS[dtype]
    # 2^(e+1) is more than any number of exponent e. The reciprocal must be normal as well.
    fields = (exponents.to(kind.bits) + (1 - width)).clamp(1, kind.all_ones - 2)
    return (fields << kind.shift).view(dtype)


def quantise(values: Tensor, scales: Tensor, width: int) -> Tensor:
    """Values as multiples of their block's scale: rounded half to even, then clipped.

    Args:
        values: [blocks x BLOCK].
        scales: [blocks], powers of two.
        width: bits of the magnitude of an integer.

    Returns:
        Whole numbers of the dtype of `values`, [blocks x BLOCK]; 0 where values are NaN.
    """
    most = 2**width - 1
    whole = (values.view(-1, BLOCK) * scales.reciprocal()[:, None]).round_().clamp_(-most, most)
    return whole.nan_to_num_(nan=0.0).view(-1)


def dequantise(numbers: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `quantise`, of what it has given or of a sum of it.

    Args:
        numbers: [blocks x BLOCK] of integers, or of whole numbers of the dtype of `scales`.
        scales: [blocks]; where one is NaN, so is all of its block.

    Returns:
        [blocks x BLOCK] of the dtype of `scales`.
    """
    return (numbers.view(-1, BLOCK).to(scales.dtype) * scales[:, None]).view(-1)


def total_scales(scales: Tensor, seen: Tensor) -> Tensor:
    """Scales of the sum: NaN for blocks in which some leaf was not finite.

    Args:
        scales: scale of each block.
        seen: greatest exponent of each block over all leaves.
    """
    return scales.masked_fill(seen == KINDS[scales.dtype].all_ones, torch.nan)


def expected_next(seen: Tensor, expected: Tensor) -> Tensor:
    """The exponents to expect next: those just seen, or a half of what was expected, if more.

    A block that is small once is not cut by much when it is large again.

    Args:
        seen: exponents of a leaf's greatest magnitudes, int16 [blocks].
        expected: those that its integers were made with.
    """
    return torch.maximum(seen, (expected - 1).clamp_(min=0))
