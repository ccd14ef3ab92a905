"""Several optimizers by name: each steps its parameters, in every step or in its phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.slices import slices_of
from torch import Tensor, nn, optim
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.config import TrainConfig
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.optimizer.choice import (
    NamedOptimizers,
    check_optimizer,
    is_elementwise,
    named_optimizers,
)
from lockstep.engine.optimizer.flat_optimizer import FlatOptimizer
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.step.memory import Kept, Needs
from lockstep.engine.step.model import trainable_groups
from lockstep.errors import CheckpointError, ConfigError, TaskError
from lockstep.optim import AdamATan2
from lockstep.parallel.layout import Range

Made = dict[str, optim.Optimizer]
STEPS = 6


class Tuned(optim.SGD):
    """May be anything, so it is not taken to be element-wise; keeps a number of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class Around(optim.Optimizer):
    """Holds another optimizer, which steps the second of its groups."""

    def __init__(self, first: list[Tensor], second: list[Tensor]) -> None:
        super().__init__([{"params": first}, {"params": second}], {"lr": 0.1})
        self.inner = optim.Adam([{"params": second}], lr=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign(), alpha=self.param_groups[0]["lr"])
        self.inner.step()


class Parts(ls.Task):
    """An encoder, a head, and a scale between them."""

    make: Callable[[Any], Any]

    def build_model(self) -> nn.Module:
        model = nn.ModuleDict({"encoder": nn.Linear(5, 40), "head": nn.Linear(40, 3)})
        model.scale = nn.Parameter(torch.ones(40))  # type: ignore[assignment]
        return model

    def dataset(self, split: str) -> Dataset[Any] | None:
        x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, torch.arange(24) % 3) if split == "train" else None

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        x, y = batch
        logits = model["head"](torch.tanh(model["encoder"](x)) * model.scale)
        return ls.Loss(nn.functional.cross_entropy(logits, y, reduction="sum"), len(y))

    def build_optimizer(self, model: Any) -> Any:
        return type(self).make(model)


def parts(make: Callable[[Any], Any]) -> ls.Task:
    return type("Made", (Parts,), {"make": staticmethod(make)})()


def train(task: ls.Task, folder: Path, resume: bool = False, **keys: Any) -> ls.Result:
    values = {"batch_size": 24, "num_microbatches": 4, "log_every": 1, "steps": STEPS}
    config = task.Config(**values | keys)
    return ls.train(task, config, run_dir=folder, resume=resume, quiet=True)


def adam_and_momentum(model: Any) -> Made:
    return {
        "encoder": optim.AdamW(model["encoder"].parameters(), lr=0.01, weight_decay=0.1),
        "head": optim.SGD(model["head"].parameters(), lr=0.1, momentum=0.9),
    }


def no_state_beside_adam(model: Any) -> Made:
    return {
        "head": optim.SGD(model["head"].parameters(), lr=0.1),
        "rest": optim.Adam([*model["encoder"].parameters(), model.scale], lr=0.01),
    }


def a_scale_in_no_optimizer(model: Any) -> Made:
    model["encoder"].bias.requires_grad_(False)
    return adam_and_momentum(model)


def groups(model: Any) -> Made:
    encoder = [{"params": [p], "lr": 0.01 * (p.dim() == 1)} for p in model["encoder"].parameters()]
    return {
        "encoder": optim.RMSprop(encoder, lr=0.02),
        "head": AdamATan2(model["head"].parameters(), lr=0.01),
        "scale": optim.Adagrad([model.scale], lr=0.03, initial_accumulator_value=0.1),
    }


def of_many_kinds(model: Any) -> Made:
    return {
        "weight": optim.AdamW([model["encoder"].weight], lr=torch.tensor(0.01)),
        "bias": optim.AdamW([model["encoder"].bias], lr=0.01, foreach=True),
        "head": optim.Adam(model["head"].named_parameters(), lr=0.01, fused=False, foreach=False),
        "scale": optim.AdamW([model.scale], lr=0.02, fused=True, amsgrad=True),
    }


def one_of_whole_tensors(model: Any) -> Made:
    return {
        "encoder": Tuned(model["encoder"].parameters(), lr=0.1, momentum=0.9),
        "head": optim.AdamW(model["head"].parameters(), lr=0.01),
    }


def one_that_holds_another(model: Any) -> Made:
    return {
        "encoder": Around([model["encoder"].weight], [model["encoder"].bias]),
        "head": optim.AdamW(model["head"].parameters(), lr=0.01),
    }


ALL = (
    adam_and_momentum, no_state_beside_adam, a_scale_in_no_optimizer, groups, of_many_kinds,
    one_of_whole_tensors, one_that_holds_another,
)  # fmt: skip
ELEMENTWISE = ALL[:-2]
every = pytest.mark.parametrize("make", ALL)


def plain(make: Callable[[Any], Made], factors: Mapping[str, float]) -> nn.Module:
    """The same steps by torch alone."""
    seed_all(random_key(0, Stream.MODEL))
    task = parts(make)
    model = task.build_model()
    made = task.build_optimizer(model)
    assert isinstance(made, dict)
    for name, optimizer in made.items():
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factors.get(name, 1.0)
    data: Any = task.dataset("train")
    for _ in range(STEPS):
        model.zero_grad()
        loss = task.loss(model, data[:])
        (loss.sum / loss.weight).backward()
        for optimizer in made.values():
            optimizer.step()
    return model


@every
def test_steps_are_those_of_a_plain_loop(tmp_path: Path, make: Callable[[Any], Made]) -> None:
    keys = {"num_microbatches": 1, "data": {"shuffle": False}}
    result = train(parts(make), tmp_path, **keys)
    wanted = plain(make, {})
    seed_all(random_key(0, Stream.MODEL))
    start = parts(make).build_model().state_dict()
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], tensor, rtol=2e-5, atol=1e-6)
    unchanged = {n for n, t in result.model.state_dict().items() if torch.equal(t, start[n])}
    expected = {
        a_scale_in_no_optimizer: {"scale", "encoder.bias"}, no_state_beside_adam: set(),
        groups: {"encoder.weight"}, of_many_kinds: set(),
    }  # fmt: skip
    assert unchanged == expected.get(make, {"scale"})


@every
def test_a_run_goes_on_to_the_same_bits(tmp_path: Path, make: Callable[[Any], Made]) -> None:
    whole = train(parts(make), tmp_path / "whole")
    train(parts(make), tmp_path / "halves", stop_at_step=3)
    halves = train(parts(make), tmp_path / "halves", True)
    assert halves.params_sha256 == whole.params_sha256


@pytest.mark.parametrize("kind", [optim.AdamW, Tuned])
def test_one_by_name_is_as_one_without(tmp_path: Path, kind: type[optim.Optimizer]) -> None:
    def one(model: Any) -> optim.Optimizer:
        return kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]

    alone = train(parts(one), tmp_path / "alone")
    named = train(parts(lambda model: {"all": one(model)}), tmp_path / "named")
    assert named.params_sha256 == alone.params_sha256


def test_a_run_goes_on_where_fp16_has_skipped_steps(tmp_path: Path) -> None:
    """The first steps of all overflow; state is there later than the first checkpoint."""
    keys = {"precision": {"dtype": "fp16", "loss_scale": 2.0**40}, "steps": 40}
    whole = train(parts(no_state_beside_adam), tmp_path / "whole", **keys)
    for stop in (3, 30, None):
        halves = train(
            parts(no_state_beside_adam), tmp_path / "halves", stop != 3, stop_at_step=stop, **keys
        )
    assert halves.params_sha256 == whole.params_sha256


def test_a_run_does_not_go_on_with_another_order(tmp_path: Path) -> None:
    def turned(model: Any) -> Made:
        return dict(reversed(adam_and_momentum(model).items()))

    train(parts(adam_and_momentum), tmp_path, stop_at_step=2)
    with pytest.raises(CheckpointError, match=r"optimizers is \['encoder', 'head'\] there, \['h"):
        train(parts(turned), tmp_path, True)


class ScheduledConfig(ls.TrainConfig):
    schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="linear")
    head_schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="step", step_size=3, gamma=0.5)


class Scheduled(Parts):
    Config = ScheduledConfig
    config: ScheduledConfig

    def build_optimizer(self, model: Any) -> Any:
        return groups(model)

    def lr_factor(self, step: int, total_steps: int) -> Any:
        return {
            "head": ls.lr_factor(self.config.head_schedule, step, total_steps),
            "scale": 1.0,
            "encoder": [ls.lr_factor(self.config.schedule, step, total_steps), 0.5],
        }


def rates_of(kind: type[ls.Task], folder: Path, **keys: Any) -> list[tuple[float, list[float]]]:
    """For each step, the learning rate that is reported, and those of all groups."""
    rows: list[tuple[float, list[float]]] = []

    class Looks(ls.Hook):
        first_only = True

        def after_step(self, run: ls.Run) -> None:
            rows.append((run.lr, [float(group["lr"]) for group in run.optimizer.param_groups]))

    class Looked(kind):  # type: ignore[misc, valid-type]
        def hooks(self) -> list[ls.Hook]:
            return [Looks()]

    train(Looked(), folder, **keys)
    return rows


def test_each_optimizer_has_a_schedule_of_its_own(tmp_path: Path) -> None:
    rows = rates_of(Scheduled, tmp_path)
    encoder = [0.0, 0.005]  # the weight's, which is the one that is reported, and the bias's
    head = [0.01] * 3 + [0.005] * 3
    assert rows == [(0.0, pytest.approx([*encoder, rate, 0.03])) for rate in head]


def test_a_schedule_of_the_config_is_one_for_all(tmp_path: Path) -> None:
    class One(Scheduled):
        lr_factor = ls.Task.lr_factor

        def build_optimizer(self, model: Any) -> Any:
            return adam_and_momentum(model)

    factors = (1.0, 0.75, 0.5, 0.25)
    wanted = [(pytest.approx(0.01 * f), pytest.approx([0.01 * f, 0.1 * f])) for f in factors]
    assert rates_of(One, tmp_path, steps=4) == wanted


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"encoder": 1.0, "head": 1.0},
            r"factors for \['encoder', 'head'\]; the optimizers are \[",
        ),
        ({"encoder": 1, "head": 1, "scale": 1, "x": 1}, r"'x'\]; the optimizers are \['encoder'"),
        ({"encoder": [1.0], "head": 1, "scale": 1}, "1 factors; that of 'encoder' has 2 parameter"),
        ({"encoder": 1, "head": -1, "scale": 1}, "returned -1; must be a number of at least 0"),
        ({"encoder": 1, "head": {}, "scale": 1}, r"returned \{\}; must be a number"),
        ([1.0, 1.0], "returned 2 factors; the optimizer has 4 parameter groups"),
    ],
)
def test_factors_that_do_not_fit(tmp_path: Path, value: Any, message: str) -> None:
    class Bad(Scheduled):
        def lr_factor(self, step: int, total_steps: int) -> Any:
            return value

    with pytest.raises(TaskError, match=rf"Bad\.lr_factor\(0, 6\): .*{message}"):
        train(Bad(), tmp_path)


def test_one_optimizer_has_no_names(tmp_path: Path) -> None:
    class Bad(Scheduled):
        def build_optimizer(self, model: Any) -> Any:
            return optim.SGD(model.parameters(), lr=0.1)

        def lr_factor(self, step: int, total_steps: int) -> Any:
            return {"encoder": 1.0}

    with pytest.raises(
        TaskError, match=r"returned \{'encoder': 1\.0\}; the task has one optimizer"
    ):
        train(Bad(), tmp_path)


def test_a_schedule_that_goes_by_evaluations_is_refused_in_a_task() -> None:
    plateau = ls.ScheduleConfig(name="plateau", warmup_steps=5)
    with pytest.raises(ConfigError, match=r"schedule\.name='plateau': goes by evaluations"):
        ls.lr_factor(plateau, 0, 10)


def both(model: Any) -> list[Tensor]:
    return [*model["encoder"].parameters(), *model["head"].parameters()]


def scheduled(model: Any) -> Made:
    made = adam_and_momentum(model)
    optim.lr_scheduler.LambdaLR(made["head"], lambda epoch: 1.0)
    return made


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: {}, r"Made\.build_optimizer: returned no optimizer; return one by the name"),
        (lambda m: {"the head": optim.SGD(both(m), 0.1)}, "the name 'the head': must be an ident"),
        (lambda m: {3: optim.SGD(both(m), 0.1)}, "the name 3: must be an identifier"),
        (lambda m: {"head": m["head"]}, "'head' is a Linear; must be an optimizer"),
        (lambda m: {"head": None}, "'head' is a NoneType; must be an optimizer"),
        (
            lambda m: adam_and_momentum(m) | {"all": optim.SGD(m.parameters(), 0.1)},
            "the optimizers of 'encoder' and 'all' have the same parameter",
        ),
        (
            lambda m: dict.fromkeys(("one", "two"), optim.SGD(both(m), 0.1)),
            "the optimizers of 'one' and 'two' have the same parameter",
        ),
        (
            lambda m: {"head": optim.SGD(nn.Linear(2, 2).parameters(), 0.1)},
            "the SGD of 'head' holds parameters that are not the model's",
        ),
        (lambda m: {"head": optim.LBFGS(both(m))}, "LBFGS of 'head' evaluates the loss again"),
        (scheduled, "scheduler is attached to the SGD of 'head'"),
    ],
)
def test_optimizers_that_cannot_be_named(
    tmp_path: Path, make: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        train(parts(make), tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sharding": "gradients"}, "sharding=gradients: Tuned of 'encoder' is not known to be el"),
        ({"optimizer": {"sharded": True}}, r"optimizer\.sharded=True: Tuned of 'encoder' is not"),
        ({"mesh": {"tp": 2}, "num_shards": 2}, r"mesh\.tp=2: Tuned of 'encoder' is not known to"),
        ({"mesh": {"pp": 2}}, r"mesh\.pp=2: Tuned of 'encoder' is not known to be element-wise"),
    ],
)
def test_all_are_element_wise_or_none_is_sharded(keys: dict[str, Any], message: str) -> None:
    model = Parts().build_model()
    made = named_optimizers(one_of_whole_tensors(model), "here")
    with pytest.raises(ConfigError, match=message):
        check_optimizer(made, model, TrainConfig(**keys))


def test_an_element_wise_one_holds_no_other() -> None:
    class Bad(Around):
        elementwise = True

    model: Any = Parts().build_model()
    encoder = Bad([model["encoder"].weight], [model["encoder"].bias])
    made = named_optimizers({"encoder": encoder, "head": optim.SGD(model["head"].parameters())}, "")
    assert is_elementwise(made)
    with pytest.raises(TaskError, match="a Bad that holds other optimizers cannot be element-wise"):
        check_optimizer(made, model, TrainConfig())


def test_one_optimizer_has_all_shards_of_a_parameter(tmp_path: Path) -> None:
    class Cut(Parts):
        def build_model(self) -> nn.Module:
            plan = {"encoder": "column", "head": "row"}
            return ls.nn.shard(super().build_model(), plan)

        def build_optimizer(self, model: Any) -> Any:
            one, two = model["encoder"].weight_0, model["encoder"].weight_1
            return {"one": optim.SGD([one], lr=0.1), "two": optim.SGD([two], lr=0.1)}

    with pytest.raises(
        TaskError, match=r"shards of encoder\.weight are in the optimizers of 'one'"
    ):
        train(Cut(), tmp_path, num_shards=2)


def bound(make: Callable[[Any], Made], last: int | None = None) -> tuple[nn.Module, FlatOptimizer]:
    """A model's parameters in flat memory, of which elements below `last` are stepped."""
    torch.manual_seed(0)
    model = Parts().build_model()
    made = named_optimizers(make(model), "here")
    flat = FlatTensors(trainable_groups(model, made), "parameter")
    gradients = [torch.full_like(f, 0.5) for f in flat.flats]
    owned = [[Range(0, last or s.numel)] for s in flat.segments]
    return model, FlatOptimizer(made, flat, slices_of(flat, gradients, owned))


def test_state_is_by_key_where_all_are_element_wise() -> None:
    """One flat tensor for each key, of whichever optimizer; each group says which it has."""
    _, flat_optimizer = bound(no_state_beside_adam)
    flat_optimizer.step()
    state = flat_optimizer.state()
    assert sorted(state.flats) == ["exp_avg", "exp_avg_sq"]
    assert {owner: sorted(kept) for owner, kept in state.scalars.items()} == {
        "1": ["exp_avg", "exp_avg_sq", "step"]
    }
    assert list(state.shared) == ["by_name.head", "by_name.rest"]
    _, again = bound(no_state_beside_adam)
    again.load_state(state)
    inner = again.optimizer.by_name["head"].state  # type: ignore[attr-defined]
    assert not inner


def test_state_goes_behind_a_path_where_one_steps_whole_tensors() -> None:
    _, flat_optimizer = bound(one_that_holds_another)
    flat_optimizer.step()
    state = flat_optimizer.state()
    assert {name.partition("/")[0] for name in state.tensors} == {
        "by_name.encoder.inner.exp_avg", "by_name.encoder.inner.exp_avg_sq",
        "by_name.head.exp_avg", "by_name.head.exp_avg_sq",
    }  # fmt: skip
    damaged = OptimizerState({}, {}, {"encoder.bias": {"exp_avg": 1.0}}, state.shared)
    with pytest.raises(CheckpointError, match="state is damaged: exp_avg is no optimizer's"):
        flat_optimizer.load_state(damaged)


@pytest.mark.parametrize("make", [adam_and_momentum, one_of_whole_tensors])
def test_memory_that_is_given_again_has_no_state_of_any(make: Callable[[Any], Made]) -> None:
    """As after the loss of what microbatches carry, whatever the optimizers are."""
    model, flat_optimizer = bound(make)
    flat_optimizer.step()
    flat = flat_optimizer._flat
    gradients = [torch.ones_like(f) for f in flat.flats]
    slices = slices_of(flat, gradients, [[Range(0, s.numel)] for s in flat.segments])
    flat_optimizer.own(slices)
    flat_optimizer.bind(slices)
    state = flat_optimizer.state()
    assert (state.flats, state.tensors) == ({}, {})
    before = model["head"].weight.clone()  # type: ignore[index]
    flat_optimizer.step()
    flat_optimizer.load_state(flat_optimizer.state())
    assert not torch.equal(model["head"].weight, before)  # type: ignore[index]


def test_kernels_are_fused_by_each_ones_kind() -> None:
    _, flat_optimizer = bound(of_many_kinds)
    fused = [group["fused"] for group in flat_optimizer.optimizer.param_groups]
    assert fused == [True, None, False, True]
    _, flat_optimizer = bound(groups)
    kinds = flat_optimizer.optimizer.param_groups
    assert ["fused" in group and group["fused"] for group in kinds] == [False, False, False, True]


def test_an_optimizer_without_a_piece_on_a_rank_steps_nothing_there() -> None:
    """The encoder's tensors take just the first 256 elements."""
    _, flat_optimizer = bound(adam_and_momentum, 256)
    made = flat_optimizer.optimizer
    assert isinstance(made, NamedOptimizers)
    assert [len(group["params"]) for group in made.param_groups] == [1, 0]
    flat_optimizer.step()
    flat_optimizer.check_state()
    state = flat_optimizer.state()
    assert (sorted(state.flats), list(state.scalars)) == (["exp_avg", "exp_avg_sq"], ["0"])
    shared = {path: values["groups"] for path, values in state.shared.items()}
    assert shared == {"by_name.encoder": [{}], "by_name.head": [None]}
    flat_optimizer.load_state(state)


def test_memory_counts_the_states_of_all() -> None:
    model: Any = nn.ModuleDict(
        {"encoder": nn.Linear(1024, 512, bias=False), "head": nn.Linear(512, 512, bias=False)}
    )
    config, mib = TrainConfig(num_microbatches=1), 1 << 20

    def bytes_with(head: optim.Optimizer, has_phases: bool = False) -> int:
        made = {"encoder": optim.Adam(model["encoder"].parameters()), "head": head}
        whole = named_optimizers(made, "here")
        flat = FlatTensors(trainable_groups(model, whole), "parameter")
        return Needs(config, Kept(flat, whole, has_phases), False).of("none", 1)

    parameters = list(model["head"].parameters())
    assert bytes_with(optim.SGD(parameters, 0.1)) == (3 * 3 + 2 * 2) * mib
    assert bytes_with(optim.SGD(parameters, 0.1, 0.9)) == (3 * 3 + 2 * 2 + 1) * mib
    assert bytes_with(optim.Adam(parameters, 0.1)) == (3 * 3 + 2 * 2 + 2) * mib
    assert bytes_with(optim.Adam(parameters, 0.1), True) == (2 * 3 + 2 * 2 + 2) * mib
