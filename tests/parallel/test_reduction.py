from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sums import (
    NUM_SCALARS,
    PLACES,
    SEGMENTS,
    Leaf,
    left_to_right_sum,
    row_bits,
    tree_sum,
    wild_leaves,
)
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.comm.transport import LocalTransport, Transport
from lockstep.parallel import exchange, reduction
from lockstep.parallel.exchange import Leaves, gather_slices
from lockstep.parallel.fold import BLOCK, Segment
from lockstep.parallel.layout import Range, split
from lockstep.parallel.reduction import OrderedReduction

PATHS = {"whole": 1 << 40, "sliced": 0}
"""Most bytes up to which nodes travel whole."""


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(reduction, "SMALL_BYTES", PATHS[request.param])
    return str(request.param)


def ordered_reduction(
    transport: Transport,
    ranges: Sequence[Range],
    *,
    num_header: int = 0,
    bucket_bytes: int = 1 << 20,
    gather: bool = True,
) -> OrderedReduction:
    return OrderedReduction(
        transport,
        Leaves(SEGMENTS, PLACES, NUM_SCALARS, ranges[-1].last, torch.device("cpu")),
        ranges,
        num_header=num_header,
        bucket_bytes=bucket_bytes,
        gather=gather,
    )


def reduce(made: OrderedReduction, own: Range, leaves: Sequence[Leaf]) -> None:
    made.restart()
    for i in range(*own):
        made.fold.add(leaves[i].tensors, leaves[i].scalars)
    made.reduce()


def sums(ranges: Sequence[Range], leaves: Sequence[Leaf], bucket_bytes: int) -> list[list[bytes]]:
    """Every rank's sum."""

    def body(transport: ThreadTransport) -> list[bytes]:
        made = ordered_reduction(transport, ranges, bucket_bytes=bucket_bytes)
        reduce(made, ranges[transport.rank], leaves)
        return row_bits(made.total)

    return on_ranks(len(ranges), body)


@st.composite
def partitions(draw: st.DrawFn) -> list[Range]:
    num_microbatches = draw(st.integers(1, 20))
    cuts = sorted(draw(st.lists(st.integers(0, num_microbatches), max_size=4)))
    return [Range(a, b) for a, b in pairwise([0, *cuts, num_microbatches])]


@pytest.mark.parametrize("cuts", [(4, 8), (1, 2, 3, 12), (5, 6)])
def test_sum_level_by_level_has_the_bits_of_one_after_another(
    path: str, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "FEW_NODES", 1)
    leaves = wild_leaves(13, seed=6, missing=0.3)
    ranges = [Range(a, b) for a, b in pairwise([0, *cuts, 13])]
    assert sums(ranges, leaves, 20_000) == [tree_sum(leaves)] * len(ranges)

    def headers(transport: ThreadTransport) -> list[list[float]]:
        made = ordered_reduction(transport, ranges, num_header=2)
        made.header.copy_(torch.tensor([transport.rank, -1]))
        reduce(made, ranges[transport.rank], leaves)
        return made.headers().tolist()

    expected = [[rank, -1] for rank in range(len(ranges))]
    assert on_ranks(len(ranges), headers) == [expected] * len(ranges)


def test_the_order_of_these_leaves_shows_in_the_bits() -> None:
    leaves = wild_leaves(13)
    pairs = list(zip(tree_sum(leaves), left_to_right_sum(leaves), strict=True))
    large = [(a, b) for a, b in pairs if len(a) > 1000]
    assert len(large) == 2
    assert all(a != b for a, b in large)


@pytest.mark.parametrize("num_microbatches", [1, 4, 8, 13])
@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 30])
def test_sum_has_the_same_bits_on_any_number_of_ranks(
    path: str, num_microbatches: int, bucket_bytes: int
) -> None:
    leaves = wild_leaves(num_microbatches, seed=num_microbatches)
    expected = tree_sum(leaves)
    for size in range(1, 6):
        ranges = split(num_microbatches, size)
        assert sums(ranges, leaves, bucket_bytes) == [expected] * size


@pytest.mark.parametrize(
    "cuts", [(1,), (12,), (0,), (13,), (5, 6), (0, 0, 13), (3, 3, 11), (1, 2, 3, 12)]
)
def test_sum_has_the_same_bits_for_uneven_ranges(path: str, cuts: tuple[int, ...]) -> None:
    leaves = wild_leaves(13, seed=5)
    ranges = [Range(a, b) for a, b in pairwise([0, *cuts, 13])]
    assert sums(ranges, leaves, 20_000) == [tree_sum(leaves)] * len(ranges)


@given(ranges=partitions(), seed=st.integers(0, 1000), bucket_bytes=st.integers(1, 200_000))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_sum_has_the_same_bits_for_any_ranges_and_missing_gradients(
    path: str, ranges: list[Range], seed: int, bucket_bytes: int
) -> None:
    leaves = wild_leaves(ranges[-1].last, seed, missing=0.4)
    assert sums(ranges, leaves, bucket_bytes) == [tree_sum(leaves)] * len(ranges)


@pytest.mark.parametrize("size", range(1, 6))
def test_zeros_have_the_same_sign_on_any_number_of_ranks(path: str, size: int) -> None:
    negative = wild_leaves(5)
    for leaf in negative:
        leaf.tensors = [None if t is None else torch.full_like(t, -0.0) for t in leaf.tensors]
    assert sums(split(5, size), negative, 1 << 20) == [tree_sum(negative)] * size
    for hole in range(5):
        leaves = [Leaf(list(leaf.tensors), leaf.scalars) for leaf in negative]
        leaves[hole].tensors = [None] * len(leaves[hole].tensors)
        assert sums(split(5, size), leaves, 1 << 20) == [tree_sum(leaves)] * size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_steps_do_not_leak_into_one_another(path: str, size: int) -> None:
    ranges = split(7, size)

    def body(transport: ThreadTransport) -> list[list[bytes]]:
        made = ordered_reduction(transport, ranges, bucket_bytes=9000)
        found = []
        for step in range(3):
            reduce(made, ranges[transport.rank], wild_leaves(7, step, missing=0.3))
            found.append(row_bits(made.total))
            for tensor in (*made.total.segments, made.total.scalars):
                tensor.mul_(1e20)
        return found

    expected = [tree_sum(wild_leaves(7, step, missing=0.3)) for step in range(3)]
    assert on_ranks(size, body) == [expected] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_total_is_the_same_memory_in_every_step(path: str, size: int) -> None:
    ranges = split(4, size)
    leaves = wild_leaves(4)

    def body(transport: ThreadTransport) -> bool:
        made = ordered_reduction(transport, ranges)
        places = []
        for _ in range(2):
            reduce(made, ranges[transport.rank], leaves)
            places.append([s.data_ptr() for s in (*made.total.segments, made.total.scalars)])
        return places[0] == places[1]

    assert all(on_ranks(size, body))


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_owned_slices_and_a_later_gather_give_the_same_bits(
    path: str, size: int, bucket_bytes: int
) -> None:
    leaves = wild_leaves(6, seed=8)
    expected = tree_sum(leaves)
    ranges = split(6, size)
    whole = ordered_reduction(LocalTransport(), [Range(0, 6)])
    reduce(whole, Range(0, 6), leaves)

    def body(transport: ThreadTransport) -> list[bytes]:
        made = ordered_reduction(transport, ranges, bucket_bytes=bucket_bytes, gather=False)
        reduce(made, ranges[transport.rank], leaves)
        for mine, all_, slices in zip(
            made.total.segments, whole.total.segments, made.slices, strict=True
        ):
            own = slices[transport.rank]
            part = slice(own.first, own.last)
            assert mine[part].numpy().tobytes() == all_[part].numpy().tobytes()
            rest = torch.ones(len(mine), dtype=torch.bool)
            rest[part] = False
            mine[rest] = torch.nan
        for segment, flat in enumerate(made.total.segments):
            gather_slices(transport, flat, made.slices[segment])
        return row_bits(made.total)

    assert on_ranks(size, body) == [expected] * size


@pytest.mark.parametrize("size", range(1, 8))
def test_ranks_own_whole_blocks_that_cover_each_segment(size: int) -> None:
    ranges = split(size, size)

    def body(transport: ThreadTransport) -> list[list[Range]]:
        return ordered_reduction(transport, ranges).slices

    found = on_ranks(size, body)
    for slices in found:
        assert slices == found[0]
        for segment, parts in zip(SEGMENTS, slices, strict=True):
            assert [i for p in parts for i in range(*p)] == list(range(segment.numel))
            assert all(len(p) % BLOCK == 0 for p in parts)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_headers_of_all_ranks_reach_everyone(path: str, size: int, gather: bool) -> None:
    leaves = wild_leaves(4)
    ranges = split(4, size)

    def body(transport: ThreadTransport) -> list[list[list[float]]]:
        made = ordered_reduction(transport, ranges, num_header=3, gather=gather)
        seen = []
        for step in range(2):
            made.header.copy_(torch.tensor([transport.rank, step, float("-inf")]))
            reduce(made, ranges[transport.rank], leaves)
            seen.append(made.headers().tolist())
        return seen

    expected = [[[float(r), float(step), float("-inf")] for r in range(size)] for step in range(2)]
    assert on_ranks(size, body) == [expected] * size


@pytest.mark.parametrize("gather", [True, False])
def test_small_gradients_take_one_call_and_large_ones_travel_in_slices(
    path: str, gather: bool
) -> None:
    ranges = split(4, 2)
    leaves = wild_leaves(4)

    def body(transport: ThreadTransport) -> list[str]:
        made = ordered_reduction(transport, ranges, gather=gather)
        reduce(made, ranges[transport.rank], leaves)
        return transport.calls

    calls, _ = on_ranks(2, body)
    if not gather:
        assert calls == ["all_gather", "all_to_all", "all_to_all"]
    elif path == "whole":
        assert calls == ["all_gather"]
    else:
        assert calls == ["all_gather", "all_to_all", "all_gather", "all_to_all", "all_gather"]


@pytest.mark.parametrize("bucket_bytes", [1, 4 * BLOCK, 16 * BLOCK])
def test_no_rank_receives_more_than_a_bucket_at_a_time(
    monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    monkeypatch.setattr(reduction, "SMALL_BYTES", 0)
    received: list[int] = []
    original = ThreadTransport.all_to_all

    def spy(self: ThreadTransport, *arguments: object) -> None:
        received.append(arguments[3].nbytes)  # type: ignore[attr-defined]
        original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ThreadTransport, "all_to_all", spy)
    sums(split(4, 2), wild_leaves(4), bucket_bytes)
    largest_element = 8
    assert 0 < max(received) <= max(bucket_bytes, 2 * BLOCK * largest_element)


def test_gradients_beyond_a_megabyte_are_sliced_without_being_told_to() -> None:
    numel = 160 * BLOCK
    ranges = split(4, 3)
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(numel, generator=generator) * 10.0 ** (3 * i) for i in range(4)]
    expected = ((leaves[0] + leaves[1]) + (leaves[2] + leaves[3])).numpy().tobytes()

    def body(transport: ThreadTransport) -> tuple[bytes, list[str]]:
        made = OrderedReduction(
            transport,
            Leaves(
                [Segment(torch.float32, numel)],
                [[(0, torch.Size([numel]))]],
                0,
                4,
                torch.device("cpu"),
            ),
            ranges,
            num_header=0,
            bucket_bytes=100_000,
        )
        for i in range(*ranges[transport.rank]):
            made.fold.add([leaves[i]], torch.empty(0, dtype=torch.float64))
        made.reduce()
        return made.total.segments[0].numpy().tobytes(), transport.calls

    for found, calls in on_ranks(3, body):
        assert found == expected
        assert "all_to_all" in calls
