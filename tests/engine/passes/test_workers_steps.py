"""Workers' own steps, beside plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config import LocalConfig, OptimizerConfig, TrainConfig
from lockstep.engine.passes.local_steps import LocalSteps, parts_of
from lockstep.engine.task import Loss, Task
from lockstep.errors import TaskError

STEPS = 3


class Fit(Task):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def dataset(self, split: str) -> None:
        return None

    def loss(self, model: Any, batch: Any) -> Loss:
        inputs, targets = batch
        off = (model(inputs) - targets).square().sum()
        return Loss(off, len(inputs), {"off": (off.detach(), len(inputs))})


def config_of(**keys: Any) -> TrainConfig:
    about = {"lr": 0.05, "local": LocalConfig(steps=STEPS)} | keys
    return TrainConfig(batch_size=64, num_microbatches=2, **about)


def batch_of(seed: int, num: int = 7) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.prod(dim=1, keepdim=True)


def made(task: Task | None = None, **keys: Any) -> tuple[LocalSteps, nn.Module, Task]:
    task = task or Fit()
    torch.manual_seed(0)
    model = task.build_model()
    return LocalSteps(task, model, config_of(**keys)), model, task


def come(local: LocalSteps, model: nn.Module, task: Task, batch: Any, state: Any) -> Any:
    loss, after = local.run(task.loss, batch, state)
    model.zero_grad()
    loss.sum.backward()  # type: ignore[no-untyped-call]
    return loss, [p.grad for p in model.parameters()], after


OPTIMIZERS = {
    "adamw": OptimizerConfig(weight_decay=0.1),
    "sgd": OptimizerConfig(name="sgd", momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_worker_steps_as_a_plain_loop_does(name: str, clip_norm: float | None) -> None:
    """Over three exchanges, after each of which it begins at the common parameters again."""
    local, model, task = made(optimizer=OPTIMIZERS[name], clip_norm=clip_norm)
    torch.manual_seed(0)
    plain = task.build_model()
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    else:
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1)
    start = [p.detach().clone() for p in plain.parameters()]
    state = None
    for exchange in range(3):
        inputs, targets = batch_of(exchange)
        local.optimizer.param_groups[0]["lr"] = 0.05 * 0.5**exchange
        loss, found, state = come(local, model, task, (inputs, targets), state)
        optimizer.param_groups[0]["lr"] = 0.05 * 0.5**exchange
        with torch.no_grad():
            for p, first in zip(plain.parameters(), start, strict=True):
                p.copy_(first)
        total = 0.0
        for part in (slice(0, 3), slice(3, 5), slice(5, 7)):
            optimizer.zero_grad()
            off = (plain(inputs[part]) - targets[part]).square().sum()
            (off / len(inputs[part])).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
            optimizer.step()
            total += float(off.detach())
        assert float(loss.sum.detach()) == pytest.approx(total, rel=1e-6)
        assert (loss.weight, loss.metrics) == (7, {"off": (pytest.approx(total, rel=1e-6), 7)})
        for p, first, gradient in zip(plain.parameters(), start, found, strict=True):
            assert gradient.allclose(7 * (first - p.detach()), atol=1e-5)


def copied(state: Any) -> Any:
    """As a carry keeps it."""
    return {i: {k: v.clone() for k, v in of.items()} for i, of in state.items()}


def test_workers_know_nothing_of_one_another() -> None:
    """In turn, as on one rank, or one after the other, as on two: the same state of each."""
    local, model, task = made()

    def step(worker: int, exchange: int, state: Any) -> Any:
        return copied(come(local, model, task, batch_of(10 * worker + exchange), state)[2])

    in_turn: list[Any] = [None, None]
    for exchange in range(2):
        in_turn = [step(worker, exchange, state) for worker, state in enumerate(in_turn)]
    for worker, expected in enumerate(in_turn):
        alone = step(worker, 1, step(worker, 0, None))
        assert alone.keys() == expected.keys() == {"0", "1", "2", "3"}
        assert all(alone[i][k].equal(v) for i, of in expected.items() for k, v in of.items())


def test_the_model_keeps_its_parameters() -> None:
    local, model, task = made()
    before = [(p, p._version, p.detach().clone()) for p in model.parameters()]
    come(local, model, task, batch_of(0), None)
    for parameter, (same, version, value) in zip(model.parameters(), before, strict=True):
        assert parameter is same
        assert parameter._version == version
        assert parameter.equal(value)


def test_the_outer_optimizer_has_the_groups_of_the_inner_one() -> None:
    class Own(Fit):
        def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
            last = {"params": [*model[2].parameters()], "lr": 0.1}
            return torch.optim.SGD([last, {"params": [model[0].weight]}], lr=0.01)

    local, model, task = made(Own())
    groups = local.outer_optimizer().param_groups
    assert [g["params"] for g in groups] == [[*model[2].parameters()], [model[0].weight]]  # type: ignore[index]
    assert [(g["lr"], g["momentum"], g["nesterov"]) for g in groups] == [(0.7, 0.9, True)] * 2
    _, found, _ = come(local, model, task, batch_of(0), None)
    assert [gradient is None for gradient in found] == [False, True, False, False]
    still = made(local=LocalConfig(steps=2, outer_momentum=0.0))[0].outer_optimizer()
    assert not still.param_groups[0]["nesterov"]


class Counting(torch.optim.SGD):
    """Keeps a number of its own, as averaging optimizers do."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step(closure)


class Grouping(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        super().step(closure)


@pytest.mark.parametrize("kind", [Counting, Grouping])
def test_an_optimizer_with_state_beside_is_refused(kind: type[torch.optim.SGD]) -> None:
    class Own(Fit):
        def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
            return kind(model.parameters(), lr=0.1)

    local, _, task = made(Own())
    with pytest.raises(TaskError, match=r"build_optimizer: optimizer.* changes with a step"):
        local.run(task.loss, batch_of(0), None)


def test_several_optimizers_are_refused() -> None:
    class Own(Fit):
        def build_optimizer(self, model: Any) -> Any:
            return {"a": torch.optim.SGD(model.parameters(), lr=0.1)}

    with pytest.raises(TaskError, match="returns several optimizers, and a worker has one"):
        made(Own())


def test_a_loss_that_reads_parameters_elsewhere_is_refused() -> None:
    class Keeps(Fit):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            self.kept = next(model.parameters())
            return model

        def loss(self, model: Any, batch: Any) -> Loss:
            plain = super().loss(model, batch)
            return Loss(plain.sum + self.kept.square().sum(), plain.weight)

    local, _, task = made(Keeps())
    with pytest.raises(TaskError, match=r"Task\.loss: reads parameter 0\.weight from elsewhere"):
        local.run(task.loss, batch_of(0), None)


def test_recurrent_layers_and_shared_parameters_step_too() -> None:
    class Recurrent(Fit):
        def build_model(self) -> nn.Module:
            model = nn.Module()
            model.cell, model.last = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 4)
            model.same = model.last
            model.tied = nn.Linear(4, 4, bias=False)
            model.tied.weight = model.last.weight
            return model

        def loss(self, model: Any, batch: Any) -> Loss:
            inputs, targets = batch
            last = model.same(model.tied(model.cell(inputs[:, :, None])[0][:, -1]))
            return Loss((last[:, :1] - targets).square().sum(), len(inputs))

    local, model, task = made(Recurrent())
    assert model.tied.weight is model.same.weight is local._parameters[4]
    _, found, state = come(local, model, task, batch_of(0), None)
    assert len(found) == len(state) == 6
    assert all(gradient.any() for gradient in found)
    assert model.tied.weight is model.same.weight is local._parameters[4]
    (again,) = torch.autograd.grad(task.loss(model, batch_of(0)).sum, [model.cell.weight_hh_l0])
    assert again.any()


def test_batches_are_cut_along_their_samples() -> None:
    batch = {"a": torch.arange(5), "b": [torch.arange(10.0).view(5, 2)]}
    found = parts_of(batch, 3)
    assert [part["a"].tolist() for part in found] == [[0, 1], [2, 3], [4]]
    assert [part["b"][0].shape for part in found] == [(2, 2), (2, 2), (1, 2)]
    assert [len(part) for part in parts_of(torch.zeros(2, 3), 4)] == [1, 1]


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(3), ["a", "b", "c"]],
        (torch.zeros(3), torch.zeros(4)),
        torch.zeros(()),
        {"x": torch.zeros(3), "scale": 2.0},
        [],
    ],
)
def test_what_has_no_samples_to_cut_along_is_refused(batch: Any) -> None:
    with pytest.raises(TaskError, match="must be made of tensors whose first dimension is"):
        parts_of(batch, 2)
