from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.passes.buffers import ForwardState, changed_by
from lockstep.engine.passes.compute import copied
from lockstep.errors import TaskError

WEIGHTS = [3.0, 1.0, 4.0, 2.0]


class Reassigning(nn.Module):
    """Replaces its buffers instead of changing them in place."""

    def __init__(self, detach: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))
        self.detach = detach

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        mean = y.mean(0)
        self.average = 0.5 * self.average + 0.5 * (mean.detach() if self.detach else mean)
        self.count = self.count + 1
        return y + self.average.detach()


class Masked(nn.Module):
    """Holds constants next to a running value."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.full((4, 4), -torch.inf).triu(1)
        self.register_buffer("mask", mask)
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("flags", torch.tensor([True, False]), persistent=False)
        self.register_buffer("absent", None)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum(0)[:2].double()
        return torch.softmax(x @ x.t() + self.mask, 0) * self.weight


class Histogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(5, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.counts += 1
        return x


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4))


def batch(seed: int, size: int = 6) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def changed(model: nn.Module, x: Tensor) -> list[str]:
    return changed_by(model, lambda: model(x))


def merged_step(
    model: nn.Module, state: ForwardState, batches: list[Tensor], weights: list[float]
) -> list[list[int]]:
    """What a training step does with its microbatches; returns the counters of each."""
    sums = [torch.zeros_like(t) for t in state.flat.tensors]
    counters = []
    for x, weight in zip(batches, weights, strict=True):
        model(x)
        deltas, counted = state.collect()
        for total, delta in zip(sums, deltas, strict=True):
            total += delta.detach() * weight
        counters.append([int(c) for c in counted])
        state.restore()
    highest = [max(column) for column in zip(*counters, strict=True)]
    state.commit(sums, sum(weights), highest)
    return counters


def test_batch_norms_statistics_and_nothing_else_are_found_and_put_back() -> None:
    model = network()
    before = buffers(model)
    parameters = [p.clone() for p in model.parameters()]
    names = ["running_mean", "running_var", "num_batches_tracked"]
    assert changed(model, batch(0)) == [f"{i}.{name}" for i in (1, 3) for name in names]
    assert same(buffers(model), before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parameters, strict=True))


def test_a_forward_pass_without_batch_statistics_changes_nothing() -> None:
    assert changed(network().eval(), batch(0)) == []


def test_a_change_that_leaves_the_value_as_it_was_is_found() -> None:
    model = nn.BatchNorm1d(3, momentum=0.0)
    assert "num_batches_tracked" in changed(model, batch(0))
    histogram = Histogram()
    assert changed_by(histogram, lambda: histogram.counts.zero_()) == ["counts"]


@pytest.mark.parametrize("detach", [True, False])
def test_reassigned_buffers_are_found_and_put_back(detach: bool) -> None:
    model = Reassigning(detach)
    average, count = model.average, model.count
    assert changed(model, batch(0)) == ["average", "count"]
    assert model.average is average
    assert model.count is count
    assert average.tolist() == [0, 0, 0]
    assert count.item() == 0


def test_constant_buffers_are_left_alone() -> None:
    model = Masked()
    before = buffers(model)
    assert changed_by(model, lambda: model(batch(0, 4))) == ["seen"]
    state = ForwardState(model, ["seen"])
    merged_step(model, state, [batch(i, 4) for i in range(4)], WEIGHTS)
    after = buffers(model)
    assert not torch.equal(after.pop("seen"), before.pop("seen"))
    assert same(after, before)


def test_merged_statistics_are_the_weighted_mean_of_the_microbatches() -> None:
    model = network()
    state = ForwardState(model, changed(model, batch(0)))
    batches = [batch(i, size=int(w) + 1) for i, w in enumerate(WEIGHTS, start=1)]
    before = buffers(model)
    alone: list[dict[str, Tensor]] = []
    for x in batches:
        model(x)
        alone.append(buffers(model))
        state.restore()
        assert same(buffers(model), before)
    merged_step(model, state, batches, WEIGHTS)
    for name, value in buffers(model).items():
        if name.endswith("num_batches_tracked"):
            assert value.item() == 1
            continue
        mean = sum(w * one[name] for w, one in zip(WEIGHTS, alone, strict=True)) / sum(WEIGHTS)
        torch.testing.assert_close(value, mean)
        assert not torch.allclose(value, alone[0][name])


def test_statistics_go_on_from_the_committed_values() -> None:
    model, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    state = ForwardState(model, changed(model, batch(0)))
    for step in range(5):
        merged_step(model, state, [batch(step)], [6.0])
        plain(batch(step))
    assert model.num_batches_tracked.item() == 5
    torch.testing.assert_close(model.running_mean, plain.running_mean)
    torch.testing.assert_close(model.running_var, plain.running_var)


def test_cumulative_batch_norm_averages_steps_not_microbatches() -> None:
    model = nn.BatchNorm1d(3, momentum=None)
    state = ForwardState(model, changed(model, batch(0)))
    for step in range(2):
        merged_step(model, state, [batch(2 * step), batch(2 * step + 1)], [6.0, 6.0])
    assert model.num_batches_tracked.item() == 2
    mean = torch.stack([batch(i).mean(0) for i in range(4)]).mean(0)
    torch.testing.assert_close(model.running_mean, mean)


@pytest.mark.parametrize("detach", [True, False])
def test_reassigned_buffers_are_merged_into_the_tensors_they_were(detach: bool) -> None:
    model = Reassigning(detach)
    state = ForwardState(model, changed(model, batch(0)))
    average = model.average
    counters = merged_step(model, state, [batch(1), batch(2)], [1.0, 3.0])
    assert counters == [[1], [1]]
    assert model.average is average
    assert not model.average.requires_grad
    assert model.count.item() == 1
    means = [model.linear(batch(i)).mean(0).detach() for i in (1, 2)]
    torch.testing.assert_close(model.average, 0.5 * (1 * means[0] + 3 * means[1]) / 4)


def test_collected_changes_carry_no_graph() -> None:
    model = Reassigning(detach=False)
    state = ForwardState(model, changed(model, batch(0)))
    model(batch(1))
    deltas, _ = state.collect()
    assert not any(delta.requires_grad for delta in deltas)


def test_counters_advance_as_in_one_microbatch() -> None:
    model = network()
    state = ForwardState(model, changed(model, batch(0)))
    assert state.num_counters == 2
    for step in range(3):
        counters = merged_step(model, state, [batch(i) for i in range(4)], WEIGHTS)
        assert counters == [[step + 1, step + 1]] * 4


def test_mark_takes_loaded_values_as_committed() -> None:
    model = nn.BatchNorm1d(3)
    state = ForwardState(model, changed(model, batch(0)))
    model.running_mean.fill_(5.0)
    model.num_batches_tracked.fill_(9)
    state.mark()
    model(batch(1))
    state.restore()
    assert model.running_mean.tolist() == [5.0] * 3
    assert model.num_batches_tracked.item() == 9


def test_a_model_without_such_buffers_needs_nothing() -> None:
    model = nn.Linear(3, 2)
    state = ForwardState(model, [])
    assert state.collect() == ([], [])
    state.restore()
    state.commit([], 1.0, [])
    assert (state.num_counters, state.flat.segments) == (0, [])


def test_buffers_keep_their_names_in_the_state_dict() -> None:
    model = network()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ForwardState(model, changed(model, batch(0)))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_integer_arrays_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Histogram())
    names = changed(model, batch(0))
    assert names == ["1.counts"]
    with pytest.raises(TaskError, match=r"buffer 1\.counts: .*torch\.int64 array of shape \(5,\)"):
        ForwardState(model, names)


def test_half_precision_running_values_are_refused_by_name() -> None:
    model = nn.Module()
    model.register_buffer("running", torch.zeros(2, dtype=torch.bfloat16))
    names = changed_by(model, lambda: model.running.add_(1))
    with pytest.raises(TaskError, match=r"buffer running: dtype is torch\.bfloat16"):
        ForwardState(model, names)


def test_a_boolean_flag_counts_as_a_counter() -> None:
    model = nn.Module()
    model.register_buffer("initialized", torch.tensor(False))
    names = changed_by(model, lambda: model.initialized.fill_(True))
    state = ForwardState(model, names)
    model.initialized.fill_(True)
    counted = copied(state.collect()[1])
    state.restore()
    assert not model.initialized
    state.commit([], 1.0, [int(c) for c in counted()])
    assert bool(model.initialized)


def test_a_buffer_of_two_modules_is_advanced_once() -> None:
    class Adding(nn.Module):
        def __init__(self, total: Tensor) -> None:
            super().__init__()
            self.register_buffer("total", total)

    shared = torch.zeros(2)
    model = nn.Sequential(Adding(shared), Adding(shared))

    def forward() -> None:
        model[0].total += 1.0

    state = ForwardState(model, changed_by(model, forward))
    forward()
    deltas, _ = state.collect()
    state.restore()
    state.commit([2.0 * d for d in deltas], 2.0, [])
    assert model[0].total.tolist() == model[1].total.tolist() == [1.0, 1.0]
