"""Schedulers of torch, and rates that code writes into groups, beside plain loops of torch."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launching.api.test_train import Line
from tests.launching.api.test_train import config as line_config
from tests.stepping import repeat_no_more_steps
from torch import nn, optim
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

import lockstep as ls
from lockstep.engine.hook import Run
from lockstep.engine.optimizer.learning_rates import LearningRates
from lockstep.engine.optimizer.schedule import decoded, encoded
from lockstep.engine.optimizer.schedulers import Schedulers
from lockstep.errors import CheckpointError, ConfigError, LockstepError, TaskError

STEPS = 16
Make = Callable[[Any], Any]


class Scheduled(Line):
    """A line that AdamW fits."""

    make: Make = staticmethod(lambda optimizer: None)

    def build_optimizer(self, model: Any) -> Any:
        return optim.AdamW(
            [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}], lr=0.1
        )

    def build_scheduler(self, optimizer: Any) -> Any:
        return type(self).make(optimizer)


class Kept(Scheduled):
    """Keeps its optimizer."""

    def build_optimizer(self, model: Any) -> Any:
        self.optimizer = super().build_optimizer(model)
        return self.optimizer


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event.get("event") == kind]


def rates_of(folder: Path) -> list[float]:
    """The learning rates that steps have reported."""
    return [event["lr"] for event in events_of(folder, "StepDone")]


def scheduled(scheduler: Make, **body: Any) -> type[Kept]:
    return type("Mine", (Kept,), {"make": staticmethod(scheduler), **body})


ALL: dict[str, Make] = {
    "onecycle": lambda o: torchs.OneCycleLR(o, max_lr=[0.2, 0.1], total_steps=STEPS),
    "restarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "sequential": lambda o: torchs.SequentialLR(
        o,
        [torchs.LinearLR(o, 0.1, total_iters=4), torchs.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
    "chained": lambda o: torchs.ChainedScheduler(
        [torchs.ConstantLR(o, 0.5, 3), torchs.MultiStepLR(o, [2, 5], 0.5)]
    ),
    "lambda": lambda o: torchs.LambdaLR(o, lambda step: 0.95**step),
    "cyclic": lambda o: torchs.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "epochs": lambda o: ls.Scheduler(torchs.StepLR(o, 1, 0.5), "epoch"),
    "an array": lambda o: Counted(o),
    "every third": lambda o: ls.Scheduler(torchs.ExponentialLR(o, 0.5), "step", frequency=3),
}


def config(**keys: Any) -> ls.TrainConfig:
    return line_config(steps=STEPS, log_every=1, **keys)


def plain(make: Make) -> tuple[list[float], Any]:
    """Learning rate of each step of a plain loop, and the betas after the last but one."""
    model = nn.Linear(1, 1)
    optimizer = optim.AdamW(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}], lr=0.1
    )
    made = make(optimizer)
    one = made if isinstance(made, ls.Scheduler) else ls.Scheduler(made)
    found = []
    for step in range(1, STEPS + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        units = step if one.interval == "step" else step / 4  # of 64 samples, 16 a step
        if units % one.frequency == 0 and step < STEPS:
            one.scheduler.step()
    return found, optimizer.param_groups[0]["betas"]


@pytest.mark.parametrize("name", ALL)
def test_rates_are_those_of_a_plain_loop_also_over_a_resume(name: str, tmp_path: Path) -> None:
    kind = scheduled(ALL[name])
    whole = ls.train(kind(), config(), run_dir=tmp_path / "whole", quiet=True)
    rates, betas = plain(ALL[name])
    assert rates_of(tmp_path / "whole") == rates
    assert len({*rates}) > 1
    for stop in (5, 11, STEPS - 1, None):
        task = kind()
        about = config(stop_at_step=stop)
        last = ls.train(task, about, run_dir=tmp_path / "parts", quiet=True, resume=stop != 5)
        if stop == STEPS - 1:
            assert task.optimizer.param_groups[0]["betas"] == betas
    assert rates_of(tmp_path / "parts") == rates
    assert last.params_sha256 == whole.params_sha256


def test_plateau_goes_by_evaluations(tmp_path: Path) -> None:
    def make(optimizer: Any) -> Any:
        return ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)

    mine = scheduled(make)
    about = config(eval_every=2)
    whole = ls.train(mine(), about, run_dir=tmp_path / "whole", quiet=True)
    losses = [event["metrics"]["loss"] for event in events_of(tmp_path / "whole", "Evaluated")]
    optimizer = optim.SGD([torch.zeros(1)], lr=0.1)
    plateau, expected = make(optimizer), []
    for step in range(1, STEPS + 1):
        expected.append(optimizer.param_groups[0]["lr"])
        if step % 2 == 0:
            plateau.step(losses[step // 2 - 1])
    assert rates_of(tmp_path / "whole") == expected
    assert len({*expected}) > 2
    ls.train(mine(), config(eval_every=2, stop_at_step=7), run_dir=tmp_path / "parts", quiet=True)
    last = ls.train(mine(), about, run_dir=tmp_path / "parts", quiet=True, resume=True)
    assert last.params_sha256 == whole.params_sha256
    odd = config(eval_every=3)  # the evaluation after step 16 is there since it is the last step
    ls.train(mine(), odd, run_dir=tmp_path / "odd", quiet=True)
    longer = odd.model_copy(update={"steps": STEPS + 8})
    with pytest.raises(ConfigError, match="build_scheduler goes by evaluations"):
        ls.train(mine(), longer, run_dir=tmp_path / "odd", quiet=True, resume=True)


def by_hand(self: Any, model: Any, step: int) -> None:
    for group in self.optimizer.param_groups:
        group["lr"] *= 0.5 if step == 3 else 1.0
        if step == 6:
            group["betas"], group["weight_decay"] = (0.5, 0.9), 0.2


def test_what_after_step_writes_counts_from_the_next_step_on(tmp_path: Path) -> None:
    kind = scheduled(lambda optimizer: None, after_step=by_hand)
    task = kind()
    whole = ls.train(task, config(), run_dir=tmp_path / "whole", quiet=True)
    assert rates_of(tmp_path / "whole") == [0.1] * 3 + [0.05] * (STEPS - 3)
    groups = task.optimizer.param_groups
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in groups] == [
        (0.05, (0.5, 0.9), 0.2),
        (0.025, (0.5, 0.9), 0.2),
    ]
    for number, keys in enumerate(({}, {"sharding": "optimizer"})):
        folder = tmp_path / str(number)
        ls.train(kind(), config(stop_at_step=7, **keys), run_dir=folder, quiet=True)
        last = ls.train(kind(), config(**keys), run_dir=folder, quiet=True, resume=True)
        assert last.params_sha256 == whole.params_sha256


def test_a_schedule_goes_on_from_a_rate_that_was_written(tmp_path: Path) -> None:
    kind = scheduled(lambda optimizer: None, after_step=by_hand)
    task = kind()
    about = config(schedule={"name": "linear"})
    ls.train(task, about, run_dir=tmp_path / "run", quiet=True)
    expected = [0.1 * (1 - s / STEPS) * (1.0 if s < 3 else 0.5) for s in range(STEPS)]
    assert rates_of(tmp_path / "run") == pytest.approx(expected)


def test_each_of_several_optimizers_has_its_own(tmp_path: Path) -> None:
    class Two(Line):
        def build_optimizer(self, model: Any) -> Any:
            self.made = {
                "weight": optim.SGD([model.weight], lr=0.1),
                "bias": optim.SGD([model.bias], lr=0.2),
            }
            return self.made

        def build_scheduler(self, optimizer: Any) -> Any:
            assert [*optimizer] == ["weight", "bias"]
            return {"bias": torchs.ExponentialLR(optimizer["bias"], 0.5)}

    task = Two()
    ls.train(task, line_config(steps=3), run_dir=tmp_path / "run", quiet=True)
    rates = {name: one.param_groups[0]["lr"] for name, one in task.made.items()}
    assert rates == {"weight": 0.1, "bias": 0.2 * 0.5**3}


def test_of_phases_each_is_stepped_in_its_own_steps(tmp_path: Path) -> None:
    class Turns(Line):
        def phases(self) -> list[ls.Phase]:
            return [ls.Phase("weight", self.loss, 2), ls.Phase("bias", self.loss)]

        def build_optimizer(self, model: Any) -> Any:
            self.made = {
                "weight": optim.SGD([model.weight], lr=0.1),
                "bias": optim.SGD([model.bias], lr=0.2),
            }
            return self.made

        def build_scheduler(self, optimizer: Any) -> Any:
            return {name: torchs.ExponentialLR(one, 0.5) for name, one in optimizer.items()}

    task = Turns()
    ls.train(task, line_config(steps=6), run_dir=tmp_path / "run", quiet=True)
    rates = {name: one.param_groups[0]["lr"] for name, one in task.made.items()}
    assert rates == {"weight": 0.1 * 0.5**4, "bias": 0.2 * 0.5**2}


def test_workers_of_local_steps_have_it(tmp_path: Path) -> None:
    class Mine(Scheduled):
        make = staticmethod(lambda o: torchs.ExponentialLR(o, 0.5))

    about = config(local={"steps": 2})
    whole = ls.train(Mine(), about, run_dir=tmp_path / "whole", quiet=True)
    assert rates_of(tmp_path / "whole") == [0.1 * 0.5**step for step in range(STEPS)]
    stopped = config(local={"steps": 2}, stop_at_step=5)
    ls.train(Mine(), stopped, run_dir=tmp_path / "parts", quiet=True)
    last = ls.train(Mine(), about, run_dir=tmp_path / "parts", quiet=True, resume=True)
    assert last.params_sha256 == whole.params_sha256


def foreign(optimizer: Any) -> Any:
    return torchs.StepLR(optim.SGD([torch.zeros(1)], lr=1.0), 1)


class Counting:
    """A factor that depends on how often it was asked for."""

    calls = 0


def counted(step: int) -> float:
    Counting.calls += 1
    return 0.5**Counting.calls


class Hidden(LRScheduler):
    """Keeps a generator, which `state_dict` names and no checkpoint holds."""

    def __init__(self, optimizer: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        factor = float(torch.rand(1, generator=self.generator))
        return [base * factor for base in self.base_lrs]


class Decaying(LRScheduler):
    """Changes more than options."""

    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)
                parameter.detach().mul_(1.0)
        return [*self.base_lrs]


class Counted(LRScheduler):
    """Counts in an array, in place."""

    def __init__(self, optimizer: Any) -> None:
        self.counts = np.zeros(2, dtype=np.int64)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.counts += 1
        return [base * np.float32(0.5) ** self.counts[0] for base in self.base_lrs]


class Raising(LRScheduler):
    """Fails in the third step."""

    def get_lr(self) -> list[Any]:
        if self.last_epoch == 3:
            raise KeyError("no rate")
        return [*self.base_lrs]


WRONG: dict[str, tuple[Make, str]] = {
    "no scheduler": (lambda o: 0.5, "must return a scheduler of torch.optim.lr_scheduler"),
    "foreign": (foreign, "StepLR is built over an optimizer that the run does not step"),
    "a dict": (lambda o: {"encoder": foreign(o)}, "there is one optimizer: return one"),
    "plateau each step": (
        lambda o: ls.Scheduler(ReduceLROnPlateau(o)),
        "its interval is 'evaluation', not 'step'",
    ),
    "metric": (
        lambda o: ls.Scheduler(ReduceLROnPlateau(o), "evaluation", metric="accuracy"),
        "goes by 'accuracy'; the evaluation has loss",
    ),
    "no metric": (lambda o: ls.Scheduler(torchs.StepLR(o, 1), metric="loss"), "has no use"),
    "interval": (
        lambda o: ls.Scheduler(torchs.StepLR(o, 1), "batch"),  # type: ignore[arg-type]
        r"interval='batch': must be one of \['step', 'epoch', 'evaluation'\]",
    ),
    "frequency": (lambda o: ls.Scheduler(torchs.StepLR(o, 1), frequency=0), "frequency=0: must"),
    "counts elsewhere": (
        lambda o: torchs.LambdaLR(o, counted),
        "LambdaLR comes to something else when its state is loaded again",
    ),
    "draws": (lambda o: Hidden(o), "Hidden comes to something else"),
    "raises": (lambda o: Raising(o), "no rate"),
    "too short": (
        lambda o: torchs.OneCycleLR(o, 0.2, total_steps=STEPS // 2),
        "build_scheduler: OneCycleLR cannot be stepped: Tried to step 9 times",
    ),
    "decays parameters": (lambda o: Decaying(o), "Decaying changes parameters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_stepped_is_refused(name: str, tmp_path: Path) -> None:
    make, message = WRONG[name]
    with pytest.raises(LockstepError, match=message):
        ls.train(scheduled(make)(), config(), run_dir=tmp_path / "run", quiet=True)


def test_two_that_would_set_the_rates_are_refused(tmp_path: Path) -> None:
    make = ALL["lambda"]
    about = config(schedule={"name": "cosine"})
    with pytest.raises(ConfigError, match=r"schedule\.name=cosine.*sets the learning rates"):
        ls.train(scheduled(make)(), about, run_dir=tmp_path / "run", quiet=True)
    both = scheduled(make, lr_factor=lambda self, step, total: 1.0)
    with pytest.raises(TaskError, match="has lr_factor too"):
        ls.train(both(), config(), run_dir=tmp_path / "run", quiet=True)


def test_a_run_is_not_resumed_with_another_scheduler(tmp_path: Path) -> None:
    first = scheduled(lambda o: torchs.ExponentialLR(o, 0.5))
    ls.train(first(), config(stop_at_step=2), run_dir=tmp_path / "run", quiet=True)
    for other in (lambda o: torchs.ExponentialLR(o, 0.6), lambda o: None):
        task = scheduled(other)()
        with pytest.raises(CheckpointError, match=r"scheduler is .*ExponentialLR"):
            ls.train(task, config(), run_dir=tmp_path / "run", quiet=True, resume=True)


@pytest.mark.parametrize("lr", [-1.0, float("nan"), "high"])
def test_what_is_no_rate_is_refused(lr: Any, tmp_path: Path) -> None:
    def after_step(self: Any, model: Any, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = lr

    task = scheduled(lambda o: None, after_step=after_step)()
    with pytest.raises(TaskError, match=r"'lr' was set to .*; must be a finite number of at least"):
        ls.train(task, config(), run_dir=tmp_path / "run", quiet=True)


def test_a_rate_is_not_written_where_the_schedule_is_at_zero(tmp_path: Path) -> None:
    task = scheduled(
        lambda o: None,
        after_step=lambda self, model, step: self.optimizer.param_groups[0].update(lr=0.1),
        lr_factor=lambda self, step, total: float(step != 2),
    )()
    with pytest.raises(TaskError, match=r"'lr' was set to 0\.1 where the schedule is at 0"):
        ls.train(task, config(), run_dir=tmp_path / "run", quiet=True)


def test_rates_are_not_changed_by_microbatches_nor_at_the_start(tmp_path: Path) -> None:
    class InLoss(Kept):
        def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
            for group in self.optimizer.param_groups if self.optimizer.state else ():
                group["lr"] = 0.3
            return super().loss(model, batch)

    with pytest.raises(TaskError, match="group 0: 'lr' was changed by a microbatch"):
        ls.train(InLoss(), config(), run_dir=tmp_path / "loss", quiet=True)

    class AtStart(ls.Hook):
        def on_start(self, run: Run) -> None:
            run.optimizer.param_groups[1]["weight_decay"] = 0.3

    class Hooked(Kept):
        def hooks(self) -> list[ls.Hook]:
            return [AtStart()]

    with pytest.raises(TaskError, match="'weight_decay' of the optimizer's group 1 was changed"):
        ls.train(Hooked(), config(), run_dir=tmp_path / "start", quiet=True)


def test_damaged_states_are_refused() -> None:
    group = {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1, "betas": (0.9, 0.99)}
    rates = LearningRates([group], [], lambda step, decays: [1.0], Schedulers({}, {}), True)
    good = rates.state_dict()
    assert rates.problem(good) == ""
    damages: list[tuple[Any, str]] = [
        ([], "must be an object"),
        (good | {"base": [0.1, 0.2]}, "must be a list of 1"),
        (good | {"lr": ["x"]}, "must be a finite number"),
        (good | {"factors": [float("inf")]}, "must be a finite number"),
        (good | {"written": [{"lr": 1}]}, "must be options by name"),
        (good | {"written": [{"betas": {"odd": 1}}]}, "is no value of an option"),
    ]
    for damaged, message in damages:
        assert message in rates.problem(damaged)
        with pytest.raises(CheckpointError, match=r"^learning_rates: "):
            rates.load_state_dict(damaged)
    with pytest.raises(CheckpointError, match="is no value of a scheduler"):
        decoded({"module": "os"}, None)


def test_states_of_schedulers_come_back_from_json() -> None:
    state = {
        "inf": float("inf"),
        "counts": {3: 1, "a": (1, None)},
        "recent": deque([0.5, 0.25], maxlen=4),
        "rate": torch.tensor(0.25),
        "function": len,
    }
    back = decoded(json.loads(json.dumps(encoded(state))), {"function": len})
    assert back["recent"].maxlen == 4
    assert {k: v for k, v in back.items() if k != "rate"} == {
        k: v for k, v in state.items() if k != "rate"
    }
    assert torch.equal(back["rate"], torch.tensor(0.25))


def emptied(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].clear()


def deleted(groups: list[dict[str, Any]]) -> None:
    del groups[0]["betas"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda groups: groups.pop(), "groups of AdamW were added, removed or replaced"),
        (lambda groups: groups.append(dict(groups[0])), "groups of AdamW were added"),
        (lambda groups: groups.insert(0, dict(groups.pop(0))), "groups of AdamW were added"),
        (emptied, "group 0: other parameters were put into it"),
        (deleted, "group 0: 'betas' was deleted"),
        (lambda groups: groups[0].pop("lr"), "'lr' was set to None; must be a finite number"),
    ],
)
def test_groups_stay_as_they_were_built(edit: Any, said: str, tmp_path: Path) -> None:
    def after_step(self: Any, model: Any, step: int) -> None:
        if step == 3:
            edit(self.optimizer.param_groups)

    task = scheduled(lambda o: None, after_step=after_step)()
    with pytest.raises(TaskError, match=said):
        ls.train(task, config(), run_dir=tmp_path / "run", quiet=True)


def test_a_key_of_ones_own_comes_back(tmp_path: Path) -> None:
    def after_step(self: Any, model: Any, step: int) -> None:
        group = self.optimizer.param_groups[0]
        group["seen"] = group.get("seen", 0) + 1
        group["lr"] = 0.1 / (1 + group["seen"])

    kind = scheduled(lambda o: None, after_step=after_step)
    whole = ls.train(kind(), config(), run_dir=tmp_path / "whole", quiet=True)
    ls.train(kind(), config(stop_at_step=5), run_dir=tmp_path / "parts", quiet=True)
    last = ls.train(kind(), config(), run_dir=tmp_path / "parts", quiet=True, resume=True)
    assert last.params_sha256 == whole.params_sha256


def test_state_of_a_parameter_that_is_stepped_flat_is_no_silence(tmp_path: Path) -> None:
    def after_step(self: Any, model: Any, step: int) -> None:
        self.optimizer.state.pop(model.weight, None)

    task = scheduled(lambda o: None, after_step=after_step)()
    with pytest.raises(TaskError, match="steps flat tensors, which are in its param_groups"):
        ls.train(task, config(), run_dir=tmp_path / "run", quiet=True)


def test_a_scheduler_may_set_the_rate_of_another_optimizer(tmp_path: Path) -> None:
    class Both(LRScheduler):
        def __init__(self, optimizer: Any, other: Any) -> None:
            self.other = other
            super().__init__(optimizer)

        def state_dict(self) -> dict[str, Any]:
            return {k: v for k, v in super().state_dict().items() if k != "other"}

        def get_lr(self) -> list[Any]:
            self.other.param_groups[0]["lr"] = 0.2 * 0.5**self.last_epoch
            return [*self.base_lrs]

    class Two(Line):
        def build_optimizer(self, model: Any) -> Any:
            self.made = {
                "weight": optim.SGD([model.weight], lr=0.1),
                "bias": optim.SGD([model.bias], lr=0.2),
            }
            return self.made

        def build_scheduler(self, optimizer: Any) -> Any:
            return {"weight": Both(optimizer["weight"], optimizer["bias"])}

    task = Two()
    ls.train(task, line_config(steps=3), run_dir=tmp_path / "run", quiet=True)
    assert task.made["bias"].param_groups[0]["lr"] == 0.2 * 0.5**3


def test_what_a_hook_of_the_optimizer_writes_counts(tmp_path: Path) -> None:
    def halved(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    class Mine(Scheduled):
        def build_optimizer(self, model: Any) -> Any:
            made = super().build_optimizer(model)
            made.register_step_post_hook(halved)
            return made

        def build_scheduler(self, optimizer: Any) -> Any:
            return None

    ls.train(Mine(), config(), run_dir=tmp_path / "run", quiet=True)
    rates = rates_of(tmp_path / "run")
    assert rates == [0.1 * 0.5**step for step in range(STEPS)]


class CountsPasses(Line):
    """Counts its passes."""

    scratch = ("task.passes",)
    passes = 0

    def build_optimizer(self, model: Any) -> Any:
        return optim.LBFGS(model.parameters(), max_iter=1)

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        self.passes += 1
        return super().loss(model, batch)


def test_the_first_pass_of_lbfgs_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat_no_more_steps(monkeypatch)
    passes = []
    for steps in (20, 21):
        task = CountsPasses()
        ls.train(task, line_config(steps=steps, eval_every=1000), run_dir=tmp_path / str(steps))
        passes.append(task.passes)
    assert passes[1] - passes[0] == 4  # the microbatches of a step
