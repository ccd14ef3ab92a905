"""Gradients that travel while the last backward pass computes others, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sums import NUM_SCALARS, PLACES, SEGMENTS, Leaf, row_bits, tree_sum, wild_leaves
from tests.thread_transport import ThreadTransport, on_ranks
from torch import Tensor, nn

from lockstep.parallel.exchange import Leaves
from lockstep.parallel.fold import LateGradientError
from lockstep.parallel.layout import Range, split
from lockstep.parallel.overlapped import OverlappedSlices
from lockstep.parallel.reduction import OrderedReduction, Ways

SHAPES = [
    (segment.dtype, shape)
    for segment, places in zip(SEGMENTS, PLACES, strict=True)
    for _, shape in places
]


def overlapped(
    transport: ThreadTransport, ranges: Sequence[Range], bucket_bytes: int
) -> tuple[OrderedReduction, OverlappedSlices]:
    leaves = Leaves(SEGMENTS, PLACES, NUM_SCALARS, ranges[-1].last, torch.device("cpu"))
    ways = Ways(overlaps=True)
    made = OrderedReduction(
        transport, leaves, ranges, num_header=0, bucket_bytes=bucket_bytes, ways=ways
    )
    assert isinstance(made.leaf_sums, OverlappedSlices)
    return made, made.leaf_sums


def parameters() -> list[Tensor]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for dtype, shape in SHAPES]


def backward(parameter: Tensor, gradient: Tensor) -> None:
    """Gives a parameter exactly this gradient, once more if it has one."""
    (parameter * gradient).sum().backward()


def passes(leaves: OverlappedSlices, own: Range, of: Sequence[Leaf], order: Sequence[int]) -> int:
    """Backward passes of a rank's microbatches; how many buckets left before they were over."""
    trained, sent = parameters(), 0
    for microbatch in range(*own):
        leaf = of[microbatch]
        with leaves.watching(trained):
            for index in order:
                gradient = leaf.tensors[index]
                if gradient is not None:
                    backward(trained[index], gradient)
            sent = leaves._next
        leaves.add([p.grad for p in trained], leaf.scalars)
        for parameter in trained:
            parameter.grad = None
    return sent


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.parallel.reduction.SMALL_BYTES", 0)


@given(
    cuts=st.lists(st.integers(0, 9), max_size=3),
    bucket_bytes=st.sampled_from([1, 20_000, 1 << 30]),
    orders=st.lists(st.permutations(range(len(SHAPES))), min_size=4, max_size=4),
    missing=st.sampled_from([0.0, 0.4]),
)
@settings(max_examples=40, deadline=None)
def test_sums_have_the_same_bits_whenever_gradients_are_there(
    cuts: list[int], bucket_bytes: int, orders: list[list[int]], missing: float
) -> None:
    ends = [0, *sorted(cuts), 9]
    ranges = [Range(*pair) for pair in pairwise(ends)]
    steps = [wild_leaves(9, seed, missing) for seed in range(3)]

    def body(transport: ThreadTransport) -> list[list[bytes]]:
        if transport.size == 1:
            return [tree_sum(leaves) for leaves in steps]
        made, sums = overlapped(transport, ranges, bucket_bytes)
        found = []
        for leaves in steps:
            made.restart()
            passes(sums, ranges[transport.rank], leaves, orders[transport.rank])
            made.reduce()
            found.append(row_bits(made.total))
        return found

    expected = [tree_sum(leaves) for leaves in steps]
    assert on_ranks(len(ranges), body) == [expected] * len(ranges)


def test_buckets_leave_before_the_last_gradient_is_there_but_in_the_first_step() -> None:
    ranges, backwards = split(4, 2), list(reversed(range(len(SHAPES))))

    def body(transport: ThreadTransport) -> list[int]:
        made, sums = overlapped(transport, ranges, 1)
        sent = []
        for _ in range(2):
            made.restart()
            sent.append(passes(sums, ranges[transport.rank], wild_leaves(4), backwards))
            made.reduce()
        return sent

    # All five blocks are final by then, and a bucket has one for each rank.
    assert on_ranks(2, body) == [[0, 3]] * 2


def test_gradients_that_come_in_pieces_wait_for_the_end() -> None:
    """As those of blocks that compute their activations again, and share a parameter."""
    ranges, leaves = split(2, 2), wild_leaves(2)
    doubled = [
        Leaf([None if t is None else t + t for t in lf.tensors], lf.scalars) for lf in leaves
    ]

    def body(transport: ThreadTransport) -> list[list[bytes]]:
        made, sums = overlapped(transport, ranges, 1)
        found = []
        for _ in range(3):
            made.restart()
            passes(sums, ranges[transport.rank], leaves, [*range(len(SHAPES))] * 2)
            made.reduce()
            found.append(row_bits(made.total))
        return found

    assert on_ranks(2, body) == [[tree_sum(doubled)] * 3] * 2


def test_a_gradient_that_comes_in_pieces_later_only_is_an_error() -> None:
    """As that of a shared block which a later pass calls more often than the first one."""
    ranges, leaves = split(4, 2), wild_leaves(4)

    def body(transport: ThreadTransport) -> int:
        made, sums = overlapped(transport, ranges, 1)
        own, order = ranges[transport.rank], [*range(len(SHAPES))]
        passes(sums, own, leaves, order)
        made.reduce()
        made.restart()
        with pytest.raises(LateGradientError) as caught:
            passes(sums, own, leaves, [*order, 1])
        made.reduce()
        return caught.value.index

    assert on_ranks(2, body) == [1, 1]


@pytest.mark.parametrize("kind", ["once more", "in place"])
def test_a_gradient_that_changes_after_it_was_sent_is_an_error(kind: str) -> None:
    ranges, leaves = split(2, 2), wild_leaves(2)

    def body(transport: ThreadTransport) -> int:
        made, sums = overlapped(transport, ranges, 1)
        own = ranges[transport.rank]
        passes(sums, own, leaves, range(len(SHAPES)))
        made.reduce()
        made.restart()
        trained, leaf = parameters(), leaves[own.first]
        with sums.watching(trained):
            for parameter, gradient in zip(trained, leaf.tensors, strict=True):
                assert gradient is not None
                backward(parameter, gradient)
            if kind == "in place":
                assert trained[1].grad is not None
                trained[1].grad.mul_(2.0)
        if kind == "once more":
            backward(trained[1], torch.ones_like(trained[1]))
        with pytest.raises(LateGradientError) as caught:
            sums.add([p.grad for p in trained], leaf.scalars)
        made.reduce()  # as the others do, who learn of the error from headers
        return caught.value.index

    assert on_ranks(2, body) == [1, 1]
