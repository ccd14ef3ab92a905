from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.parallel.layout import Node, Range, leaves, merges, split, stack_depth

MOST = 130


def canonical(num_leaves: int) -> str:
    """The sum over all leaves as an expression, straight from the tree's definition."""

    def node(first: int, size: int) -> str:
        if size == 1:
            return str(first)
        left = node(first, size // 2)
        middle = first + size // 2
        return left if middle >= num_leaves else f"({left}+{node(middle, size // 2)})"

    return node(0, 1 << (num_leaves - 1).bit_length())


def added_up(items: Sequence[str], counts: Sequence[int]) -> list[str]:
    stack: list[str] = []
    for item, count in zip(items, counts, strict=True):
        stack.append(item)
        for _ in range(count):
            right = stack.pop()
            stack[-1] = f"({stack[-1]}+{right})"
    return stack


def total(ranges: Sequence[Range], num_leaves: int) -> str:
    """What all ranks together compute, each folding its own range first."""
    nodes: list[Node] = []
    partial_sums: list[str] = []
    for own in ranges:
        counts, left = merges(leaves(own), num_leaves)
        sums = added_up([str(i) for i in range(*own)], counts)
        assert len(sums) == len(left)
        nodes += left
        partial_sums += sums
    counts, left = merges(nodes, num_leaves)
    assert len(left) == 1
    [expression] = added_up(partial_sums, counts)
    return expression


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[Range]]:
    """A number of leaves, cut into contiguous ranges; some may be empty."""
    num_leaves = draw(st.integers(1, MOST))
    cuts = sorted(draw(st.lists(st.integers(0, num_leaves), max_size=12)))
    return num_leaves, [Range(a, b) for a, b in pairwise([0, *cuts, num_leaves])]


@given(total=st.integers(0, 1000), parts=st.integers(1, 50))
def test_split_covers_everything_in_ranges_of_nearly_equal_length(total: int, parts: int) -> None:
    ranges = split(total, parts)
    assert len(ranges) == parts
    assert [i for r in ranges for i in range(*r)] == list(range(total))
    lengths = [len(r) for r in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_length_of_a_range_is_its_number_of_integers() -> None:
    assert len(Range(3, 7)) == 4
    assert len(Range(3, 3)) == 0


@pytest.mark.parametrize(
    ("num_leaves", "expression"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_canonical_tree_of_a_few_leaves(num_leaves: int, expression: str) -> None:
    assert canonical(num_leaves) == expression
    assert total([Range(0, num_leaves)], num_leaves) == expression


@pytest.mark.parametrize("num_leaves", range(1, MOST + 1))
def test_every_even_split_sums_along_the_canonical_tree(num_leaves: int) -> None:
    expected = canonical(num_leaves)
    for parts in (*range(1, 10), num_leaves, num_leaves + 3):
        assert total(split(num_leaves, parts), num_leaves) == expected


@given(partition=partitions())
@settings(max_examples=500, deadline=None)
def test_any_partition_sums_along_the_canonical_tree(partition: tuple[int, list[Range]]) -> None:
    num_leaves, ranges = partition
    assert total(ranges, num_leaves) == canonical(num_leaves)


@given(partition=partitions(), levels=st.data())
@settings(max_examples=200, deadline=None)
def test_nodes_may_be_merged_in_several_rounds(
    partition: tuple[int, list[Range]], levels: st.DataObject
) -> None:
    num_leaves, ranges = partition
    groups = levels.draw(st.integers(1, len(ranges)))
    nodes: list[Node] = []
    sums: list[str] = []
    for group in split(len(ranges), groups):
        members = [ranges[i] for i in range(*group)]
        parts = [merges(leaves(r), num_leaves) for r in members]
        own = [
            s
            for r, (counts, _) in zip(members, parts, strict=True)
            for s in added_up([str(i) for i in range(*r)], counts)
        ]
        counts, left = merges([n for _, part in parts for n in part], num_leaves)
        nodes += left
        sums += added_up(own, counts)
    counts, left = merges(nodes, num_leaves)
    assert len(left) == 1
    assert added_up(sums, counts) == [canonical(num_leaves)]


@given(partition=partitions())
@settings(deadline=None)
def test_what_is_left_of_a_range_are_aligned_nodes_without_siblings(
    partition: tuple[int, list[Range]],
) -> None:
    num_leaves, ranges = partition
    for own in ranges:
        _, left = merges(leaves(own), num_leaves)
        covered = [i for n in left for i in range(n.first, min(n.first + n.size, num_leaves))]
        assert covered == list(range(*own))
        for node in left:
            assert node.size & (node.size - 1) == 0
            assert node.first % node.size == 0
        for a, b in pairwise(left):
            assert not (a.size == b.size and a.first % (2 * a.size) == 0)


@given(partition=partitions())
@settings(max_examples=300, deadline=None)
def test_stack_depth_is_the_most_rows_in_use_at_any_time(
    partition: tuple[int, list[Range]],
) -> None:
    num_leaves, ranges = partition
    for own in ranges:
        counts, left = merges(leaves(own), num_leaves)
        in_use, most = 0, 0
        for count in counts:
            if count == 0:
                in_use += 1
            else:
                in_use -= count - 1
            most = max(most, in_use)
        assert in_use == len(left)
        assert stack_depth(counts) == most


@pytest.mark.parametrize("power", range(9))
def test_memory_grows_with_the_logarithm_of_the_microbatches(power: int) -> None:
    num_leaves = 2**power
    assert int(math.log2(num_leaves)) == power
    for parts in range(1, num_leaves + 2):
        for own in split(num_leaves, parts):
            counts, left = merges(leaves(own), num_leaves)
            assert stack_depth(counts) + 1 <= 2 + power
            assert len(left) <= max(1, 2 * power)


@given(st.integers(0, 20), st.integers(0, 20))
def test_the_slice_of_a_range_takes_its_items(first: int, length: int) -> None:
    own = Range(first, first + length)
    assert list(range(50))[own.slice] == list(range(own.first, own.last))
    assert len(own) == length
