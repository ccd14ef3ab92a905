from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sums import NUM_SCALARS, PLACES, SEGMENTS, Leaf, row_bits, tree_sum, wild_leaves
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.comm import shared_memory
from lockstep.comm.shared_memory import SharedMemory
from lockstep.parallel import reduction, shared_slices
from lockstep.parallel.exchange import Leaves, add_up
from lockstep.parallel.fold import BLOCK, Segment
from lockstep.parallel.layout import Range, leaves, merges, split
from lockstep.parallel.reduction import OrderedReduction, Ways
from lockstep.parallel.shared_slices import additions


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of any size are sliced, and slices summed in several blocks."""
    monkeypatch.setattr(reduction, "SMALL_BYTES", 0)
    monkeypatch.setattr(shared_slices, "BLOCK_BYTES", 4 * BLOCK)


def reduced(
    transport: ThreadTransport,
    ranges: Sequence[Range],
    found: Sequence[Leaf],
    *,
    gather: bool = True,
    at: Callable[[str], None] = lambda moment: None,
) -> OrderedReduction:
    made = OrderedReduction(
        transport,
        Leaves(SEGMENTS, PLACES, NUM_SCALARS, ranges[-1].last, torch.device("cpu")),
        ranges,
        num_header=1,
        bucket_bytes=1 << 20,
        gather=gather,
        ways=Ways(shares_memory=True),
        at=at,
    )
    add(made, ranges[transport.rank], found)
    return made


def add(made: OrderedReduction, own: Range, found: Sequence[Leaf]) -> None:
    made.restart()
    for i in range(*own):
        made.fold.add(found[i].tensors, found[i].scalars)
    made.reduce()


def raising(call: Callable[..., Any], error: Callable[[], OSError | None]) -> Callable[..., Any]:
    """A function that raises an error first, if there is one."""

    def called(*arguments: Any) -> Any:
        if found := error():
            raise found
        return call(*arguments)

    return called


class Sum:
    """How it came about."""

    def __init__(self, text: str) -> None:
        self.text = text

    def add_(self, other: Sum) -> None:
        self.text = f"({self.text}{other.text})"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_the_additions_are_those_of_messages(lengths: list[int]) -> None:
    num, first, nodes = sum(lengths), 0, []
    for length in lengths:
        nodes += merges(leaves(Range(first, first + length)), num)[1]
        first += length
    plan, _ = merges(nodes, num)
    names = [chr(ord("a") + i) for i in range(len(plan))]
    expected = add_up([Sum(name) for name in names], plan).text  # type: ignore[type-var]
    made, num_scratch = additions(plan)
    operands = [*names, *["?"] * (num_scratch + 1)]
    for number, (left, right, to) in enumerate(made):
        assert to >= len(names)
        assert (to == len(operands) - 1) == (number == len(made) - 1)
        operands[to] = f"({operands[left]}{operands[right]})"
    assert (operands[-1] if made else names[0]) == expected
    assert operands[: len(names)] == names
    assert num_scratch <= len(names).bit_length()


@pytest.mark.parametrize("cuts", [(), (1,), (12,), (5, 6), (0, 0, 13), (3, 3, 11), (1, 2, 3, 12)])
@pytest.mark.parametrize("gather", [True, False])
def test_sums_have_the_same_bits_in_shared_memory(cuts: tuple[int, ...], gather: bool) -> None:
    ranges = [Range(a, b) for a, b in pairwise([0, *cuts, 13])]
    steps = [wild_leaves(13, seed, missing=0.3) for seed in range(3)]

    def body(transport: ThreadTransport) -> list[list[bytes]]:
        made = reduced(transport, ranges, steps[0], gather=gather)
        found = []
        for step in steps:
            add(made, ranges[transport.rank], step)
            assert made.why_messages == ("" if cuts else None)
            assert "all_to_all" not in transport.calls
            if not gather:
                for segment, slices in zip(made.total.segments, made.slices, strict=True):
                    own = segment[slice(*slices[transport.rank])].clone()
                    segment.fill_(torch.nan)
                    transport.all_gather(own, segment, [len(s) for s in slices])
            found.append(row_bits(made.total))
            # What a rank does with its sum is not to be seen by others that still copy theirs.
            for tensor in made.total.segments:
                tensor.mul_(1e20)
        return found

    assert on_ranks(len(ranges), body) == [[tree_sum(step) for step in steps]] * len(ranges)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_ranks_without_microbatches_sum_their_slices(num_microbatches: int) -> None:
    found = wild_leaves(num_microbatches, seed=4)
    ranges = split(num_microbatches, 4)

    def body(transport: ThreadTransport) -> list[bytes]:
        return row_bits(reduced(transport, ranges, found).total)

    assert on_ranks(4, body) == [tree_sum(found)] * 4


def test_no_rank_reads_what_another_has_not_finished() -> None:
    """Whoever is last to add up or to copy, the others wait for it."""
    found = wild_leaves(6, seed=2)
    ranges = split(6, 3)

    for late in range(3):
        for moment in ("summing", "copying"):

            def body(transport: ThreadTransport, late: int = late, moment: str = moment) -> bytes:
                def at(here: str) -> None:
                    if here == moment and transport.rank == late:
                        threading.Event().wait(0.02)

                made = reduced(transport, ranges, found, at=at)
                bits = b"".join(row_bits(made.total))
                for row in made.total.segments:
                    row.fill_(torch.nan)
                return bits

            assert on_ranks(3, body) == [b"".join(tree_sum(found))] * 3


@pytest.mark.parametrize("what", ["allocate", "map"])
@pytest.mark.parametrize("rank", [0, 2])
def test_all_send_messages_when_one_rank_cannot_share_memory(
    monkeypatch: pytest.MonkeyPatch, rank: int, what: str
) -> None:
    found = wild_leaves(6, seed=3)
    ranges = split(6, 3)

    def refused() -> OSError | None:
        is_rank = threading.current_thread().name == f"rank {rank}"
        return OSError(12, "there is none") if is_rank else None

    if what == "allocate":
        monkeypatch.setattr(os, "posix_fallocate", raising(os.posix_fallocate, refused))
    else:
        monkeypatch.setattr(shared_memory, "_opened", raising(shared_memory._opened, refused))

    def body(transport: ThreadTransport) -> tuple[list[bytes], str | None, bool]:
        threading.current_thread().name = f"rank {transport.rank}"
        made = reduced(transport, ranges, found)
        return row_bits(made.total), made.why_messages, "all_to_all" in transport.calls

    expected = (tree_sum(found), f"rank {rank}: there is none", True)
    assert on_ranks(3, body) == [expected] * 3


def test_ranks_in_other_network_namespaces_are_on_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = wild_leaves(4)
    ranges = split(4, 2)

    def link(path: Path) -> str:
        return f"net:[{threading.get_ident()}]" if path.name == "net" else "pid:[1]"

    monkeypatch.setattr(os, "readlink", link)

    def body(transport: ThreadTransport) -> tuple[list[bytes], str | None]:
        made = reduced(transport, ranges, found)
        return row_bits(made.total), made.why_messages

    assert on_ranks(2, body) == [(tree_sum(found), "the ranks are on 2 hosts")] * 2


def test_memory_can_be_mapped_until_it_is_closed_and_nothing_else_in_its_place() -> None:
    memory, other = SharedMemory(5000), SharedMemory(5000)
    memory.tensor[4999] = 7
    offer = memory.offer()
    mapped = shared_memory._opened(offer)
    with pytest.raises(OSError, match="is another file"):
        shared_memory._opened(offer | {"file": other.offer()["file"]})
    memory.close()
    with pytest.raises(OSError, match=r"No such file|is another file"):
        shared_memory._opened(offer)
    del memory
    assert mapped[4999] == 7


def test_an_exchange_takes_no_memory_of_python_that_grows_with_the_slices() -> None:
    numel = 1 << 20

    def body(transport: ThreadTransport) -> OrderedReduction:
        ranges = split(2, 2)
        made = OrderedReduction(
            transport,
            Leaves(
                [Segment(torch.float32, numel)],
                [[(0, torch.Size([numel]))]],
                NUM_SCALARS,
                2,
                torch.device("cpu"),
            ),
            ranges,
            num_header=1,
            bucket_bytes=1 << 20,
            ways=Ways(shares_memory=True),
        )
        made.header.zero_()
        made.fold.add([torch.ones(numel)], torch.zeros(NUM_SCALARS, dtype=torch.float64))
        made.reduce()
        return made

    tracemalloc.start()
    try:
        found = on_ranks(2, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for made in found:
        assert made.way is not None
        assert made.way.name == "shared memory"
        assert bool((made.total.segments[0] == 2).all())
    assert peak < numel
