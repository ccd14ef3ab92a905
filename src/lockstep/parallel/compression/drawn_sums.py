"""A few elements of the gradient, the same ones in all leaves: summed as whole leaves are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lockstep.parallel.arena import BLOCK, Row, Segment
from lockstep.parallel.compression.reduction import (
    CompressedReduction,
    Summed,
    flat_totals,
    positions,
)
from lockstep.parallel.compression.sparse import drawn, num_kept


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
        self._shapes = [[shape for _, shape in of] for of in summed.places]
        counts = [[num_kept(shape, ratio) for shape in of] for of in self._shapes]
        self._tensors = [
            [slice(first, last) for first, last in pairwise(accumulate(of, initial=0))]
            for of in counts
        ]
        kept = [
            Segment(s.dtype, -(-sum(of) // BLOCK) * BLOCK)
            for s, of in zip(summed.segments, counts, strict=True)
        ]
        exact = summed.ordered(kept, [[(0, torch.Size([sum(of)]))] for of in counts])
        self._sums = exact.total.segments[: len(kept)]
        beside = Row(exact.total.segments[len(kept) :], exact.total.scalars)
        self._flat, self.total = flat_totals(summed, beside)
        super().__init__(summed, summed.segments, summed.places, exact)

    def restart(self) -> None:
        """Forget the leaves of a step."""
        super().restart()
        shapes = [shape for of in self._shapes for shape in of]
        indices = iter(drawn(shapes, self._ratio, self._summed.states.key))
        self._indices = [
            torch.cat([next(indices) + offset for offset, _ in of]).to(self._summed.device)
            for of in self._summed.places
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
        ranges = positions(self._summed.places[segment])
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
