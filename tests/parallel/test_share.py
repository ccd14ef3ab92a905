"""Dealing out items by speed."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import TrainConfig
from lockstep.data.loader import BatchCopies
from lockstep.engine.run.microbatches import Balancer, DeviceBatches, Microbatches, better
from lockstep.engine.run.progress import Progress
from lockstep.engine.step.sums import StepResult
from lockstep.engine.timing import Times
from lockstep.errors import DataError
from lockstep.parallel.layout import Range, share, split
from lockstep.parallel.mesh import Mesh

SPEEDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)


@given(st.integers(0, 64), SPEEDS)
def test_ranges_cover_all_items_in_order(total, speeds):
    ranges = share(total, speeds)
    assert len(ranges) == len(speeds)
    assert [i for r in ranges for i in range(*r)] == list(range(total))


@given(st.integers(1, 64), st.integers(1, 8))
def test_equal_speeds_are_an_even_split(total, parts):
    assert share(total, [2.0] * parts) == split(total, parts)


@given(st.integers(1, 40), SPEEDS, st.data())
def test_nobody_is_done_sooner_by_moving_one_item(total, speeds, data):
    counts = [len(r) for r in share(total, speeds)]
    longest = max(c / s for c, s in zip(counts, speeds, strict=True))
    giver = data.draw(st.integers(0, len(speeds) - 1))
    taker = data.draw(st.integers(0, len(speeds) - 1))
    if giver != taker and counts[giver]:
        counts[giver] -= 1
        counts[taker] += 1
        assert max(c / s for c, s in zip(counts, speeds, strict=True)) >= longest * (1 - 1e-12)


def test_a_slow_rank_gets_fewer():
    found = better([Range(0, 4), Range(4, 8)], {0: 0.25, 1: 0.75})
    assert found.ranges == [Range(0, 6), Range(6, 8)]
    assert found.slowest == 1
    assert found.slowdown == 3.0


def test_small_differences_change_nothing():
    assert better([Range(0, 4), Range(4, 8)], {0: 1.0, 1: 1.1}) is None


def test_spares_come_in_for_a_slow_rank():
    found = better([Range(0, 4), Range(4, 8), Range(8, 8)], {0: 1.0, 1: 8.0})
    assert len(found.ranges[2]) > 0


def test_a_rank_that_lost_all_its_work_is_not_given_it_back():
    balancer = Balancer(1, [Range(0, 1), Range(1, 2)])
    times = [[Times(1.0 * s), Times(9.0 * s)] for s in (0, 1)]
    assert balancer.propose(lambda: times[0]) is None
    found = balancer.propose(lambda: times[1])
    assert found.ranges == [Range(0, 2), Range(2, 2)]
    balancer.use(found.ranges)
    assert balancer.propose(lambda: [Times(1.0), Times(9.0)]) is None
    assert balancer.propose(lambda: [Times(3.0), Times(9.0)]) is None


def test_proposals_come_every_so_many_steps():
    balancer = Balancer(3, [Range(0, 4), Range(4, 8)])
    found = [balancer.propose(lambda s=s: [Times(s), Times(3.0 * s)]) for s in range(8)]
    assert [f is not None for f in found] == [False, False, False, True, False, False, True, False]
    assert Balancer(0, [Range(0, 4), Range(4, 8)]).propose(lambda: 1 / 0) is None


def test_replicas_are_balanced_and_what_is_said_is_of_ranks():
    """Of five ranks, two replicas of two and a spare; the second replica is slow."""
    mesh = Mesh.of(8, 5, tp=2)
    step = SimpleNamespace(carries=None, assign=lambda ranges, state: assigned.append(ranges))
    copies = BatchCopies(torch.device("cpu"))
    loader = SimpleNamespace(stream=lambda *_: (_ for _ in ()), has_places=False, copies=copies)
    parts = SimpleNamespace(
        placement=SimpleNamespace(mesh=mesh),
        train_step=step,
        loader=loader,
        total_steps=9,
        task_state=SimpleNamespace(may_change_data=False),
    )
    runtime = SimpleNamespace(transport=SimpleNamespace(rank=0), is_on_cpu=True)
    assigned = []
    shared = Microbatches(TrainConfig(balance_every=1), runtime, parts, Progress())

    def result(*seconds):
        return StepResult([], 0.0, 0.0, "", [Times(s) for s in seconds], False)

    assert shared.balance(0, result(0, 0, 0, 0, 0)) is None
    found = shared.balance(1, result(1.0, 1.0, 3.0, 3.0, 0.0))
    assert found.slowest == 2
    assert [len(r) for r in found.ranges] == [6, 6, 2, 2, 0]
    assert assigned == [found.ranges]


def test_a_batch_that_was_begun_comes_in_its_turn_and_so_does_its_error():
    def fetched():
        yield 0, 0, "first"
        yield 1, 0, "second"
        raise DataError("the third is damaged")

    batches = DeviceBatches(fetched(), BatchCopies(torch.device("cpu")))
    found = []
    for _ in range(2):
        found.append(next(batches))
        batches.begin()
    assert found == [(0, 0, "first"), (1, 0, "second")]
    with pytest.raises(DataError, match="the third"):
        next(batches)
    batches.begin()  # there is no more
    with pytest.raises(StopIteration):
        next(batches)


def test_a_batch_that_was_begun_is_forgotten_with_its_stream():
    batches = DeviceBatches(((s, 0, s) for s in range(3)), BatchCopies(torch.device("cpu")))
    batches.begin()
    batches.close()
    assert list(batches) == []
