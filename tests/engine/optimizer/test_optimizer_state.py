"""What optimizers keep is saved by name, or refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stepping import advance
from tests.whole_snapshot import whole_snapshot
from torch import Tensor, nn, optim
from torch.utils.data import Dataset, TensorDataset

from lockstep.comm.transport import LocalTransport
from lockstep.config import OptimizerConfig, TrainConfig
from lockstep.engine.assembly import Parts, assemble
from lockstep.engine.audit.reachable import fingerprints, optimizers_in
from lockstep.engine.checkpoint.format import Snapshot, read, write
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.events import Event, Warned
from lockstep.engine.optimizer.choice import check_none_attached, check_optimizer
from lockstep.engine.optimizer.optimizer_state import from_json, home_of, to_json
from lockstep.engine.passes.compute import copied
from lockstep.engine.run.loop import Trainer
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime
from lockstep.engine.snapshot.compatibility import check_fits, check_optimizer_fits, load_model
from lockstep.engine.snapshot.restore import copy_state, restore
from lockstep.engine.task import Loss, Task
from lockstep.errors import CheckpointError, ConfigError, LockstepError, TaskError

Build = Callable[[nn.Module], optim.Optimizer]
HOME = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """Keeps a moving average that its `state_dict` leaves out, and that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 2)
        self.register_buffer("center", torch.zeros(9), persistent=False)
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.center: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.training:
            self.center.lerp_(y.detach().mean(0), 0.25)
        out: Tensor = self.second(torch.tanh(y - self.center))
        return out


class Fit(Task):
    def __init__(self, build: Build | None = None) -> None:
        super().__init__()
        self._build = build

    def build_model(self) -> nn.Module:
        return Net()

    def dataset(self, split: str) -> Dataset[Any] | None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(40, 6, generator=generator)
        return TensorDataset(x, x[:, :2].sin()) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> optim.Optimizer | None:
        return self._build(model) if self._build else None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(nn.functional.mse_loss(model(x), y, reduction="sum"), len(y))


def parts_of(build: Build | None = None, **keys: Any) -> Parts:
    config = TrainConfig(batch_size=8, num_microbatches=2, steps=8, **keys)
    runtime = Runtime(LocalTransport(), HOME, 0, "python", 0, lambda _: None, lambda: None)
    return assemble(Fit(build), config, runtime)


def trained(parts: Parts, first: int, last: int) -> None:
    advance(parts, first, last)
    if last > first:
        parts.train_step.flat_optimizer.check_state()


def saved(parts: Parts, step: int) -> Snapshot:
    meta = {"optimizer": parts.train_step.flat_optimizer.description}
    return whole_snapshot(parts.train_step, step, meta)


def test_a_copy_of_the_state_leaves_a_sharded_optimizer_its_own() -> None:
    parts = parts_of(optimizer=OptimizerConfig(sharded=True))
    trained(parts, 0, 2)
    before = parts.train_step.flat_optimizer.state()
    assert any(flat.count_nonzero() for flats in before.flats.values() for flat in flats)
    # No rank has all of it, so what is lost here would be lost to a recovery that begins again.
    copy_state(parts.train_step, Progress(step=2), {}, LocalTransport(), 0)
    after = parts.train_step.flat_optimizer.state()
    assert after.scalars == before.scalars
    for key, flats in before.flats.items():
        assert all(map(torch.equal, flats, after.flats[key]))


def bits(parts: Parts) -> dict[str, list[float]]:
    tensors = parts.model.state_dict() | dict(parts.model.named_buffers())
    return {n: t.reshape(-1).tolist() for n, t in tensors.items()}


class ScheduleFree(optim.Optimizer):
    """As schedule-free SGD: averages with weights that its groups keep."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr_max"] = max(group["lr"], group.get("lr_max", -1.0))
            group["weight_sum"] += group["lr_max"] ** 2 * (1 + group["k"])
            share = group["lr_max"] ** 2 * (1 + group["k"]) / group["weight_sum"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, share)
            group["k"] += 1


class Prodigious(optim.Optimizer):
    """As Prodigy: estimates the step size over all parameters, in tensors of other shapes too."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-2})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.state["total"]["norms"] = self.state["total"].get("norms", 0.0) + self.calls  # type: ignore[index]
        for group in self.param_groups:
            moved = torch.zeros(())
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("start", p.flatten()[::3].clone())
                state.setdefault("seen", torch.zeros(p.shape, dtype=torch.bool)).logical_or_(
                    p.grad > 0
                )
                state["history"] = [*state.get("history", []), self.calls][-3:]
                moved += (p.flatten()[::3] - state["start"]).norm()
                scale = group["lr"] * group["d"] / sum(state["history"])
                p.sub_(p.grad * (1 + state["seen"]), alpha=scale)
            group["d"] = max(group["d"], float(moved))
            group["d_tensor"] = moved.double() * self.calls


class Two(optim.Optimizer):
    """Two optimizers behind one face, as of a GAN."""

    def __init__(self, model: nn.Module) -> None:
        self.first = optim.Adam(model.first.parameters(), lr=0.01)  # type: ignore[union-attr]
        self.rest = [ScheduleFree(model.second.parameters(), lr=0.05)]  # type: ignore[union-attr]
        super().__init__([*self.first.param_groups, *self.rest[0].param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first.step()
        self.rest[0].step()


class Langevin(optim.SGD):
    """Draws from all three global generators."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        import random

        import numpy as np

        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01 + 0.01 * np.random.rand() * random.random())


KINDS: dict[str, Build] = {
    "schedule-free": lambda m: ScheduleFree(m.parameters()),
    "prodigy": lambda m: Prodigious(m.parameters()),
    "adafactor": lambda m: optim.Adafactor(m.parameters(), lr=0.01),
    "two": Two,
    "langevin": lambda m: Langevin(m.parameters(), lr=0.01, momentum=0.5),
    "amsgrad in one group": lambda m: optim.AdamW(
        [
            {"params": m.first.parameters(), "amsgrad": True},  # type: ignore[union-attr]
            {"params": m.second.parameters()},  # type: ignore[union-attr]
        ]
    ),
}


@pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)
def test_stopped_and_resumed_gives_the_bits_of_the_straight_run(
    tmp_path: Any, build: Build
) -> None:
    straight, first, second = (parts_of(build) for _ in range(3))
    trained(straight, 0, 6)
    trained(first, 0, 3)
    folder, _ = write(tmp_path, saved(first, 3))
    snapshot = read(folder)
    check_fits(snapshot, second.model, "here")
    check_optimizer_fits(snapshot, second.train_step, "here")
    trained(second, 0, 1)  # what there was is forgotten
    assert restore(snapshot, second.train_step, LocalTransport())["progress"]["step"] == 3
    trained(second, 3, 6)
    assert bits(second) == bits(straight)
    again, whole = saved(second, 6), saved(straight, 6)
    assert json.dumps(again.meta, sort_keys=True) == json.dumps(whole.meta, sort_keys=True)


def test_buffers_that_the_state_dict_leaves_out_are_saved_if_they_change(tmp_path: Any) -> None:
    parts = parts_of()
    trained(parts, 0, 2)
    snapshot = read(write(tmp_path, saved(parts, 2))[0])
    assert snapshot.buffers.keys() == {"center"}
    assert snapshot.model.keys() == parts.model.state_dict().keys()
    model = Net()
    check_fits(snapshot, model, "here")
    load_model(snapshot, model)
    assert torch.equal(model.center, parts.model.center)  # type: ignore[arg-type]
    assert model.center.abs().sum() > 0


def test_buffers_that_only_after_step_may_change_are_saved_too() -> None:
    class Following(Fit):
        def after_step(self, model: nn.Module, step: int) -> None:
            model.table.add_(1)  # type: ignore[operator,union-attr]

    config = TrainConfig(batch_size=8, num_microbatches=2, steps=8)
    runtime = Runtime(LocalTransport(), HOME, 0, "python", 0, lambda _: None, lambda: None)
    assert saved(assemble(Following(), config, runtime), 0).buffers.keys() == {"center", "table"}


def test_a_buffer_that_two_modules_share_is_saved_at_each_place(tmp_path: Any) -> None:
    class Twice(Fit):
        def build_model(self) -> nn.Module:
            model = Net()
            model.first.register_buffer("table", model.table, persistent=False)
            return model

        def after_step(self, model: nn.Module, step: int) -> None:
            model.table.add_(1)  # type: ignore[operator,union-attr]

    config = TrainConfig(batch_size=8, num_microbatches=2, steps=8)
    runtime = Runtime(LocalTransport(), HOME, 0, "python", 0, lambda _: None, lambda: None)
    parts = assemble(Twice(), config, runtime)
    parts.model.table.fill_(7)  # type: ignore[operator,union-attr]
    snapshot = read(write(tmp_path, saved(parts, 0))[0])
    assert snapshot.buffers.keys() == {"center", "table", "first.table"}
    model = Twice().build_model()
    check_fits(snapshot, model, "here")
    load_model(snapshot, model)
    assert model.first.table.eq(7).all()  # type: ignore[union-attr]


def test_numbers_are_copied_as_they_are_now() -> None:
    number = torch.tensor(1.5, requires_grad=True)
    counter = torch.tensor(3)
    fetch = copied([number, 2, counter])
    counter += 1
    assert fetch() == [1.5, 2.0, 3.0]


def test_snapshots_of_before_buffers_and_groups_were_saved_can_be_loaded(tmp_path: Any) -> None:
    parts, other = parts_of(), parts_of()
    trained(parts, 0, 2)
    taken = saved(parts, 2)
    plain = {
        owner: {k: v for k, v in kept.items() if v != {"tensor": True}}
        for owner, kept in taken.meta["optimizer_scalars"].items()
    }
    meta = {k: v for k, v in taken.meta.items() if k not in ("optimizer", "optimizer_shared")}
    old = Snapshot(2, taken.model, taken.optimizer, meta | {"optimizer_scalars": plain})
    snapshot = read(write(tmp_path, old)[0])
    check_fits(snapshot, other.model, "here")
    check_optimizer_fits(snapshot, other.train_step, "here")
    restore(snapshot, other.train_step, LocalTransport())
    other.model.center.copy_(parts.model.center)  # type: ignore[operator,arg-type,union-attr]
    other.train_step.state.mark()
    trained(parts, 2, 4)
    trained(other, 2, 4)
    assert bits(other) == bits(parts)


def test_a_checkpoint_without_buffers_that_change_is_said_so(tmp_path: Any) -> None:
    events: list[Event] = []
    runtime = Runtime(LocalTransport(), HOME, 0, "python", 0, events.append, lambda: None)
    config = TrainConfig(batch_size=8, num_microbatches=2, steps=4, stop_at_step=2)
    directory = RunDirectory(tmp_path)
    folder = Path(Trainer(Fit(), config, runtime, directory).run().checkpoint)
    further = config.model_copy(update={"stop_at_step": None})
    Trainer(Fit(), further, runtime, directory)
    assert [e for e in events if isinstance(e, Warned)] == []
    write(directory.checkpoints, dataclasses.replace(read(folder), buffers={}))
    Trainer(Fit(), further, runtime, directory)
    [warned] = [e for e in events if isinstance(e, Warned)]
    assert "center have their initial values, so the result may differ" in warned.message


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda m: optim.SGD(m.parameters(), lr=0.1), "optimizer is 'AdamW' there, 'SGD' here"),
        (
            lambda m: optim.AdamW(m.parameters(), lr=0.1),
            "lr of group 0 of optimizer is 0.001 there",
        ),
        (
            lambda m: optim.AdamW(m.parameters(), betas=(0.8, 0.999)),
            r"betas of group 0 of optimizer is \[0.9, 0.999\] there, \[0.8, 0.999\] here",
        ),
        (
            lambda m: optim.AdamW([{"params": [p]} for p in m.parameters()]),
            "number of groups of optimizer is 1 there, 4 here",
        ),
        (
            lambda m: optim.AdamW([*m.parameters()][:3]),
            "number of tensors of group 0 of optimizer is 4 there, 3 here",
        ),
    ],
    ids=["class", "lr", "betas", "groups", "tensors"],
)
def test_another_optimizer_is_refused_when_a_run_is_resumed(build: Build, message: str) -> None:
    snapshot = saved(parts_of(), 0)
    with pytest.raises(CheckpointError, match=f"cp: was trained with another .*: {message}"):
        check_optimizer_fits(snapshot, parts_of(build).train_step, "cp")


def test_hyperparameters_that_another_version_of_torch_adds_are_not_compared() -> None:
    parts, snapshot = parts_of(), saved(parts_of(), 0)
    there = snapshot.meta["optimizer"]
    del there["amsgrad of group 0 of optimizer"]
    there["more of group 0 of optimizer"] = 1
    check_optimizer_fits(snapshot, parts.train_step, "cp")
    del there["optimizer"]
    with pytest.raises(CheckpointError, match="optimizer is None there, 'AdamW' here"):
        check_optimizer_fits(snapshot, parts.train_step, "cp")


def test_optimizer_tensors_of_another_shape_are_refused() -> None:
    parts = parts_of()
    trained(parts, 0, 1)
    snapshot = saved(parts, 1)
    snapshot.optimizer["exp_avg/first.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"exp_avg/first.weight is torch.float32 \(3,\)"):
        check_optimizer_fits(snapshot, parts.train_step, "cp")
    del snapshot.optimizer["exp_avg/first.weight"]
    with pytest.raises(CheckpointError, match=r"exp_avg/first.weight does not fit"):
        check_optimizer_fits(snapshot, parts.train_step, "cp")


def make(body: Callable[[Any], None], **attributes: Any) -> Build:
    class Own(optim.Optimizer):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), {"lr": 0.1})
            self.__dict__.update(attributes)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            body(self)

    return Own


class Slow:
    def __init__(self) -> None:
        self.weights = {"a": torch.zeros(3)}

    def advance(self) -> None:
        self.weights["a"] += 1


UNSAVABLE: list[tuple[Build, str]] = [
    (
        make(lambda o: o.generator.seed(), generator=torch.Generator()),
        "changes its generator when it steps",
    ),
    (make(lambda o: o.inner.advance(), inner=Slow()), r"changes its inner\.weights\['a'\] when"),
    (make(lambda o: setattr(o, "mean", torch.ones(3))), "changes its mean when"),
    (make(lambda o: o.param_groups[0].update(m=torch.ones(3))), r"param_groups\[0\]\['m'"),
    (make(lambda o: o.state[torch.ones(2)].update(a=1)), "changes its state of a Tensor that it"),
    (make(lambda o: o.state["all"].update(a=torch.ones(2))), r"changes its state\['all'\]"),
    (make(lambda o: o.state.update({torch.ones(2): torch.ones(2)})), "changes its state"),
    (
        make(lambda o: o.state.update({o.param_groups[0]["params"][0]: torch.ones(2)})),
        "Own keeps a Tensor as state of a parameter",
    ),
    (
        make(lambda o: o.state[o.param_groups[0]["params"][0]].update(a=object())),
        "Own keeps state 'a' of type object",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), UNSAVABLE)
def test_state_that_no_checkpoint_holds_is_refused_after_the_first_step(
    build: Build, message: str
) -> None:
    parts = parts_of(build)
    parts.train_step.flat_optimizer.check_state()
    with pytest.raises(TaskError, match=f"build_optimizer: Own .*{message}|{message}"):
        trained(parts, 0, 1)


def test_empty_state_of_frozen_parameters_is_none() -> None:
    def touch(own: Any) -> None:
        for p in own.param_groups[0]["params"]:
            own.state[p]

    def build(model: nn.Module) -> optim.Optimizer:
        model.first.weight.requires_grad_(False)  # type: ignore[union-attr]
        return make(touch)(model)

    trained(parts_of(build), 0, 1)


def test_what_an_optimizer_refers_to_may_stay_as_it_is() -> None:
    build = make(lambda o: None, table=torch.ones(3), slow=Slow(), function=len, seen={1, 2})
    trained(parts_of(build), 0, 1)


def test_random_numbers_of_a_step_depend_on_nothing_but_seed_and_step() -> None:
    one, other = parts_of(KINDS["langevin"]), parts_of(KINDS["langevin"])
    trained(one, 0, 2)

    def draw(moment: str, step: int) -> None:
        torch.rand(1 + step)

    other.train_step._runtime = dataclasses.replace(other.train_step._runtime, at=draw)
    trained(other, 0, 2)
    assert bits(one) == bits(other)
    assert one.train_step.flat_optimizer.may_draw
    assert not parts_of().train_step.flat_optimizer.may_draw


def test_an_optimizer_that_draws_random_numbers_is_not_sharded() -> None:
    parts = parts_of(KINDS["langevin"], optimizer=OptimizerConfig(sharded=True))
    with pytest.raises(ConfigError, match=r"Langevin draws random numbers .* mesh.pp=1"):
        trained(parts, 0, 1)
    still = parts_of(
        lambda m: type("Still", (optim.SGD,), {"elementwise": True})(m.parameters(), lr=0.1),
        optimizer=OptimizerConfig(sharded=True),
    )
    trained(still, 0, 1)


@pytest.mark.parametrize(
    ("attach", "message"),
    [
        (
            lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
            r"scheduler is attached to the SGD, .*schedule\.name",
        ),
        (lambda o: optim.lr_scheduler.LambdaLR(o, lambda e: 1.0), "scheduler is attached"),
    ],
)
def test_a_learning_rate_scheduler_is_refused(
    attach: Callable[[optim.Optimizer], object], message: str
) -> None:
    optimizer = optim.SGD(Net().parameters(), lr=0.1)
    attach(optimizer)
    with pytest.raises(TaskError, match=message):
        check_none_attached(optimizer)


def test_an_inner_optimizer_steps_what_the_outer_one_has() -> None:
    model = Net()
    two = Two(model)
    assert list(optimizers_in(two)) == ["", "first", "rest.0"]
    check_optimizer(two, model, TrainConfig())
    two.param_groups.pop()
    with pytest.raises(TaskError, match=r"the Two rest\.0 steps parameters that are in no group"):
        check_optimizer(two, model, TrainConfig())


def test_the_schedule_reaches_the_groups_of_inner_optimizers() -> None:
    parts = parts_of(Two)
    rates = parts.train_step.rates
    rates._factors_at = lambda step, decays: [0.5] * 2
    rates.begin(0, 0)
    inner = parts.train_step.flat_optimizer._optimizer.rest[0]  # type: ignore[attr-defined]
    assert inner.param_groups[0]["lr"] == 0.025
    assert rates.of(parts.train_step.flat_optimizer.first_group()) == 0.005


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.1, "text", [1, [2.5]], (1, (2,)), {"a": [None]},
        torch.tensor(7), torch.tensor(0.1, dtype=torch.bfloat16), torch.tensor(True),
    ],
)  # fmt: skip
def test_values_survive_json(value: Any) -> None:
    back = from_json(json.loads(json.dumps(to_json(value))), HOME)
    assert type(back) is type(value)
    if isinstance(value, Tensor):
        assert back.dtype == value.dtype
    assert back == value


def test_scalars_go_to_where_the_parameter_is_unless_they_were_elsewhere() -> None:
    meta = torch.device("meta")  # in place of a GPU
    count = torch.tensor(3.0)
    assert from_json(to_json(count, HOME), meta).device == meta
    assert from_json(to_json(count, meta), meta).device == HOME


@pytest.mark.parametrize(
    "value", [[1], {"dtype": "load", "value": 1}, {"numpy": "object", "value": 1}, {}, {"list": 3}]
)
def test_values_that_nobody_wrote_are_refused(value: Any) -> None:
    with pytest.raises(LockstepError, match="the optimizer's state is damaged"):
        from_json(value, HOME)


def test_fingerprints_follow_cycles_and_notice_changes() -> None:
    slow = Slow()
    slow.itself = slow  # type: ignore[attr-defined]
    first = fingerprints({"slow": slow}, frozenset())
    assert list(first) == ["slow.weights['a']"]
    slow.advance()
    assert fingerprints({"slow": slow}, frozenset()) != first


@pytest.mark.parametrize(
    ("key", "group", "home"),
    [
        ("step", {}, "cpu"),
        ("step", {"fused": None, "capturable": False}, "cpu"),
        ("step", {"fused": True}, "meta"),
        ("step", {"capturable": True}, "meta"),
        ("exp_avg", {}, "meta"),
    ],
)
def test_numbers_are_where_torchs_optimizers_keep_them(
    key: str, group: dict[str, Any], home: str
) -> None:
    assert home_of(key, group, torch.device("meta")).type == home
