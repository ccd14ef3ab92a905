"""Sums host by host: the bits of the flat sum, on any hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sums import NUM_SCALARS, PLACES, SEGMENTS, Leaf, row_bits, tree_sum, wild_leaves
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.comm import shared_memory
from lockstep.parallel import reduction
from lockstep.parallel.arena import BLOCK
from lockstep.parallel.exchange import add_up, gather_slices
from lockstep.parallel.hosts import choice, group
from lockstep.parallel.hosts.group import Hosts, meet_hosts
from lockstep.parallel.hosts.layout import (
    cut,
    host_nodes,
    overlap,
    parts_of,
    ranks_of_hosts,
    shares,
)
from lockstep.parallel.hosts.slices import gather_slices_by_host
from lockstep.parallel.layout import Range, leaves, merges, split
from lockstep.parallel.reduction import OrderedReduction

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
    monkeypatch.setattr(group, "hosts_of", lambda transport: names)


def reduced(
    transport: ThreadTransport,
    hosts: Hosts | str,
    ranges: Sequence[Range],
    steps: Sequence[Sequence[Leaf]],
    **keys: Any,
) -> tuple[OrderedReduction, list[list[bytes]]]:
    """What sums after a number of steps, and the bits of each of them."""
    keys = {"shares_memory": True, "is_measured": False, "bucket_bytes": 1 << 20, **keys}
    made = OrderedReduction(
        transport,
        SEGMENTS,
        PLACES,
        num_scalars=NUM_SCALARS,
        num_header=2,
        num_microbatches=ranges[-1].last,
        ranges=ranges,
        device=torch.device("cpu"),
        hosts=hosts,
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
    ],
    ids=["nodes", "memory", "messages", "sharded"],
)
@given(layouts(), st.integers(0, 99))
@settings(max_examples=8)
def test_sums_host_by_host_have_the_bits_of_the_tree(
    keys: dict[str, Any], layout: tuple[list[int], list[Range]], seed: int
) -> None:
    counts, ranges = layout
    steps = [wild_leaves(ranges[-1].last, seed + n, missing=0.3) for n in range(2)]
    rest = dict(keys)
    small = rest.pop("small", 1 << 30)

    def body(transport: ThreadTransport) -> list[list[bytes]]:
        hosts = meet_hosts(transport, [range(transport.size)])
        made, found = reduced(transport, hosts, ranges, steps, **rest)
        if isinstance(hosts, Hosts):
            assert made.way is not None
            assert made.way.name == "hierarchical"
        return found

    with pytest.MonkeyPatch.context() as patch:
        invent(patch, counts)
        patch.setattr(reduction, "SMALL_BYTES", small)
        found = on_ranks(sum(counts), body)
    assert found == [[tree_sum(step) for step in steps]] * sum(counts)
