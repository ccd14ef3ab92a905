"""Sums of compressed leaves: the same bits on any ranks, and nothing lost on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sums import NUM_SCALARS, PLACES, SEGMENTS, Leaf, row_bits, tree_sum, wild_leaves
from tests.thread_transport import ThreadTransport, on_ranks
from torch import Tensor

from lockstep.comm.transport import LocalTransport, Transport
from lockstep.parallel import reduction as ordered
from lockstep.parallel.compression.reduction import CompressedReduction, Summed
from lockstep.parallel.compression.sums import compressed_reduction, first_agreed
from lockstep.parallel.exchange import Leaves
from lockstep.parallel.fold import BLOCK, Row, Segment
from lockstep.parallel.layout import Range, split

KINDS = ("int8", "int16", "topk", "randomk", "onebit", "lowrank")
RANK = 2
CPU = torch.device("cpu")
EXACT = [Segment(torch.float32, BLOCK)]
EXACT_PLACES = [[(0, torch.Size([3, 100]))]]
NUM_TENSORS = sum(map(len, PLACES))


class States:
    """What compression keeps, for all ranks at once: where it lies does not matter here."""

    def __init__(self, first: Sequence[Tensor]) -> None:
        self.step = 0
        self.kept: dict[int, Sequence[Tensor]] = {}
        self.made: dict[int, Sequence[Tensor]] = {}
        self.agreed = list(first)
        self.next = list(first)

    @property
    def key(self) -> int:
        return 77 + self.step

    def of_leaf(self, microbatch: int) -> Sequence[Tensor]:
        return self.kept.get(microbatch, [])

    def make_leaf(self, microbatch: int, errors: Sequence[Tensor]) -> None:
        self.made[microbatch] = errors

    def agree(self, tensors: Sequence[Tensor]) -> None:
        self.next = list(tensors)

    def commit(self) -> None:
        self.kept, self.made, self.agreed = dict(self.made), {}, self.next
        self.step += 1


def states(name: str, tensors: Sequence[Tensor | None]) -> States:
    return States(first_agreed(name, RANK, SEGMENTS, PLACES, lambda: tensors, CPU))


def reduction(
    transport: Transport,
    ranges: Sequence[Range],
    kept: States,
    name: str,
    feeds_back: bool = True,
    bucket_bytes: int = 1 << 20,
    ratio: float = 0.1,
) -> CompressedReduction:
    summed = Summed(
        transport,
        Leaves(SEGMENTS, PLACES, 0, ranges[-1].last, CPU),
        Leaves(EXACT, EXACT_PLACES, NUM_SCALARS, ranges[-1].last, CPU),
        ranges,
        num_header=2,
        bucket_bytes=bucket_bytes,
        feeds_back=feeds_back,
        states=kept,
    )
    return compressed_reduction(summed, name, ratio, RANK)


def buffers(step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randn([3, 100], generator=generator)


def leaves_of(step: int, num: int, missing: float = 0.3) -> list[Leaf]:
    return wild_leaves(num, seed=step + 10 * num, missing=missing)


def reduce(made: CompressedReduction, own: Range, leaves: Sequence[Leaf], step: int) -> None:
    made.restart()
    for i in range(*own):
        made.leaf_sums.add([*leaves[i].tensors, buffers(step, i)], leaves[i].scalars)
    made.reduce()


def bits_of(made: CompressedReduction) -> list[bytes]:
    *gradients, buffer = made.total.segments
    return [*row_bits(Row(gradients, made.total.scalars)), buffer.numpy().tobytes()]


def trained(ranges: Sequence[Range], name: str, steps: int = 3, **about: object) -> list[list]:
    """The bits of each step's sum, and of what microbatches keep in the end; on each rank."""
    num = ranges[-1].last
    kept = states(name, leaves_of(0, num)[0].tensors)

    def body(transport: ThreadTransport) -> list:
        made = reduction(transport, ranges, kept, name, **about)
        found = []
        for step in range(steps):
            made.header.copy_(torch.tensor([float(transport.rank), float(step)]))
            reduce(made, ranges[transport.rank], leaves_of(step, num), step)
            assert made.headers().tolist() == [[r, step] for r in range(len(ranges))]
            found.append(bits_of(made))
            for tensor in (*made.total.segments, made.total.scalars):
                tensor.mul_(1e20)  # as a step changes them; nothing of it may be left
            transport._meeting.barrier.wait()
            if transport.rank == 0:
                kept.commit()
            transport._meeting.barrier.wait()
        tensors = [*(t for m in sorted(kept.kept) for t in kept.kept[m]), *kept.agreed]
        return [*found, [t.numpy().tobytes() for t in tensors]]

    return on_ranks(len(ranges), body)


@pytest.mark.parametrize("feeds_back", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_any_number_of_ranks_gives_the_same_sums(name: str, feeds_back: bool) -> None:
    (expected,) = trained([Range(0, 5)], name, feeds_back=feeds_back)
    for size in (2, 3, 6):
        found = trained(split(5, size), name, feeds_back=feeds_back)
        assert found == [expected] * size


@pytest.mark.parametrize("name", ["int8", "int16", "randomk", "lowrank"])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_slices_give_the_same_sums(
    name: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = trained([Range(0, 5)], name)
    monkeypatch.setattr(ordered, "SMALL_BYTES", 0)
    assert trained(split(5, 3), name, bucket_bytes=bucket_bytes) == [expected] * 3


@settings(max_examples=12, deadline=None)
@given(st.data(), st.sampled_from(KINDS))
def test_any_ranges_give_the_same_sums(data: st.DataObject, name: str) -> None:
    num = data.draw(st.integers(1, 12))
    cuts = sorted(data.draw(st.lists(st.integers(0, num), max_size=4)))
    ranges = [Range(a, b) for a, b in pairwise([0, *cuts, num])]
    bucket_bytes = data.draw(st.integers(1, 100_000))
    (expected,) = trained([Range(0, num)], name)
    assert trained(ranges, name, bucket_bytes=bucket_bytes) == [expected] * len(ranges)


@pytest.mark.parametrize("name", KINDS)
def test_scalars_and_buffers_are_exact(name: str) -> None:
    num = 5
    leaves = leaves_of(0, num)
    made = reduction(LocalTransport(), [Range(0, num)], states(name, leaves[0].tensors), name)
    reduce(made, Range(0, num), leaves, 0)
    assert made.total.scalars.numpy().tobytes() == tree_sum(leaves)[-1]
    there = [buffers(0, m) for m in range(num)]
    expected = ((there[0] + there[1]) + (there[2] + there[3])) + there[4]
    assert made.total.segments[-1][:300].equal(expected.view(-1))


def tame(step: int, microbatch: int) -> list[Tensor | None]:
    """Leaves whose sums over some steps lose no more than a few bits."""
    generator = torch.Generator().manual_seed(97 * step + microbatch)
    shapes = [(s.dtype, shape) for s, of in zip(SEGMENTS, PLACES, strict=True) for _, shape in of]
    return [torch.randn(shape, dtype=dtype, generator=generator) for dtype, shape in shapes]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_not_sent_is_kept(name: str) -> None:
    """All sums so far and what microbatches still keep are all leaves so far."""
    num, steps, scalars = 5, 8, torch.zeros(NUM_SCALARS, dtype=torch.float64)
    kept = states(name, tame(0, 0))
    made = reduction(LocalTransport(), [Range(0, num)], kept, name)
    sent = [torch.zeros(s.numel, dtype=torch.float64) for s in SEGMENTS]
    for step in range(steps):
        made.restart()
        for m in range(num):
            made.leaf_sums.add([*tame(step, m), buffers(step, m)], scalars)
        made.reduce()
        kept.commit()
        for so_far, total in zip(sent, made.total.segments, strict=False):
            so_far += total
    errors = list(kept.kept.values())
    for number, (so_far, places) in enumerate(zip(sent, PLACES, strict=True)):
        left = sum(error[number].double() for error in errors)
        first = sum(len(of) for of in PLACES[:number])
        # In blocks or not, tensors follow one another with padding of zeros between them.
        assert so_far.abs().sum() > 0
        end = 0
        for index, (offset, shape) in enumerate(places, first):
            whole = sum(tame(t, m)[index].double() for t in range(steps) for m in range(num))
            start = end if name in ("int8", "int16", "onebit") else offset
            end = start + -(-shape.numel() // 256) * 256
            here = so_far[offset : offset + shape.numel()] + left[start : start + shape.numel()]
            assert here.view(shape).sub(whole).abs().max() < 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("feeds_back", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_not_finite_shows_in_its_tensor_and_in_no_other(
    name: str, feeds_back: bool, bad: float
) -> None:
    num = 3
    for index in range(NUM_TENSORS):
        tensors = [tame(0, m) for m in range(num)]
        kept = states(name, tensors[0])
        made = reduction(LocalTransport(), [Range(0, num)], kept, name, feeds_back)
        tensors[1][index].view(-1)[-1] = bad
        made.restart()
        for m in range(num):
            scalars = torch.zeros(NUM_SCALARS, dtype=torch.float64)
            made.leaf_sums.add([*tensors[m], buffers(0, m)], scalars)
        made.reduce()
        found = [
            total[offset : offset + shape.numel()].isfinite().all().item()
            for total, of in zip(made.total.segments, PLACES, strict=False)
            for offset, shape in of
        ]
        assert found == [i != index for i in range(NUM_TENSORS)]


def test_without_feedback_drawn_elements_stand_for_the_others() -> None:
    kept, num = States([]), 2
    made = reduction(
        LocalTransport(), [Range(0, num)], kept, "randomk", feeds_back=False, ratio=0.25
    )
    mean = torch.zeros(2000, dtype=torch.float64)
    for step in range(400):
        kept.step = step
        made.restart()
        for m in range(num):
            made.leaf_sums.add(
                [*tame(0, m), buffers(0, m)], torch.zeros(NUM_SCALARS, dtype=torch.float64)
            )
        made.reduce()
        mean += made.total.segments[0][:2000] / 400
    whole = (tame(0, 0)[0] + tame(0, 1)[0]).view(-1)
    # An element is sent four times as large in one of four steps: a deviation of 1.7 of it.
    assert (mean - whole).abs().div(whole.abs()).median() < 0.12
    assert not kept.made


@pytest.mark.parametrize("name", KINDS)
def test_an_attempt_that_was_given_up_leaves_nothing(name: str) -> None:
    num = 4
    kept = states(name, leaves_of(0, num)[0].tensors)
    made = reduction(LocalTransport(), [Range(0, num)], kept, name)
    reduce(made, Range(0, num), leaves_of(0, num), 0)
    expected = bits_of(made)
    made.restart()
    for i in range(2):
        made.leaf_sums.add(
            [*leaves_of(7, num)[i].tensors, buffers(7, i)], leaves_of(7, num)[i].scalars
        )
    reduce(made, Range(0, num), leaves_of(0, num), 0)
    assert bits_of(made) == expected
