"""Adding up a rank's own microbatches along the canonical tree, as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.arena import Row
from lockstep.parallel.layout import Dealt, leaves, merges, stack_depth

_is_absent = partial(is_, None)


def rows_needed(microbatches: Dealt, num_microbatches: int) -> int:
    """Rows of an arena that the fold of these microbatches uses, at least one.

    Args:
        microbatches: range of microbatches of this rank; may be empty.
        num_microbatches: number of microbatches of the whole global batch.
    """
    counts, _ = merges(leaves(microbatches), num_microbatches)
    return max(1, stack_depth(counts))


class Fold:
    """A stack of partial sums in rows of memory: a binary counter of flat gradients.

    Attributes:
        nodes: nodes of the canonical tree in the rows 0, 1, … once all leaves are in.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        places: Sequence[Sequence[tuple[int, torch.Size]]],
        microbatches: Dealt,
        num_microbatches: int,
    ) -> None:
        """Prepare to fold `microbatches`.

        Args:
            rows: memory: at least `rows_needed` rows.
            places: for each segment, the (offset, shape) of each tensor of a leaf; offsets in
                elements.
            microbatches: range of microbatches of this rank.
            num_microbatches: number of microbatches of the whole global batch.
        """
        self._rows = rows
        self._merges, self.nodes = merges(leaves(microbatches), num_microbatches)
        self._views = [_views(row, places) for row in rows]
        self._next = 0
        self._height = 0

    def restart(self) -> None:
        """Forget all leaves."""
        # Rows need not be cleared: the first leaf of each overwrites what is there.
        self._next = self._height = 0

    def add(self, tensors: Sequence[Tensor | None], scalars: Tensor) -> None:
        """Add the next leaf.

        Args:
            tensors: tensors of the leaf in the order of `places`; None counts as zeros.
            scalars: sums of the leaf's scalars, float64 [num_scalars].
        """
        count = self._merges[self._next]
        self._next += 1
        rows = self._rows
        if count == 0:
            # A left child, or one without a sibling here, waits in a row until others follow.
            _store(self._views[self._height], tensors, torch._foreach_copy_, _zero)
            rows[self._height].scalars.copy_(scalars)
            self._height += 1
            return
        # A right sibling is added to the left one at once, so it needs no row of its own.
        _store(self._views[self._height - 1], tensors, torch._foreach_add_, _add_zero)
        rows[self._height - 1].scalars.add_(scalars)
        for _ in range(count - 1):
            self._height -= 1
            rows[self._height - 1].add_(rows[self._height])


def _views(row: Row, places: Sequence[Sequence[tuple[int, torch.Size]]]) -> list[Tensor]:
    return [
        segment[offset : offset + shape.numel()].view(shape)
        for segment, entries in zip(row.segments, places, strict=True)
        for offset, shape in entries
    ]


def _store(
    views: list[Tensor],
    tensors: Sequence[Tensor | None],
    foreach: Callable[..., Any],
    absent: Callable[[Tensor], Any],
) -> None:
    if not any(map(_is_absent, tensors)):
        if views:
            foreach(views, tensors)
        return
    for view, tensor in zip(views, tensors, strict=True):
        if tensor is None:
            absent(view)
        else:
            foreach([view], [tensor])


def _zero(view: Tensor) -> None:
    view.zero_()


def _add_zero(view: Tensor) -> None:
    # Not a no-op: it turns -0.0 into 0.0, as adding a row of zeros does on another layout.
    view.add_(0.0)
