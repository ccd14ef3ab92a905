from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.sampler import BatchLayout, ElasticSampler
from lockstep.errors import DataError


def batch(sampler: ElasticSampler, step: int, num_microbatches: int) -> list[int]:
    return [i for m in range(num_microbatches) for i in sampler.indices(step, m).tolist()]


def epoch(sampler: ElasticSampler, number: int, num_microbatches: int) -> list[int]:
    first = number * sampler.steps_per_epoch
    steps = range(first, first + sampler.steps_per_epoch)
    return [i for step in steps for i in batch(sampler, step, num_microbatches)]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Numbers of samples, of samples in a batch and of microbatches."""
    num_microbatches = draw(st.integers(1, 20))
    return draw(st.integers(1, 300)), draw(st.integers(num_microbatches, 60)), num_microbatches


@given(shape=shapes(), seed=st.integers(0, 2**63 - 1), number=st.integers(0, 5))
@settings(deadline=None)
def test_every_sample_comes_exactly_once_an_epoch(
    shape: tuple[int, int, int], seed: int, number: int
) -> None:
    num_samples, _, num_microbatches = shape
    sampler = ElasticSampler(*shape, seed=seed)
    assert sorted(epoch(sampler, number, num_microbatches)) == list(range(num_samples))


@given(shape=shapes(), number=st.integers(0, 3))
@settings(deadline=None)
def test_all_batches_are_full_but_the_last_of_an_epoch(
    shape: tuple[int, int, int], number: int
) -> None:
    num_samples, batch_size, num_microbatches = shape
    sampler = ElasticSampler(*shape, seed=0)
    first = number * sampler.steps_per_epoch
    sizes = [sampler.step_size(first + i) for i in range(sampler.steps_per_epoch)]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= batch_size
    assert sum(sizes) == num_samples
    for i, size in enumerate(sizes):
        assert len(batch(sampler, first + i, num_microbatches)) == size


@given(shape=shapes(), step=st.integers(0, 100))
@settings(deadline=None)
def test_microbatches_of_a_batch_differ_by_one_sample_at_most(
    shape: tuple[int, int, int], step: int
) -> None:
    sampler = ElasticSampler(*shape, seed=1)
    sizes = [len(sampler.indices(step, m)) for m in range(shape[2])]
    assert sizes == [sampler.microbatch_size(step, m) for m in range(shape[2])]
    assert sum(sizes) == sampler.step_size(step)
    assert max(sizes) - min(sizes) <= 1


@given(
    shape=shapes(),
    batch_sizes=st.lists(st.integers(20, 60), min_size=2, max_size=2, unique=True),
    seed=st.integers(0, 2**63 - 1),
)
@settings(deadline=None)
def test_order_of_samples_depends_on_neither_batch_size_nor_microbatches(
    shape: tuple[int, int, int], batch_sizes: list[int], seed: int
) -> None:
    num_samples, _, num_microbatches = shape
    one, other = (ElasticSampler(num_samples, b, num_microbatches, seed) for b in batch_sizes)
    single = ElasticSampler(num_samples, batch_sizes[0], 1, seed)
    assert epoch(one, 1, num_microbatches) == epoch(other, 1, num_microbatches)
    assert epoch(one, 1, num_microbatches) == epoch(single, 1, 1)


@given(shape=shapes(), seed=st.integers(0, 2**63 - 1), order=st.randoms(use_true_random=False))
@settings(deadline=None)
def test_any_order_of_access_gives_the_same_samples(
    shape: tuple[int, int, int], seed: int, order: random.Random
) -> None:
    sampler = ElasticSampler(*shape, seed=seed)
    wanted = [(s, m) for s in range(3 * sampler.steps_per_epoch)[:30] for m in range(shape[2])]
    in_order = {key: sampler.indices(*key).tolist() for key in wanted}
    order.shuffle(wanted)
    again = ElasticSampler(*shape, seed=seed)
    for key in wanted[:40]:
        assert again.indices(*key).tolist() == in_order[key]
        assert ElasticSampler(*shape, seed=seed).indices(*key).tolist() == in_order[key]


def test_samples_of_earlier_microbatches_stay_valid_in_later_epochs() -> None:
    sampler = ElasticSampler(50, 10, 2, seed=0)
    held = sampler.indices(0, 0)
    before = held.tolist()
    sampler.indices(5, 0)
    assert held.tolist() == before


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    orders = {
        tuple(epoch(ElasticSampler(100, 10, 2, seed), number, 2))
        for seed in (0, 1, 2**63 - 1)
        for number in range(4)
    }
    assert len(orders) == 12
    assert tuple(range(100)) not in orders


def test_without_shuffling_samples_come_in_order_in_every_epoch() -> None:
    sampler = ElasticSampler(23, 5, 2, seed=3, shuffle=False)
    for number in (0, 3, 1):
        assert epoch(sampler, number, 2) == list(range(23))


def test_steps_belong_to_epochs() -> None:
    sampler = ElasticSampler(23, 5, 2, seed=0)
    assert sampler.steps_per_epoch == 5
    assert [sampler.epoch(step) for step in (0, 4, 5, 9, 10)] == [0, 0, 1, 1, 2]
    assert [sampler.step_size(step) for step in (0, 3, 4, 5, 9)] == [5, 5, 3, 5, 3]


def test_a_last_batch_of_fewer_samples_than_microbatches_leaves_some_empty() -> None:
    sampler = ElasticSampler(10, 8, 4, seed=0)
    assert [len(sampler.indices(1, m)) for m in range(4)] == [1, 1, 0, 0]
    assert [sampler.microbatch_size(1, m) for m in range(4)] == [1, 1, 0, 0]


def test_a_dataset_smaller_than_a_batch_makes_one_step_an_epoch() -> None:
    sampler = ElasticSampler(3, 256, 8, seed=0)
    assert sampler.steps_per_epoch == 1
    assert sorted(batch(sampler, 7, 8)) == [0, 1, 2]


@pytest.mark.parametrize("num_samples", [0, -1])
def test_an_empty_dataset_is_refused(num_samples: int) -> None:
    with pytest.raises(DataError, match=r"dataset\('train'\): is empty"):
        ElasticSampler(num_samples, 8, 2, seed=0)


@given(
    num_samples=st.none() | st.integers(1, 50),
    first=st.integers(0, 200),
    length=st.integers(0, 120),
    every=st.integers(0, 60),
)
def test_what_is_due_in_a_range_is_what_is_due_after_each_of_its_counts(
    num_samples, first, length, every
):
    layout = BatchLayout(num_samples, batch_size=4, num_microbatches=1)
    counts = range(first, first + length)
    due = [count for count in counts if layout.is_due(count, every)]
    assert [*layout.due_among(counts, every)] == due
