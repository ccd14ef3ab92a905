"""Leaves as messages that all ranks get, and add up in the order of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.parallel.arena import Segment
from lockstep.parallel.compression.codes import WORD, Code
from lockstep.parallel.compression.memory import LeafMemory, in_blocks
from lockstep.parallel.compression.reduction import CompressedReduction, Summed, flat_totals

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
        exact = summed.ordered()
        self._flat, self.total = flat_totals(summed, exact.total)
        self._whole = self._flat
        segments, places = list(summed.segments), [list(of) for of in summed.places]
        if is_blocked:
            segments, places = in_blocks(segments, places)
            self._whole = LeafMemory(segments, places, summed.device)
        self._codes = [code(segment, of) for segment, of in zip(segments, places, strict=True)]
        self._sizes = [made.num_bytes for made in self._codes]
        size, numbers = sum(self._sizes), [len(own) for own in summed.ranges]
        self._counts = [number * size // WORD for number in numbers]
        self._incoming = torch.zeros(sum(numbers), size, dtype=torch.uint8, device=summed.device)
        self._outgoing = torch.zeros_like(self._incoming[: numbers[summed.transport.rank]])
        super().__init__(summed, segments, places, exact)

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
