"""Sums host by host: the bits of the flat sum, on any hosts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sums import NUM_SCALARS, PLACES, SEGMENTS, Leaf, row_bits, tree_sum, wild_leaves
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.comm import ahead
from lockstep.parallel import hosts as hosts_layout
from lockstep.parallel import reduction
from lockstep.parallel.exchange import Exchange, Leaves, add_up
from lockstep.parallel.fold import BLOCK, Row, parts_of
from lockstep.parallel.hosts import (
    Hosts,
    Tried,
    cut,
    host_nodes,
    meet,
    meet_hosts,
    ranks_of_hosts,
    shares,
)
from lockstep.parallel.hosts import exchange as hosts_exchange
from lockstep.parallel.hosts.exchange import gather_slices_by_host
from lockstep.parallel.layout import Range, leaves, merges, split
from lockstep.parallel.reduction import OrderedReduction, Ways

HOSTS = st.lists(st.integers(1, 3), min_size=2, max_size=4).filter(lambda n: 2 < sum(n) < 8)
"""Numbers of ranks of each host."""


def ranges_of(counts: Sequence[int]) -> list[Range]:
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return [Range(*pair) for pair in pairwise(bounds)]


def invent(monkeypatch: pytest.MonkeyPatch, counts: Sequence[int]) -> None:
    """Have ranks believe that so many of them each are on hosts of their own."""
    names = [f"h{host}" for host, count in enumerate(counts) for _ in range(count)]
    monkeypatch.setattr(hosts_layout, "hosts_of", lambda transport: names)


def reduced(
    transport: ThreadTransport,
    hosts: Hosts | str,
    ranges: Sequence[Range],
    steps: Sequence[Sequence[Leaf]],
    **keys: Any,
) -> tuple[OrderedReduction, list[list[bytes]]]:
    """What sums after a number of steps, and the bits of each of them."""
    keys = {"shares_memory": True, "is_measured": False, "bucket_bytes": 1 << 20, **keys}
    ways = Ways(keys.pop("shares_memory"), hosts=hosts, is_measured=keys.pop("is_measured"))
    made = OrderedReduction(
        transport,
        Leaves(SEGMENTS, PLACES, NUM_SCALARS, ranges[-1].last, torch.device("cpu")),
        ranges,
        num_header=2,
        ways=ways,
        **keys,
    )
    found = []
    for number, step in enumerate(steps):
        made.restart()
        for i in range(*ranges[transport.rank]):
            made.fold.add(step[i].tensors, step[i].scalars)
        made.header.copy_(torch.tensor([transport.rank, number]))
        made.reduce()
        headers = [[rank, number] for rank in range(transport.size)]
        assert made.headers().tolist() == headers
        if not keys.get("gather", True):
            for segment, slices in zip(made.total.segments, made.slices, strict=True):
                own = segment[slice(*slices[transport.rank])].clone()
                segment.fill_(torch.nan)
                transport.all_gather(own, segment, [len(s) for s in slices])
        found.append(row_bits(made.total))
        # What a rank does with its sum is not to be seen by others.
        for tensor in made.total.segments:
            tensor.mul_(1e20)
    return made, found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[Range]]:
    """Numbers of ranks of each host, and the microbatches of each rank: any ranges."""
    counts = draw(HOSTS)
    num = draw(st.integers(1, 20))
    cuts = draw(st.lists(st.integers(0, num), min_size=sum(counts) - 1, max_size=sum(counts) - 1))
    return counts, [Range(a, b) for a, b in pairwise([0, *sorted(cuts), num])]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"small": 0},
        {"small": 0, "shares_memory": False, "bucket_bytes": 1},
        {"small": 0, "gather": False, "bucket_bytes": 1},
        {"few": 1},
    ],
    ids=["nodes", "memory", "messages", "sharded", "as of many"],
)
@given(layouts(), st.integers(0, 99))
@settings(max_examples=8)
def test_sums_host_by_host_have_the_bits_of_the_tree(
    keys: dict[str, Any], layout: tuple[list[int], list[Range]], seed: int
) -> None:
    counts, ranges = layout
    steps = [wild_leaves(ranges[-1].last, seed + n, missing=0.3) for n in range(2)]
    rest = dict(keys)
    small, few = rest.pop("small", 1 << 30), rest.pop("few", 16)

    def body(transport: ThreadTransport) -> list[list[bytes]]:
        hosts = meet_hosts(transport, [range(transport.size)], meet(transport))
        made, found = reduced(transport, hosts, ranges, steps, **rest)
        if isinstance(hosts, Hosts):
            assert made.way is not None
            assert made.way.name == "hierarchical"
        return found

    with pytest.MonkeyPatch.context() as patch:
        invent(patch, counts)
        patch.setattr(reduction, "SMALL_BYTES", small)
        patch.setattr(ahead, "FEW_RANKS", few)
        patch.setattr(hosts_exchange, "FEW_NODES", few)
        found = on_ranks(sum(counts), body)
    assert found == [[tree_sum(step) for step in steps]] * sum(counts)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("a a a", ""),
        ("a b c", "no two ranks that follow each other share a host"),
        ("a b a b", "no two ranks that follow each other share a host"),
        ("a a b b a", "ranks of one host do not follow each other"),
        ("b b a", [Range(0, 2), Range(2, 3)]),
        ("a b b b c", [Range(0, 1), Range(1, 4), Range(4, 5)]),
    ],
)
def test_the_ranks_of_each_host_are_found(names: str, found: list[Range] | str) -> None:
    assert ranks_of_hosts(names.split()) == found


@given(layouts())
def test_what_hosts_add_up_are_nodes_of_their_ranges(layout: tuple[list[int], list[Range]]) -> None:
    counts, ranges = layout
    num = ranges[-1].last
    nodes = [merges(leaves(r), num)[1] for r in ranges]
    left = []
    for host in ranges_of(counts):
        inside = [node for rank in range(*host) for node in nodes[rank]]
        merged = host_nodes(inside, num)
        own = Range(ranges[host.first].first, ranges[host.last - 1].last)
        assert merged.nodes == merges(leaves(own), num)[1]
        assert len(merged.nodes) <= 2 * num.bit_length()
        assert [i for run in merged.runs for i in range(*run)] == list(range(len(inside)))
        for run, plan in zip(merged.runs, merged.plans, strict=True):
            assert sum(plan) == len(plan) - 1 == len(run) - 1
            names = [torch.tensor([1.0]) for _ in plan]
            assert add_up(names, plan).item() == len(plan)
        left += merged.nodes
    assert len(merges(left, num)[1]) == 1


@given(HOSTS, st.integers(0, 40), st.integers(0, 9), st.integers(1, 9))
def test_every_element_has_one_place_on_every_host(
    counts: list[int], num_blocks: int, start: int, length: int
) -> None:
    hosts = ranges_of(counts)
    size = sum(counts)
    slices = [Range(r.first * BLOCK, r.last * BLOCK) for r in split(num_blocks, size)]
    parts = parts_of(slices, start * BLOCK, length * BLOCK)
    by_rank = [of_rank for host in hosts for of_rank in shares(slices, hosts, host)]
    cuts = [cut(parts, hosts, slices, rank) for rank in range(size)]
    for number, host in enumerate(hosts):
        covered = [i for h in range(len(hosts)) for q in range(*host) for i in [by_rank[q][h]]]
        assert [x for r in covered for x in range(r.first, r.last, BLOCK)] == list(
            range(0, num_blocks * BLOCK, BLOCK)
        )
        for place, rank in enumerate(range(*host)):
            assert by_rank[rank][number] == slices[rank]
            for owner in range(size):
                mine = cuts[rank].taken[owner]
                assert len(mine) == len(cuts[owner].given[rank])
                assert not len(mine) or mine == cuts[owner].given[rank]
            assert cuts[host.first].worked[place] == [r for r in cuts[rank].taken if len(r)]
    for rank in range(size):
        for host in hosts:
            given = [cuts[rank].given[q] for q in range(*host)]
            assert [x for r in given for x in range(*r)] == list(range(*parts[rank]))


def test_ranges_overlap() -> None:
    assert Range(0, 5).common(Range(3, 9)) == Range(3, 5)
    assert Range(4, 6).common(Range(0, 9)) == Range(4, 6)
    for other in (Range(0, 2), Range(7, 9), Range(5, 5)):
        assert len(Range(4, 6).common(other)) == 0


@pytest.mark.parametrize("counts", [[2, 2], [1, 3, 2]])
def test_slices_come_together_by_hosts(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
    size, num_blocks = sum(counts), 11
    slices = [Range(r.first * BLOCK, r.last * BLOCK) for r in split(num_blocks, size)]
    invent(monkeypatch, counts)

    def body(transport: ThreadTransport) -> list[float]:
        hosts = meet_hosts(transport, [range(size)], meet(transport))
        assert isinstance(hosts, Hosts)
        flat = torch.full([num_blocks * BLOCK], torch.nan)
        own = slice(*slices[transport.rank])
        flat[own] = torch.arange(num_blocks * BLOCK, dtype=torch.float32)[own]
        gather_slices_by_host(transport, hosts, flat, slices)
        return flat.tolist()

    assert on_ranks(size, body) == [list(range(num_blocks * BLOCK))] * size


def test_columns_have_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two columns whose ranks alternate, the second one has a host of one rank."""
    names = ["a", "a", "a", "a", "b", "b", "b", "c"]
    monkeypatch.setattr(hosts_layout, "hosts_of", lambda transport: names)

    def body(transport: ThreadTransport) -> Any:
        hosts = meet_hosts(transport, [range(0, 8, 2), range(1, 8, 2)], meet(transport))
        assert isinstance(hosts, Hosts)
        return list(hosts.ranges), hosts.inside.rank, hosts.inside.size

    even, odd = [Range(0, 2), Range(2, 4)], [Range(0, 2), Range(2, 3), Range(3, 4)]
    assert on_ranks(8, body) == [
        (even, 0, 2), (odd, 0, 2), (even, 1, 2), (odd, 1, 2),
        (even, 0, 2), (odd, 0, 1), (even, 1, 2), (odd, 0, 1),
    ]  # fmt: skip


def test_one_host_and_one_rank_need_no_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(transport: ThreadTransport) -> Hosts | str:
        return meet_hosts(transport, [range(transport.size)], meet(transport))

    assert on_ranks(3, body) == [""] * 3  # as they are: threads of this machine
    monkeypatch.setattr(hosts_layout, "hosts_of", lambda transport: pytest.fail("asked"))
    assert on_ranks(1, body) == [""]


class Timed(Exchange):
    """Takes some seconds of a clock, and says in the sum which way it was."""

    def __init__(self, total: Row, number: int, clock: list[float], seconds: list[float]) -> None:
        self.total, self.number, self.clock, self.seconds = total, number, clock, seconds

    def run(self) -> None:
        self.clock[0] += self.seconds.pop(0)
        self.total.scalars.fill_(self.number)

    def headers(self) -> torch.Tensor:
        return torch.tensor([[self.number]])


def test_the_quicker_way_is_taken_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is the slower one on some ranks, and in its first run."""
    clocks = {f"rank {rank}": [0.0] for rank in range(3)}
    monkeypatch.setattr(
        hosts_layout, "perf_counter", lambda: clocks[threading.current_thread().name][0]
    )

    def body(transport: ThreadTransport) -> tuple[list[int], str, dict[str, float]]:
        threading.current_thread().name = f"rank {transport.rank}"
        clock = clocks[f"rank {transport.rank}"]
        total = Row([], torch.zeros(1))
        late = 3.0 if transport.rank == 1 else 0.5
        ways = {
            "one": Timed(total, 1, clock, [late] * 3),
            "other": Timed(total, 2, clock, [9.0, 2.0, 1.0, *[7.0] * 3]),
        }
        tried = Tried(transport, ways, total)
        assert tried.chosen == ""
        taken = []
        for _ in range(9):
            tried.run()
            assert tried.headers().item() == total.scalars.item()
            taken.append(int(total.scalars))
        return taken, tried.chosen, tried.seconds

    expected = [1, 2, 1, 2, 1, 2, 2, 2, 2], "other", {"one": 3.0, "other": 1.0}
    assert on_ranks(3, body) == [expected] * 3


def test_both_ways_that_are_tried_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, ranges = [2, 1], split(5, 3)
    steps = [wild_leaves(5, seed) for seed in range(8)]
    for small in (0, 1 << 30):
        invent(monkeypatch, counts)
        monkeypatch.setattr(reduction, "SMALL_BYTES", small)

        def body(transport: ThreadTransport) -> tuple[list[list[bytes]], Any]:
            hosts = meet_hosts(transport, [range(3)], meet(transport))
            made, found = reduced(transport, hosts, ranges, steps, is_measured=True)
            return found, made.way

        everyone = on_ranks(3, body)
        assert [found for found, _ in everyone] == [[tree_sum(step) for step in steps]] * 3
        [way] = {way for _, way in everyone}
        assert way.name in ("hierarchical", "messages")
        assert "an exchange took" in way.reason
