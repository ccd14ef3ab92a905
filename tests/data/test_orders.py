"""Orders of epochs: pure functions of seed and epoch, and refused when they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.sampler import ElasticSampler, GivenOrder, order_generator, weighted
from lockstep.errors import ConfigError, TaskError


def drawn(weights: Any, epoch: int = 0, seed: int = 3) -> Any:
    order = weighted(weights, len(weights))
    return order(epoch, order_generator(seed, epoch))


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    weights = [0.0, 1.0, 0.0, 3.0, 0.0] * 4000
    counts = np.bincount(drawn(weights) % 5, minlength=5)
    assert counts.sum() == 20_000
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert counts[3] / counts[1] == pytest.approx(3, rel=0.1)


def test_draws_depend_on_seed_and_epoch_alone() -> None:
    weights = torch.rand(500, generator=torch.Generator().manual_seed(1))
    first = drawn(weights)
    drawn(weights, epoch=5)
    assert drawn(weights).tolist() == first.tolist()
    assert drawn(weights.tolist()).tolist() == first.tolist()
    assert drawn(weights, epoch=1).tolist() != first.tolist()
    assert drawn(weights, seed=4).tolist() != first.tolist()


def test_draws_come_in_no_order() -> None:
    assert (np.diff(drawn(np.ones(1000))) < 0).mean() == pytest.approx(0.5, abs=0.1)


def test_a_point_at_the_very_end_is_the_last_sample_that_has_weight() -> None:
    class AtTheEnd:
        def random(self, size: int) -> Any:
            return np.ones(size)

        def permutation(self, values: Any) -> Any:
            return values

    assert weighted([1, 2, 0], 3)(0, AtTheEnd()).tolist() == [1, 1, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2], r"one number for each of the 3 samples .* shape \(2,\)"),
        ([[1], [2], [3]], r"shape \(3, 1\)"),
        ([1, -2, -3], r"weight of sample 1 is -2\.0 \(and 1 more\)"),
        ([1, 2, float("nan")], "weight of sample 2 is nan"),
        ([1, 2, float("inf")], "weight of sample 2 is inf"),
        ([0, 0, 0], r"add up to 0\.0"),
        ([1e308, 1e308, 1e308], "add up to inf"),
        (["a", "b", "c"], "must return numbers"),
        (None, "must return one number|must return numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_bad_weights_are_named(weights: Any, message: str) -> None:
    with pytest.raises(TaskError, match=f"^Task.sample_weights: .*{message}"):
        weighted(weights, 3)


def test_an_epoch_of_the_tasks_own_may_be_of_any_length() -> None:
    order = GivenOrder(lambda epoch, generator: [9, epoch, 9], 10, seed=0)
    assert order.length == 3
    sampler = ElasticSampler(order.length, 2, 2, seed=0, order=order)
    steps = [[*sampler.indices(step, 0), *sampler.indices(step, 1)] for step in range(4)]
    assert steps == [[9, 0], [9], [9, 1], [9]]


@pytest.mark.parametrize(
    "draw",
    [
        lambda epoch, generator: generator.choice(10, 4),
        lambda epoch, generator: torch.randint(10, (4,)),
        lambda epoch, generator: np.random.permutation(10),
    ],
)
def test_what_an_order_draws_depends_on_the_epoch_alone(draw: Any) -> None:
    one, other = GivenOrder(draw, 10, seed=5), GivenOrder(draw, 10, seed=5)
    assert one.digest == other.digest
    assert GivenOrder(draw, 10, seed=6).digest != one.digest
    other(7, order_generator(5, 7))
    assert one(3, order_generator(5, 3)).tolist() == other(3, order_generator(5, 3)).tolist()


calls: list[int] = []


def counted(epoch: int, generator: Any) -> list[int]:
    calls.append(epoch)
    return [len(calls) % 10]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (counted, "gave another order when that of epoch 0 was asked for again"),
        (lambda e, g: [0.5], "must be a sequence of whole numbers, is float64"),
        (lambda e, g: [[1]], r"whole numbers, is int64 of shape \(1, 1\)"),
        (lambda e, g: [3, 10], "epoch 0: index 10 at position 1 is no sample .* has 10"),
        (lambda e, g: [-1], "index -1 at position 0"),
        (lambda e, g: [1] * (e + 1), "epoch 1: has 2 indices, epoch 0 has 1"),
        (lambda e, g: None if e else [1], "epoch 1: must be a sequence of whole numbers"),
        (lambda e, g: [], "epoch 0: must be a sequence of whole numbers"),
    ],
)
def test_bad_orders_are_named(make: Any, message: str) -> None:
    with pytest.raises(TaskError, match=f"^Task.epoch_indices: .*{message}"):
        GivenOrder(make, 10, seed=0)


def test_an_order_that_changes_its_length_later_is_named_then() -> None:
    order = GivenOrder(lambda epoch, generator: range(10 - (epoch == 2)), 10, seed=0)
    sampler = ElasticSampler(10, 5, 1, seed=0, order=order)
    sampler.indices(3, 0)
    with pytest.raises(TaskError, match="epoch 2: has 9 indices, epoch 0 has 10"):
        sampler.indices(4, 0)


def test_the_last_smaller_batch_can_be_left_out() -> None:
    sampler = ElasticSampler(23, 5, 2, seed=0, drop_last=True)
    whole = ElasticSampler(23, 5, 2, seed=0)
    assert sampler.steps_per_epoch == 4
    assert [sampler.step_size(step) for step in range(9)] == [5] * 9
    assert [sampler.epoch(step) for step in (3, 4, 8)] == [0, 1, 2]
    for step in range(4):
        assert torch.equal(sampler.indices(step, 1), whole.indices(step, 1))
    assert torch.equal(sampler.indices(4, 0), whole.indices(5, 0))
    assert ElasticSampler(20, 5, 2, seed=0, drop_last=True).steps_per_epoch == 4


def test_a_dataset_smaller_than_a_batch_cannot_drop_it() -> None:
    with pytest.raises(ConfigError, match=r"data\.drop_last=True: .* 3 samples and batch_size=256"):
        ElasticSampler(3, 256, 8, seed=0, drop_last=True)
