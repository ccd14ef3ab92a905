"""Gradients as small integers with a scale in common, whose sum is exact in any order.

Scales are powers of two, so that dividing by one, multiplying by one and taking away what was
rounded are exact: what is sent and what is kept add up to the leaf, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.parallel import reduction
from lockstep.parallel.compression.reduction import (
    BLOCK,
    CompressedReduction,
    LeafMemory,
    Summed,
    flat_totals,
    in_blocks,
)
from lockstep.parallel.exchange import gather_slices
from lockstep.parallel.fold import BLOCK as OWNED
from lockstep.parallel.fold import buckets
from lockstep.parallel.layout import Range, split


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


_PER_WORD = 4
"""Exponents (int16) in a float64 of a header."""


class IntegerReduction(CompressedReduction):
    """Sums leaves as integers of `dtype`, which hold the sum of all of them.

    Scales follow from the greatest magnitudes of the step before. Those of this step travel in the
    headers: so ranks agree on the next scales by no message of their own.
    """

    def __init__(self, summed: Summed, dtype: torch.dtype) -> None:
        """Lay out the memory.

        Args:
            summed: what is to be summed.
            dtype: signed integer of the sum.
        """
        segments, specs = in_blocks(summed.leaves.segments, summed.leaves.specs)
        self._width = width(dtype, summed.leaves.num_microbatches)
        sizes = [s.numel for s in segments]
        self._counts = [size // BLOCK for size in sizes]
        exact = summed.ordered(more_header=-(-sum(self._counts) // _PER_WORD))
        device = summed.leaves.device
        self._numbers = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._of_segment = list(torch.split(self._numbers, sizes))
        self._seen = torch.zeros(sum(self._counts), dtype=torch.int16, device=device)
        ends = accumulate(self._counts, initial=0)
        self._blocks = [slice(first, last) for first, last in pairwise(ends)]
        self._sums = IntegerSums(summed.transport, self._numbers, summed.bucket_bytes)
        self._flat, self.total = flat_totals(summed, exact.total)
        self._whole = LeafMemory(segments, specs, device)
        super().__init__(summed, segments, specs, exact)

    def restart(self) -> None:
        """Forget the leaves of a step."""
        super().restart()
        self._numbers.zero_()
        self._seen.zero_()
        pairs = zip(self._summed.states.agreed, self._leaf.segments, strict=True)
        self._scales = [scales(expected, self._width, leaf.dtype) for expected, leaf in pairs]

    def _take(self, exact: Sequence[Tensor | None], scalars: Tensor) -> Sequence[Tensor]:
        sent = []
        agreed = zip(self._scales, self._summed.states.agreed, self._blocks, strict=True)
        leaves = zip(self._leaf.segments, self._of_segment, strict=True)
        for (leaf, sums), (scale, before, blocks) in zip(leaves, agreed, strict=True):
            whole = quantise(leaf, scale, self._width)
            sums.add_(whole.to(sums.dtype))
            if self._summed.feeds_back:
                sent.append(dequantise(whole, scale))
            here = expected_next(exponents(leaf), before)
            torch.maximum(self._seen[blocks], here, out=self._seen[blocks])
        self._exact.fold.add(exact, scalars)
        return self._cut_off(sent)

    def reduce(self) -> None:
        """Sum over all ranks into `total`."""
        words = self._exact.header[self._summed.num_header :].view(torch.int16)
        words[: len(self._seen)] = self._seen
        super().reduce()

    def _reduce(self) -> None:
        self._sums.run()
        words = self._exact.headers()[:, self._summed.num_header :].contiguous()
        seen = words.view(torch.int16)[:, : len(self._seen)].amax(dim=0)
        by_segment = [seen[blocks] for blocks in self._blocks]
        parts = zip(self._whole.segments, self._of_segment, self._scales, by_segment, strict=True)
        for whole, numbers, scale, of_segment in parts:
            whole.copy_(dequantise(numbers, total_scales(scale, of_segment)))
        self._whole.give(self._flat)
        self._summed.states.agree([there.clone() for there in by_segment])


class IntegerSums:
    """Adds up one tensor of integers over all ranks, in place.

    As in an ordered reduction small ones travel whole, by one collective; of others each rank adds
    up its slice. But no node travels beside another: integers have no order of summation.
    """

    def __init__(self, transport: Transport, numbers: Tensor, bucket_bytes: int) -> None:
        """Lay out the slices.

        Args:
            transport: transport between the ranks.
            numbers: this rank's integers, a multiple of `fold.BLOCK`; then the sum.
            bucket_bytes: greatest number of bytes to receive at a time.
        """
        self._transport = transport
        self._numbers = numbers
        # gloo and NCCL move no int16.
        self._words = numbers.view(torch.int32)
        self._is_small = transport.size * self._words.nbytes <= reduction.SMALL_BYTES
        self._unit = OWNED * numbers.itemsize // self._words.itemsize
        self._bucket_bytes = bucket_bytes
        self._slices = [
            Range(s.first * self._unit, s.last * self._unit)
            for s in split(len(numbers) // OWNED, transport.size)
        ]

    def run(self) -> None:
        """Sum; a collective."""
        transport, words = self._transport, self._words
        if transport.size == 1:
            return
        if self._is_small:
            everyone = words.new_empty(transport.size * len(words))
            transport.all_gather(words, everyone, [len(words)] * transport.size)
            self._add_up(everyone, words)
            return
        width = transport.size * words.itemsize
        for parts in buckets(self._slices, self._bucket_bytes, width, self._unit):
            own = parts[transport.rank]
            received = words.new_empty(len(own) * transport.size)
            transport.all_to_all(
                words,
                [len(part) for part in parts],
                [part.first for part in parts],
                received,
                [len(own)] * transport.size,
            )
            self._add_up(received, words[own.slice])
        gather_slices(transport, words, self._slices)

    def _add_up(self, everyone: Tensor, total: Tensor) -> None:
        """Sum the integers of all ranks, in words, into words of the total."""
        dtype = self._numbers.dtype
        rows = everyone.view(dtype).view(self._transport.size, -1)
        total.view(dtype).copy_(rows.sum(dim=0, dtype=dtype))
