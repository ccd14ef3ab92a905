"""Pure arithmetic of the layout: ranges of microbatches, nodes, slices, rows, stages.

The canonical tree is fixed by the number of microbatches alone. Its leaves are the microbatches
0..M-1; node (first, size), with `size` a power of two and `first` a multiple of it, is the sum of
the leaves first..first+size-1. A node whose right child would lie beyond M-1 equals its left
child. All sums of gradients are made along this tree, so the result has the same bits however the
leaves are distributed over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:  # screens cut numbers of ranks by this module, and start without torch
    from torch import Tensor


class Range(NamedTuple):
    """The integers first <= i < last."""

    first: int
    last: int

    def __len__(self) -> int:
        """The number of integers in the range."""
        return self.last - self.first

    @property
    def slice(self) -> slice:
        """The range as an index.

        `slice(*range)` is the same, but Python then makes room for as many arguments as the range
        is long, which takes longer than adding up as many numbers.
        """
        return slice(self.first, self.last)

    def common(self, other: Range) -> Range:
        """The integers that are in both; if there are none, an empty range inside of this one."""
        first = min(max(self.first, other.first), self.last)
        return Range(first, max(first, min(self.last, other.last)))


def is_in(part: Range, whole: Range) -> bool:
    """Whether all of a part is among the integers of another range."""
    return whole.first <= part.first and part.last <= whole.last


def within(part: Range, whole: Range) -> slice:
    """Where a part is, counted from the start of what it is a part of."""
    return slice(part.first - whole.first, part.last - whole.first)


class Strided(NamedTuple):
    """The integers first, first + step, … below last."""

    first: int
    last: int
    step: int

    def __len__(self) -> int:
        """The number of integers."""
        return len(range(self.first, self.last, self.step))


Assigned = Range | Strided
"""Microbatches of a rank: a range of them, or one of each round."""


class Node(NamedTuple):
    """A node of the canonical tree: the sum of leaves first..first+size-1."""

    first: int
    size: int


def split(total: int, parts: int) -> list[Range]:
    """`total` items in `parts` contiguous ranges; the first `total % parts` have one item more."""
    quotient, remainder = divmod(total, parts)
    return consecutive([quotient + (part < remainder) for part in range(parts)])


def consecutive(counts: Sequence[int]) -> list[Range]:
    """Ranges of these lengths, one behind the other."""
    return [Range(*ends) for ends in pairwise(accumulate(counts, initial=0))]


def stepped_slices(slices: Sequence[Range], rank: int, with_buddy: bool) -> list[Range]:
    """The slices that a rank steps: its own, and as a buddy that of the rank before it."""
    if with_buddy and len(slices) > 1:
        return [slices[rank], slices[rank - 1]]
    return [slices[rank]]


def share(total: int, speeds: Sequence[float]) -> list[Range]:
    """`total` items in contiguous ranges, such that the slowest part is done as early as possible.

    Args:
        total: number of items.
        speeds: speed of each part, in items for each unit of time; positive.
    """
    counts = [0] * len(speeds)
    # When each would be done with one more; of equals, the lowest comes first.
    done = [(1 / speed, part) for part, speed in enumerate(speeds)]
    heapify(done)
    for _ in range(total):
        part = done[0][1]
        counts[part] += 1
        heapreplace(done, ((counts[part] + 1) / speeds[part], part))
    return consecutive(counts)


def merges(nodes: Sequence[Node], num_leaves: int) -> tuple[list[int], list[Node]]:
    """Adds up nodes that lie side by side, as far as the canonical tree allows.

    Nodes are taken from left to right onto a stack; after each, the topmost is added to the one
    below it as long as the two are siblings.

    Args:
        nodes: nodes that follow one another without a gap, from left to right.
        num_leaves: number of leaves of the whole tree.

    Returns:
        How many additions follow each node, and the nodes that are left. All the leaves of the
        tree leave one node.
    """
    counts = []
    stack: list[Node] = []
    for node in nodes:
        stack.append(_grown(node, num_leaves))
        count = 0
        while len(stack) > 1 and _siblings(stack[-2], stack[-1]):
            right = stack.pop()
            stack[-1] = _grown(Node(stack[-1].first, 2 * right.size), num_leaves)
            count += 1
        counts.append(count)
    return counts, stack


def levels(plan: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The additions of `merges`, level by level: those of a level need none of each other's sums.

    Args:
        plan: for each node, the number of additions that follow it.

    Returns:
        For each level, pairs of nodes: to the first, which then is a sum, the second is added.
    """
    found: list[list[tuple[int, int]]] = []
    stack: list[tuple[int, int]] = []
    for node, count in enumerate(plan):
        stack.append((node, 0))
        for _ in range(count):
            (left, below), (right, beside) = stack[-2:]
            level = max(below, beside)
            if level == len(found):
                found.append([])
            found[level].append((left, right))
            stack[-2:] = [(left, level + 1)]
    return found


def leaves(microbatches: Assigned) -> list[Node]:
    """The leaves of a rank's microbatches."""
    return [Node(i, 1) for i in range(*microbatches)]


def stack_depth(counts: Sequence[int]) -> int:
    """Rows of memory a fold needs; a leaf that is added at once needs none.

    Args:
        counts: number of additions that follow each leaf, from `merges`.
    """
    height = deepest = 0
    for count in counts:
        deepest = max(deepest, height + (count == 0))
        height += 1 - count
    return deepest


def _grown(node: Node, num_leaves: int) -> Node:
    """The largest node that equals this one because right children are missing."""
    first, size = node
    while first % (2 * size) == 0 and first + size >= num_leaves and size < num_leaves:
        size *= 2
    return Node(first, size)


def _siblings(left: Node, right: Node) -> bool:
    return left.size == right.size and left.first % (2 * left.size) == 0


ROWS = 16
"""Rows of a group: those with the numbers 0 to 15, 16 to 31 and so on are with the same rank."""


class RowLayout(NamedTuple):
    """Rows distributed over ranks by groups in turn, so that neighbours in use are with many ranks.

    Attributes:
        num_rows: rows of the table.
        size: number of ranks.
    """

    num_rows: int
    size: int

    @property
    def num_groups(self) -> int:
        """Groups of rows of the whole table; the last one may be incomplete."""
        return -(-self.num_rows // ROWS)

    def owner(self, ids: Tensor) -> Tensor:
        """The rank that owns each row, int64 like `ids`."""
        return ids // ROWS % self.size

    def local(self, ids: Tensor) -> Tensor:
        """The place of each row among those of its owner, int64 like `ids`."""
        return ids // (ROWS * self.size) * ROWS + ids % ROWS

    def groups(self, owner: int) -> range:
        """The numbers of an owner's groups of rows."""
        return range(owner, self.num_groups, self.size)

    def num_local(self, owner: int) -> int:
        """Rows of memory that an owner needs: whole groups."""
        return len(self.groups(owner)) * ROWS


T = TypeVar("T")


class Pass(NamedTuple):
    """One pass of a stage over a microbatch."""

    kind: Literal["forward", "backward"]
    microbatch: int
    stage: int


@lru_cache(maxsize=16)
def one_forward_one_backward(
    microbatches: Assigned, rank: int, num_ranks: int, interleave: int = 1
) -> tuple[Pass, ...]:
    """The passes of a rank, 1F1B (Narayanan et al. 2019; PipeDream-Flush: 2021, section 2.2).

    A rank has every `num_ranks`-th stage: one, or several that are interleaved (Narayanan et al.
    2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", also
    section 2.2). It begins with forward passes until the first backward pass can have arrived; then
    they alternate. With M microbatches on P ranks and V stages of each, ranks are idle for
    (P - 1)/(V M) of the time that they compute.

    Forward passes, and backward passes, of a stage come in the order of microbatches. Any number
    of microbatches is right: none waits for one that waits for it.

    Args:
        microbatches: microbatches of the replica.
        rank: number of the rank among those that share out the stages, from 0.
        num_ranks: number of these ranks.
        interleave: number of stages of each.
    """
    stages = range(rank, num_ranks * interleave, num_ranks)
    groups = in_groups(range(*microbatches), num_ranks)
    forward = [Pass("forward", m, stage) for g in groups for stage in stages for m in g]
    backward = [Pass("backward", m, stage) for g in groups for stage in stages[::-1] for m in g]
    ahead = num_ranks - 1 - rank
    if interleave > 1:
        ahead = 2 * ahead + (interleave - 1) * max(map(len, groups), default=0)
    alternating = zip_longest(forward[ahead:], backward)
    return (*forward[:ahead], *(one for pair in alternating for one in pair if one is not None))


def in_groups(items: Sequence[T], num_ranks: int) -> list[Sequence[T]]:
    """Items that a rank takes through one of its stages before it goes to the next one.

    As many in each as there are ranks, or somewhat more: fewer would leave ranks idle, and could
    have two of them wait for one another.
    """
    num_groups = max(1, len(items) // num_ranks)
    return [items[own.first : own.last] for own in split(len(items), num_groups)]
