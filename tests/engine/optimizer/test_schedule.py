from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.launching.api.test_train import Line
from tests.launching.api.test_train import config as line_config
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    StepLR,
)

import lockstep as ls
from lockstep.config import ScheduleConfig, TrainConfig
from lockstep.engine.optimizer.schedule import lr_factor
from lockstep.engine.run.progress import Progress
from lockstep.errors import TaskError

LR, STEPS = 0.3, 40
NAMES = get_args(ScheduleConfig.model_fields["name"].annotation)


def factors(total: int, steps: int | None = None, **keys: Any) -> list[float]:
    schedule = ScheduleConfig(**keys)
    return [lr_factor(schedule, step, total) for step in range(total if steps is None else steps)]


def torchs(make: Any) -> list[float]:
    """The learning rates of a torch scheduler, as factors."""
    optimizer = SGD([torch.zeros(1)], lr=LR)
    scheduler: LRScheduler = make(optimizer)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"] / LR)
        optimizer.step()
        if len(found) < STEPS:  # some refuse to go further
            scheduler.step()
    return found


FALLING = [name for name in NAMES if name not in ("cosine_restarts", "onecycle")]


@st.composite
def schedules(draw: st.DrawFn, names: Sequence[str] = NAMES) -> ScheduleConfig:
    return ScheduleConfig(
        name=draw(st.sampled_from(names)),
        warmup_steps=draw(st.integers(0, 300)),
        min_ratio=draw(st.floats(0, 1)),
        step_size=draw(st.integers(1, 300)),
        gamma=draw(st.floats(1e-6, 1)),
        power=draw(st.floats(1e-3, 9)),
        cycle_steps=draw(st.integers(1, 300)),
        cycle_factor=draw(st.integers(1, 4)),
        peak=draw(st.floats(1e-3, 0.999)),
        start_ratio=draw(st.floats(1e-3, 1)),
    )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"name": "linear"}, [1.0, 3 / 4, 1 / 2, 1 / 4, 0.0, 0.0]),
        ({"name": "linear", "min_ratio": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"name": "linear", "warmup_steps": 2}, [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]),
        ({"name": "cosine"}, [1.0, 0.5 + 2**-1.5, 0.5, 0.5 - 2**-1.5, 0.0, 0.0]),
        ({"name": "cosine", "min_ratio": 0.5, "warmup_steps": 2}, [0.5, 1, 1, 0.75, 0.5, 0.5]),
        ({"name": "step", "step_size": 2, "gamma": 0.5}, [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]),
        (
            {"name": "step", "step_size": 2, "gamma": 0.1, "warmup_steps": 1},
            [1.0, 1.0, 1.0, 0.1, 0.1, 0.01],
        ),
    ],
)
def test_known_values(keys: dict[str, Any], expected: list[float]) -> None:
    assert factors(4, steps=6, **keys) == pytest.approx(expected, abs=1e-15)


@given(schedule=schedules(), total=st.integers(1, 250), step=st.integers(0, 1000))
@settings(max_examples=500)
def test_factor_lies_between_zero_and_one_at_any_step(
    schedule: ScheduleConfig, total: int, step: int
) -> None:
    factor = lr_factor(schedule, step, total, 0)
    assert math.isfinite(factor)
    assert 0.0 <= factor <= 1.0


@given(schedule=schedules(FALLING), total=st.integers(1, 250))
def test_rises_through_the_warmup_then_never_again(schedule: ScheduleConfig, total: int) -> None:
    values = [lr_factor(schedule, step, total, 0) for step in range(max(total, 300) + 50)]
    warmup = schedule.warmup_steps
    assert all(a < b for a, b in pairwise(values[:warmup]))
    assert all(a >= b for a, b in pairwise(values[max(0, warmup - 1) :]))


@given(schedule=schedules(), total=st.integers(1, 250))
def test_the_first_step_learns(schedule: ScheduleConfig, total: int) -> None:
    assert lr_factor(schedule, 0, total, 0) > 0


@given(schedule=schedules(FALLING), total=st.integers(1, 250))
def test_the_warmup_ends_at_the_full_rate(schedule: ScheduleConfig, total: int) -> None:
    warmup = schedule.warmup_steps
    if warmup:
        assert lr_factor(schedule, warmup - 1, total, 0) == 1.0
    if warmup < total:
        assert lr_factor(schedule, warmup, total, 0) == 1.0


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "step"])
@pytest.mark.parametrize(("warmup", "total"), [(10, 10), (20, 10), (1, 1), (0, 1), (5, 1)])
def test_a_warmup_as_long_as_the_run_is_a_plain_ramp(name: str, warmup: int, total: int) -> None:
    values = factors(total, name=name, warmup_steps=warmup)
    assert values == [(step + 1) / warmup if warmup else 1.0 for step in range(total)]


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("min_ratio", [0.0, 0.1, 1.0])
def test_beyond_the_end_the_rate_stays_at_its_lowest(name: str, min_ratio: float) -> None:
    for step in (10, 11, 10_000):
        schedule = ScheduleConfig(name=name, min_ratio=min_ratio)
        assert lr_factor(schedule, step, 10) == pytest.approx(min_ratio, abs=1e-15)


def test_plateau_is_torchs() -> None:
    losses = [
        5.0,
        4.0,
        4.5,
        4.2,
        4.1,
        3.0,
        3.5,
        3.0,
        3.2,
        3.1,
        3.3,
        3.4,
        3.5,
        2.9,
        3.0,
        *[4.0] * 12,
    ]
    optimizer = SGD([torch.zeros(1)], lr=LR)
    theirs = ReduceLROnPlateau(optimizer, factor=0.5, patience=2, threshold=0.0, min_lr=0.1 * LR)
    config = TrainConfig(
        watch="loss",
        schedule=ScheduleConfig(name="plateau", gamma=0.5, patience=2, min_ratio=0.1),
    )
    progress = Progress()
    for step, loss in enumerate(losses, start=1):
        theirs.step(loss)
        progress.step = step
        progress.judge(config, {"loss": loss})
        found = lr_factor(config.schedule, step, len(losses), progress.decays)
        assert found == pytest.approx(optimizer.param_groups[0]["lr"] / LR, abs=1e-15)
    assert found == 0.1


def test_cosine_is_torchs() -> None:
    theirs = torchs(lambda o: CosineAnnealingLR(o, T_max=STEPS, eta_min=0.1 * LR))
    assert factors(STEPS, name="cosine", min_ratio=0.1) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("cycle_factor", [1, 2])
def test_cosine_with_restarts_is_torchs(cycle_factor: int) -> None:
    theirs = torchs(lambda o: CosineAnnealingWarmRestarts(o, 6, cycle_factor, 0.1 * LR))
    keys = {"min_ratio": 0.1, "cycle_steps": 6, "cycle_factor": cycle_factor}
    assert factors(STEPS, name="cosine_restarts", **keys) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_polynomial_is_torchs(power: float) -> None:
    theirs = torchs(lambda o: PolynomialLR(o, STEPS, power))
    assert factors(STEPS, name="polynomial", power=power) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("peak", [0.1, 0.3, 0.9])
def test_one_cycle_is_torchs(peak: float) -> None:
    theirs = torchs(
        lambda o: OneCycleLR(
            o, LR, STEPS, pct_start=peak, cycle_momentum=False, final_div_factor=1e4
        )
    )[:STEPS]
    keys = {"peak": peak, "start_ratio": 1 / 25, "min_ratio": 1 / 25e4}
    assert factors(STEPS, name="onecycle", **keys) == pytest.approx(theirs, abs=1e-12)


def test_inverse_square_root_falls_from_the_end_of_the_warmup() -> None:
    values = factors(STEPS, name="inverse_sqrt", warmup_steps=4)
    assert values[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert values[8] == pytest.approx(2**-0.5)
    assert values[16] == pytest.approx(0.5)
    assert factors(5, name="inverse_sqrt")[3] == pytest.approx(0.5)


def test_linear_is_torchs() -> None:
    theirs = torchs(lambda o: LinearLR(o, 1.0, 0.2, total_iters=STEPS))
    assert factors(STEPS, name="linear", min_ratio=0.2) == pytest.approx(theirs, abs=1e-12)


def test_steps_are_torchs() -> None:
    theirs = torchs(lambda o: StepLR(o, step_size=7, gamma=0.5))
    assert factors(STEPS, name="step", step_size=7, gamma=0.5) == pytest.approx(theirs, abs=1e-12)


def test_warmup_is_torchs_lambda() -> None:
    theirs = torchs(lambda o: LambdaLR(o, lambda step: min(1.0, (step + 1) / 10)))
    assert factors(STEPS, warmup_steps=10) == pytest.approx(theirs, abs=1e-12)


class Own(Line):
    """Has two parameter groups, and rates of its own."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.4}]
        return torch.optim.SGD(groups, lr=0.2)

    def lr_factor(self, step: int, total_steps: int) -> Any:
        return [1 - step / total_steps, 0.5]


def test_a_task_has_its_own_rates_for_each_group(tmp_path: Path) -> None:
    rates: list[list[float]] = []

    class Looks(ls.Hook):
        first_only = True

        def after_step(self, run: ls.Run) -> None:
            rates.append([group["lr"] for group in run.optimizer.param_groups])

    class Looked(Own):
        def hooks(self) -> list[ls.Hook]:
            return [Looks()]

    ls.train(Looked(), line_config(steps=4), run_dir=tmp_path, quiet=True)
    assert rates == [[0.2, 0.2], pytest.approx([0.15, 0.2]), [0.1, 0.2], pytest.approx([0.05, 0.2])]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.1], r"Bad\.lr_factor\(0, 4\): returned 1 factors; the optimizer has 2"),
        (math.nan, r"Bad\.lr_factor\(0, 4\): returned nan; must be a number of at least 0"),
        (-0.1, r"returned -0\.1; must be"),
        ("fast", "returned 'fast'; must be"),
        ([0.1, None], r"returned \[0\.1, None\]; must be"),
    ],
)
def test_own_rates_that_are_none(tmp_path: Path, value: Any, message: str) -> None:
    class Bad(Own):
        def lr_factor(self, step: int, total_steps: int) -> Any:
            return value

    with pytest.raises(TaskError, match=message):
        ls.train(Bad(), line_config(steps=4), run_dir=tmp_path, quiet=True)


def test_own_rates_that_change_by_themselves(tmp_path: Path) -> None:
    class Bad(Own):
        rate = 1.0

        def lr_factor(self, step: int, total_steps: int) -> Any:
            self.rate *= 0.9
            return self.rate

    with pytest.raises(TaskError, match="gave two values for one step"):
        ls.train(Bad(), line_config(steps=4), run_dir=tmp_path, quiet=True)


def test_own_rates_that_fail_late_end_the_run_in_order(tmp_path: Path) -> None:
    class Bad(Own):
        def lr_factor(self, step: int, total_steps: int) -> Any:
            return math.nan if step == 3 else 1.0

    with pytest.raises(TaskError, match=r"lr_factor\(3, 8\): returned nan") as caught:
        ls.train(Bad(), line_config(steps=8), run_dir=tmp_path, quiet=True)
    assert caught.value.is_shared
