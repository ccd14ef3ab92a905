"""Sums of compressed gradients, and which one a kind of compression needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.parallel.compression.codes import WORD, Code, GreatestCode, SignCode, drawn, num_kept
from lockstep.parallel.compression.integers import IntegerReduction, exponents
from lockstep.parallel.compression.low_rank import LowRankReduction, matrices
from lockstep.parallel.compression.reduction import (
    CompressedReduction,
    LeafMemory,
    Summed,
    flat_totals,
    in_blocks,
    positions,
)
from lockstep.parallel.fold import Row, Segment, TensorSpecs, laid_out

MakeCode = Callable[[Segment, Sequence[tuple[int, torch.Size]]], Code]


class GatheredReduction(CompressedReduction):
    """All ranks get all messages, and make the same additions.

    So a rank receives a message of each leaf that others compute, however many ranks there are.
    """

    def __init__(self, summed: Summed, code: MakeCode, is_blocked: bool) -> None:
        """Lay out the memory.

        Args:
            summed: what is to be summed.
            code: makes the code of a segment and its tensors.
            is_blocked: whether it wants each tensor at the beginning of a block.
        """
        exact, leaves = summed.ordered(), summed.leaves
        self._flat, self.total = flat_totals(summed, exact.total)
        self._whole = self._flat
        segments, specs = list(leaves.segments), [list(of) for of in leaves.specs]
        if is_blocked:
            segments, specs = in_blocks(segments, specs)
            self._whole = LeafMemory(segments, specs, leaves.device)
        self._codes = [code(segment, of) for segment, of in zip(segments, specs, strict=True)]
        self._sizes = [made.num_bytes for made in self._codes]
        size, numbers = sum(self._sizes), [len(own) for own in summed.ranges]
        self._counts = [number * size // WORD for number in numbers]
        self._incoming = torch.zeros(sum(numbers), size, dtype=torch.uint8, device=leaves.device)
        self._outgoing = torch.zeros_like(self._incoming[: numbers[summed.transport.rank]])
        super().__init__(summed, segments, specs, exact)

    def restart(self) -> None:
        """Forget the leaves of a step."""
        super().restart()
        self._rows = iter(self._outgoing)

    def _take(self, exact: Sequence[Tensor | None], scalars: Tensor) -> Sequence[Tensor]:
        messages = torch.split(next(self._rows), self._sizes)
        parts = zip(self._codes, self._leaf.segments, messages, strict=True)
        sent = [code.write(leaf, message) for code, leaf, message in parts]
        self._exact.fold.add(exact, scalars)
        return self._cut_off(sent)

    def _reduce(self) -> None:
        # In words: gloo and MPI count elements, of which there may be 2 GiB.
        own, everyone = (m.view(-1).view(torch.int64) for m in (self._outgoing, self._incoming))
        if self._summed.transport.size > 1:
            self._summed.transport.all_gather(own, everyone, self._counts)
        else:
            everyone.copy_(own)
        for total in self._whole.segments:
            total.zero_()
        # Ranks have contiguous ranges of leaves, so this is the order of microbatches.
        for row in self._incoming:
            messages = torch.split(row, self._sizes)
            parts = zip(self._codes, messages, self._whole.segments, strict=True)
            for code, message, total in parts:
                code.add(message, total)
        if self._whole is not self._flat:
            self._whole.give(self._flat)


class DrawnReduction(CompressedReduction):
    """Sums the elements that the seed draws for the step, along the canonical tree (random-k).

    All ranks draw the same indices, so values travel alone. Without error feedback they are
    multiplied by how many elements each one stands for, so that the sum is right in the mean.
    """

    def __init__(self, summed: Summed, ratio: float) -> None:
        """Lay out the memory.

        Args:
            summed: what is to be summed.
            ratio: part of each tensor's elements to send.
        """
        self._ratio = ratio
        leaves = summed.leaves
        self._shapes = [[shape for _, shape in of] for of in leaves.specs]
        counts = [[num_kept(shape, ratio) for shape in of] for of in self._shapes]
        self._tensors = [
            [slice(first, last) for first, last in pairwise(accumulate(of, initial=0))]
            for of in counts
        ]
        kept, specs = laid_out(leaves.segments, [[torch.Size([sum(of)])] for of in counts], 1)
        exact = summed.ordered(kept, specs)
        self._sums = exact.total.segments[: len(kept)]
        exact_sums = Row(exact.total.segments[len(kept) :], exact.total.scalars)
        self._flat, self.total = flat_totals(summed, exact_sums)
        super().__init__(summed, leaves.segments, leaves.specs, exact)

    def restart(self) -> None:
        """Forget the leaves of a step."""
        super().restart()
        shapes = [shape for of in self._shapes for shape in of]
        indices = iter(drawn(shapes, self._ratio, self._summed.states.key))
        self._indices = [
            torch.cat([next(indices) + offset for offset, _ in of]).to(self._summed.leaves.device)
            for of in self._summed.leaves.specs
        ]

    def _take(self, exact: Sequence[Tensor | None], scalars: Tensor) -> Sequence[Tensor]:
        leaves = list(zip(self._leaf.segments, self._indices, strict=True))
        sent = [leaf[indices] for leaf, indices in leaves]
        for number, leaf in enumerate(self._leaf.segments):
            if not leaf.isfinite().all():
                self._show_non_finite(number, sent[number])
        errors: list[Tensor] = []
        if self._summed.feeds_back:
            errors = [leaf.index_fill(0, indices, 0.0) for leaf, indices in leaves]
        else:
            for number, values in enumerate(sent):
                self._weigh(number, values)
        self._exact.fold.add([*sent, *exact], scalars)
        return errors

    def _show_non_finite(self, segment: int, values: Tensor) -> None:
        """Send NaN for a tensor that has some, also where it was not drawn."""
        ranges = positions(self._summed.leaves.specs[segment])
        for own, kept in zip(ranges, self._tensors[segment], strict=True):
            if not self._leaf.segments[segment][own.first : own.last].isfinite().all():
                values[kept] = torch.nan

    def _weigh(self, segment: int, values: Tensor) -> None:
        for shape, kept in zip(self._shapes[segment], self._tensors[segment], strict=True):
            if kept.stop > kept.start:
                values[kept] *= shape.numel() / (kept.stop - kept.start)

    def _reduce(self) -> None:
        for flat, indices, sums in zip(self._flat.segments, self._indices, self._sums, strict=True):
            flat.zero_()
            flat[indices] = sums[: len(indices)]


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


def error_segments(name: str, segments: Sequence[Segment], specs: TensorSpecs) -> list[Segment]:
    """Dtype and number of elements of what is cut off each segment of a leaf."""
    if name in INTEGERS or name == "onebit":
        return in_blocks(segments, specs)[0]
    return list(segments)


def first_agreed(
    name: str,
    rank: int,
    segments: Sequence[Segment],
    specs: TensorSpecs,
    tensors: Callable[[], Sequence[Tensor | None]],
    device: torch.device,
) -> list[Tensor]:
    """What ranks have agreed on before the first step (`LeafStates.agreed`).

    Of integers, the exponents of a leaf; of low rank, zeros, in place of which the seed draws.

    Args:
        name: kind of compression.
        rank: columns of the factors of a matrix.
        segments: dtype and number of elements of each segment of the flat gradient.
        specs: for each of them, the (offset, shape) of each tensor.
        tensors: gives tensors of the leaf; None counts as zeros.
        device: device of the gradients.

    Raises:
        ConfigError: no tensor is a matrix that becomes smaller.
    """
    if name in INTEGERS:
        memory = LeafMemory(*in_blocks(segments, specs), device)
        memory.take(tensors())
        return [exponents(segment) for segment in memory.segments]
    if name != "lowrank":
        return []
    found = matrices(specs, rank)
    if not found:
        raise ConfigError(
            f"compression.rank={rank}: no parameter is a matrix that two factors of this rank make "
            "smaller; set a smaller one, or another compression.name"
        )
    return [
        torch.zeros(m.columns, m.rank, dtype=segments[m.segment].dtype, device=device)
        for m in found
    ]
