"""The copies of parameters that workers step, and what their optimizers begin with."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.passes.test_workers_steps import Fit, batch_of, come, copied, made
from torch import Tensor, nn

from lockstep.config import LocalConfig
from lockstep.engine.task import Loss
from lockstep.errors import TaskError


class Eager(torch.optim.SGD):
    """Makes its state when it is built, as Adagrad does in some versions of torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.full_like(parameter, 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                total = self.state[parameter]["sum"].add_(parameter.grad.square())
                parameter -= self.param_groups[0]["lr"] * parameter.grad / total.sqrt()


class Accumulating(Fit):
    kind: Any = Eager

    def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        parameters = model.parameters()
        return self.kind(parameters)


@pytest.mark.parametrize(
    "kind", [Eager, partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)]
)
def test_each_worker_has_the_state_that_its_optimizer_begins_with(kind: Any) -> None:
    own = Accumulating()
    own.kind = kind
    local, model, task = made(own, local=LocalConfig(steps=2))
    torch.manual_seed(0)
    plain = task.build_model()
    optimizer = task.build_optimizer(plain)
    assert isinstance(optimizer, torch.optim.Optimizer)
    start = [p.detach().clone() for p in plain.parameters()]
    states: list[Any] = [None]
    for exchange in range(2):
        inputs, targets = batch_of(exchange)
        _, found, after = come(
            local, model, task, (inputs, targets), states[-1] and copied(states[-1])
        )
        states.append(copied(after))
        with torch.no_grad():
            for p, first in zip(plain.parameters(), start, strict=True):
                p.copy_(first)
        for part in (slice(0, 4), slice(4, 7)):
            optimizer.zero_grad()
            off = (plain(inputs[part]) - targets[part]).square().sum()
            (off / len(inputs[part])).backward()
            optimizer.step()
        for p, first, gradient in zip(plain.parameters(), start, found, strict=True):
            assert gradient.allclose(7 * (first - p.detach()), atol=1e-5)
    another = come(local, model, task, batch_of(0), None)[2]
    assert all(another[i][k].equal(v) for i, of in states[1].items() for k, v in of.items())


class Marked(Fit):
    """Groups parameters by marks on them, as many training scripts do."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[0].bias.stays = True  # type: ignore[index]
        return model

    def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        groups: dict[bool, list[Tensor]] = {False: [], True: []}
        for parameter in model.parameters():
            groups[getattr(parameter, "stays", False)].append(parameter)
        still = {"params": groups[True], "lr": 0.0}
        return torch.optim.SGD([{"params": groups[False]}, still], lr=0.1)


def test_copies_have_the_marks_of_parameters() -> None:
    local, model, task = made(Marked(), local=LocalConfig(steps=2, outer_momentum=0.0))
    _, found, _ = come(local, model, task, batch_of(0), None)
    assert [bool(gradient.any()) for gradient in found] == [True, False, True, True]
    outer = local.outer_optimizer()
    before = [p.detach().clone() for p in model.parameters()]
    outer.step()
    moved = [not p.equal(old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [True, False, True, True]


def hooked(parameter: Any) -> None:
    parameter.register_hook(lambda gradient: gradient * 0)


def hooked_later(parameter: Any) -> None:
    parameter.register_post_accumulate_grad_hook(lambda p: None)


@pytest.mark.parametrize("register", [hooked, hooked_later])
@pytest.mark.parametrize("where", ["build_model", "build_optimizer"])
def test_hooks_that_gradients_of_workers_pass_by_are_refused(register: Any, where: str) -> None:
    class Hooked(Fit):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            if where == "build_model":
                register(model[2].bias)  # type: ignore[index]
            return model

        def build_optimizer(self, model: Any) -> None:
            if where == "build_optimizer":
                register(model[2].bias)

    with pytest.raises(TaskError, match=r"local\.steps=3: parameter 2\.bias has a hook on its"):
        made(Hooked())


class OwnKind(nn.Parameter):
    """A user's kind of parameter."""


def test_own_kinds_of_parameters_are_refused() -> None:
    class Odd(Fit):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model[0].weight = OwnKind(model[0].weight.detach())  # type: ignore[index]
            return model

    with pytest.raises(TaskError, match=r"parameter 0\.weight is a OwnKind, and workers step"):
        made(Odd())


def test_numbers_of_parameters_stay_where_their_optimizer_has_them() -> None:
    """Moments of a parameter without dimensions are beside it; steps are counted on the CPU."""

    class Scalar(Fit):
        def build_model(self) -> nn.Module:
            model = nn.Module()
            model.scale = nn.Parameter(torch.zeros((), device="meta"))
            return model

    local, _, _ = made(Scalar())
    group = local.optimizer.param_groups[0]
    (copy,) = group["params"]
    for is_capturable, expected in ((False, "cpu"), (True, "meta")):
        group["capturable"] = is_capturable
        moment = torch.zeros((), device="meta")
        local._begin({"0": {"step": torch.tensor(3.0), "exp_avg": moment}})
        state = local.optimizer.state[copy]
        assert {k: v.device.type for k, v in state.items()} == {"step": expected, "exp_avg": "meta"}


def test_losses_in_few_bits_are_added_up_in_many() -> None:
    class Coarse(Fit):
        def loss(self, model: Any, batch: Any) -> Loss:
            inputs, targets = batch
            return Loss(((0 * model(inputs)).sum() + targets.sum()).bfloat16(), len(inputs))

    local, _, task = made(Coarse())
    targets = torch.tensor([[256.0], [1.0], [0.0]])
    loss, _ = local.run(task.loss, (torch.ones(3, 4), targets), None)
    assert float(loss.sum.detach()) == 257


def test_frozen_parameters_may_be_in_groups() -> None:
    class Frozen(Accumulating):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model[0].bias.requires_grad_(False)  # type: ignore[index,union-attr]
            return model

    local, model, task = made(Frozen())
    weight, _, *rest = model.parameters()
    assert local.outer_optimizer().param_groups[0]["params"] == [weight, *rest]
    _, found, state = come(local, model, task, batch_of(0), None)
    assert [gradient is None for gradient in found] == [False, True, False, False]
    assert state.keys() == {"0", "1", "2"}


class Sharing(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        self.state["shared"] = torch.ones(2)  # type: ignore[index]
        super().step(closure)


def test_state_of_no_parameter_is_refused() -> None:
    class Own(Fit):
        def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
            return Sharing(model.parameters(), lr=0.1)

    local, _, task = made(Own())
    with pytest.raises(TaskError, match=r"keeps state\['shared'\], and a worker has state of"):
        local.run(task.loss, batch_of(0), None)
