"""Sums of some rows of a table along the canonical tree, where most rows have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.parallel.layout import Assigned, Node, Range, leaves, merges


class RowSum(NamedTuple):
    """Sums of some rows.

    Attributes:
        ids: numbers of the rows, ascending, each once: int64 [n].
        rows: their sums: [n, dim].
    """

    ids: Tensor
    rows: Tensor

    def of(self, chosen: Tensor) -> RowSum:
        """Those of some rows, by a mask or by ascending indices."""
        return RowSum(self.ids[chosen], self.rows[chosen])


def nothing(dim: int, like: Tensor) -> RowSum:
    """Sums of no rows, of the dtype and on the device of `like`."""
    return RowSum(like.new_empty(0, dtype=torch.int64), like.new_empty(0, dim))


def added(left: RowSum, right: RowSum) -> RowSum:
    """The sums of two; a row that one of them lacks is the other's, to the bit."""
    if not len(left.ids) or not len(right.ids):
        return right if len(right.ids) else left
    both, places = torch.unique(torch.cat([left.ids, right.ids]), return_inverse=True)
    rows = left.rows.new_empty(len(both), left.rows.shape[1])
    of_left, of_right = places[: len(left.ids)], places[len(left.ids) :]
    # First the right one, so that the left one's rows are then sums in the order left + right.
    rows[of_right] = right.rows
    in_both = torch.isin(left.ids, right.ids, assume_unique=True)
    mine = torch.where(in_both[:, None], left.rows + rows[of_left], left.rows)
    rows[of_left] = mine
    return RowSum(both, rows)


def plan(microbatches: Assigned, num_microbatches: int) -> tuple[list[int], list[Node]]:
    """As `layout.merges`, of the microbatches of a rank, which need not lie side by side."""
    own = [node for node in leaves(microbatches) if node.first < num_microbatches]
    if isinstance(microbatches, Range):
        return merges(own, num_microbatches)
    return [0] * len(own), own


class RowFold:
    """Sums of a rank's own microbatches, as far as the canonical tree allows without the others.

    Attributes:
        nodes: nodes of the tree that are left, from left to right.
    """

    def __init__(self, microbatches: Assigned, num_microbatches: int) -> None:
        """Prepare to add the microbatches, from left to right.

        Args:
            microbatches: microbatches of this rank; those with numbers that are too high are none.
            num_microbatches: number of microbatches of the whole global batch.
        """
        self._merges, self.nodes = plan(microbatches, num_microbatches)
        self._next = 0
        self.sums: list[RowSum] = []

    def add(self, leaf: RowSum) -> None:
        """Add the next microbatch."""
        self.sums.append(leaf)
        _merge(self.sums, self._merges[self._next])
        self._next += 1


def total(sums: Sequence[RowSum], nodes: Sequence[Node], num_microbatches: int) -> RowSum:
    """The sum of the nodes of all ranks.

    Args:
        sums: of each node, from left to right.
        nodes: all nodes, which together are the whole tree.
        num_microbatches: number of leaves of the tree.
    """
    counts, _ = merges(nodes, num_microbatches)
    stack: list[RowSum] = []
    for node, count in zip(sums, counts, strict=True):
        stack.append(node)
        _merge(stack, count)
    return stack[0]


def _merge(stack: list[RowSum], count: int) -> None:
    for _ in range(count):
        right = stack.pop()
        stack[-1] = added(stack[-1], right)
