"""State that microbatches and evaluations leave behind when training has gone on for a while."""

from __future__ import annotations

import builtins
import functools
import importlib
import itertools
import json
import math
import os
import queue
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.stepping import CountsSteps, repeat_no_more_steps
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep as ls
from lockstep.data.sampler import BatchLayout
from lockstep.engine.audit import pass_state
from lockstep.engine.audit.reachable import modules_around
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.errors import TaskError
from lockstep.launching import api as front
from lockstep.launching.api import Session

SAMPLES = 48
LATE = 5
NUM_SEEN = [0]


@pytest.fixture(autouse=True)
def _looks_whenever_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found does not depend on how busy the machine is."""
    monkeypatch.setattr(pass_state, "_LEAST_SECONDS", math.inf)


@functools.cache
def box() -> list[int]:
    return [0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)
        self.scale = 1.0
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu()) * self.scale
        return y


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Late(CountsSteps):
    """A task that may do something from step `LATE` on."""

    @property
    def is_late(self) -> bool:
        return self.step >= LATE

    def build_model(self) -> nn.Module:
        return Net()

    def dataset(self, split: str) -> Dataset[Any] | None:
        return None if split == "test" else TensorDataset(*samples())

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = self.plain(model, batch)
        return ls.Loss(loss.sum * self.factor(model, loss), loss.weight)

    def plain(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        return ls.Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))

    def factor(self, model: Any, loss: ls.Loss) -> float:
        return 1.0


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 3, generator=generator), torch.arange(SAMPLES) % 2


class Numbered(Late):
    """Weighs each sample, by its number and its loss."""

    def dataset(self, split: str) -> Dataset[Any] | None:
        return TensorDataset(*samples(), torch.arange(SAMPLES)) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y, numbers = batch
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        if self.is_late:
            pairs = zip(numbers.tolist(), losses.tolist(), strict=True)
            losses = losses * torch.tensor([self.weight(*pair) for pair in pairs])
        return ls.Loss(losses.sum(), len(y))

    def weight(self, number: int, loss: float) -> float:
        return 1.0


class Samples(Dataset[Any]):
    """A dataset that may keep something from the second epoch on."""

    epoch = 0

    def __init__(self) -> None:
        self.x, self.y = samples()

    def __len__(self) -> int:
        return len(self.y)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def run(folder: Path, task: ls.Task, **more: Any) -> ls.Result:
    values: dict[str, Any] = {"batch_size": 12, "num_microbatches": 4, "steps": 12, "lr": 0.1}
    values |= {"eval_every": 6, "eval_batch_size": 16, "checkpoint": {"every": 6}}
    config = ls.TrainConfig(**values | more)
    return front.run(task, config, Session(str(folder), console=False))


class Mean(Late):
    mean = 1.0

    def factor(self, model: Any, loss: ls.Loss) -> float:
        if self.is_late:
            self.mean = 0.9 * self.mean + 0.1 * float(loss.sum)
        return self.mean


class RareCount(Late):
    hard = 0

    def factor(self, model: Any, loss: ls.Loss) -> float:
        if model.training and self.is_late and float(loss.sum) % 0.01 > 0.007:
            self.hard += 1
        return 1 + 0.1 * self.hard


class OfModule(Late):
    def factor(self, model: Any, loss: ls.Loss) -> float:
        if self.is_late:
            model.scale *= 0.99
        return 1.0


class OfSlots(Late):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.kept = Slotted()

    def factor(self, model: Any, loss: ls.Loss) -> float:
        if self.is_late:
            self.kept.value *= 1.01
        return self.kept.value


class OfHook(Late):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.hook = Remembers()

    def hooks(self) -> list[ls.Hook]:
        return [self.hook]

    def factor(self, model: Any, loss: ls.Loss) -> float:
        if self.is_late:
            self.hook.seen += 1
        return 1 + 0.01 * self.hook.seen


class Remembers(ls.Hook):
    seen = 0

    def after_step(self, run: ls.Run) -> None:
        pass


class OfEvaluation(Late):
    last = 1.0

    def evaluate(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = self.plain(model, batch)
        if self.is_late:
            self.last = float(loss.sum)
        return loss

    def factor(self, model: Any, loss: ls.Loss) -> float:
        return self.last


class InCachedResult(Late):
    """Counts evaluation batches, with an effect after many of them only."""

    def evaluate(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = self.plain(model, batch)
        box()[0] += self.is_late
        return ls.Loss(loss.sum * (2 if box()[0] > 1000 else 1), loss.weight)


class InDict(Late):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.seen: dict[float, float] = {}

    def factor(self, model: Any, loss: ls.Loss) -> float:
        key = round(float(loss.weight))
        if self.is_late:
            self.seen[key] = self.seen.get(key, 0.0) + 1
        return 1 + 0.1 * self.seen.get(key, 0.0)


class InArray(Late):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.sums = np.ones(3)

    def factor(self, model: Any, loss: ls.Loss) -> float:
        if self.is_late:
            self.sums += 0.01
        return float(self.sums[0])


class InDeque(Late):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.window: deque[float] = deque([1.0], maxlen=3)

    def factor(self, model: Any, loss: ls.Loss) -> float:
        if self.is_late:
            self.window.append(float(loss.sum))
        return sum(self.window) / len(self.window)


class InClass(Late):
    count = 0

    def factor(self, model: Any, loss: ls.Loss) -> float:
        if self.is_late:
            type(self).count += 1
        return 1 + 0.1 * self.count


class InGlobal(Late):
    def factor(self, model: Any, loss: ls.Loss) -> float:
        if self.is_late:
            NUM_SEEN[0] += 1
        return 1 + 0.1 * NUM_SEEN[0]


class BehindItsBack(Late):
    scale = 1.0

    def factor(self, model: Any, loss: ls.Loss) -> float:
        if self.is_late:
            vars(self)["scale"] = self.scale * 1.01
        return self.scale


class OfMode(Late):
    def build_model(self) -> nn.Module:
        model = Net()
        model.add_module("drop", nn.Dropout(0.5))
        return model

    def factor(self, model: Any, loss: ls.Loss) -> float:
        was_training = model.drop.training
        if self.is_late and model.training:
            model.drop.eval()
        return 1.0 if was_training else 2.0


class SetsItself(Net):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


class OfOwnMode(Late):
    def build_model(self) -> nn.Module:
        return SetsItself()

    def factor(self, model: Any, loss: ls.Loss) -> float:
        was_training: bool = model.training
        if self.is_late:
            model.training = False
        return 1.0 if was_training else 2.0


class OfDataset(Late):
    def dataset(self, split: str) -> Dataset[Any] | None:
        class Counts(Samples):
            seen = 0

            def __getitem__(self, index: int) -> Any:
                if self.epoch:
                    self.seen += 1
                return self.x[index] + 0.01 * self.seen, self.y[index]

        return Counts() if split == "train" else super().dataset(split)


class InPlace(Late):
    def dataset(self, split: str) -> Dataset[Any] | None:
        class Fades(Samples):
            def __getitem__(self, index: int) -> Any:
                if self.epoch:
                    self.x[index] *= 0.9
                return self.x[index], self.y[index]

        return Fades() if split == "train" else super().dataset(split)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (Mean, r"task\.mean"),
        (RareCount, r"task\.hard"),
        (OfModule, r"model\.scale"),
        (OfSlots, r"task\.kept\.value"),
        (OfHook, r"task\.hook\.seen"),
        (OfEvaluation, r"task\.last"),
        (InCachedResult, r"\.box\.cache"),
        (InDict, r"task\.seen"),
        (InArray, r"task\.sums"),
        (InDeque, r"task\.window"),
        (InClass, r"task\.count"),
        (InGlobal, r"\.NUM_SEEN"),
        (BehindItsBack, r"task\.scale"),
        (OfMode, r"model\.drop\.training"),
        (OfDataset, r"dataset\('train'\)\.seen"),
        (InPlace, r"dataset\('train'\)\.x"),
    ],
)
def test_state_of_microbatches_that_begins_late_is_refused_by_name(
    tmp_path: Path, kind: type[ls.Task], place: str
) -> None:
    with pytest.raises(TaskError, match=place):
        run(tmp_path, kind())


class SetsDtype(Late):
    def factor(self, model: Any, loss: ls.Loss) -> float:
        was = torch.get_default_dtype()
        if self.is_late:
            torch.set_default_dtype(torch.float64)
        return 1.0 if was == torch.float32 else 1.1


def test_a_setting_of_torch_that_a_microbatch_changes_is_named(tmp_path: Path) -> None:
    try:
        with pytest.raises(TaskError, match=r"step 5: .* torch\.get_default_dtype\(\)"):
            run(tmp_path, SetsDtype())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (Mean, r"task\.mean"),
        (OfModule, r"model\.scale"),
        (OfSlots, r"task\.kept\.value"),
        (OfHook, r"task\.hook\.seen"),
        (OfMode, r"model\.drop\.training"),
        (OfOwnMode, r"model\.training"),
        (SetsDtype, r"torch\.get_default_dtype"),
    ],
)
def test_attributes_modes_and_settings_are_noticed_in_steps_that_nobody_looks_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ls.Task], place: str
) -> None:
    def plan(state: pass_state.PassState, step: int) -> None:
        state._block, state._looks, state.tries, state.quiet = range(99), set(), set(), {*range(99)}

    monkeypatch.setattr(pass_state.PassState, "_plan", plan)
    try:
        with pytest.raises(TaskError, match=rf"step [56]: .*{place}"):
            run(tmp_path, kind())
    finally:
        torch.set_default_dtype(torch.float32)


class SetBetweenSteps(Late):
    """An optimizer that evaluates the loss again, and a factor that each step changes after it."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def factor(self, model: Any, loss: ls.Loss) -> float:
        return 1 / (1 + 0.1 * self.step)


def test_what_is_set_after_a_step_is_no_state_of_passes_that_an_optimizer_has_asked_for(
    tmp_path: Path,
) -> None:
    assert run(tmp_path, SetBetweenSteps()).status == "completed"


class InEnvironment(Late):
    def factor(self, model: Any, loss: ls.Loss) -> float:
        count = int(os.environ.get("LATE_STATE", "0"))
        if self.is_late:
            os.environ["LATE_STATE"] = str(count + 1)
        return 1 + 0.1 * count


class InThread(Late):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.asked: Any = queue.SimpleQueue()
        self.answers: Any = queue.SimpleQueue()
        threading.Thread(target=self.count, daemon=True).start()

    def count(self) -> None:
        for number in itertools.count():
            self.asked.get()
            self.answers.put(number)

    def factor(self, model: Any, loss: ls.Loss) -> float:
        if not self.is_late:
            return 1.0
        self.asked.put(None)
        return 1 + 0.1 * float(self.answers.get())


class OfGlobalGenerator(Late):
    def factor(self, model: Any, loss: ls.Loss) -> float:
        if not self.is_late:
            return 1.0
        kept = getattr(builtins, "kept_state", None)
        if kept is not None:
            torch.set_rng_state(kept)
        value = float(torch.rand(1))
        builtins.kept_state = torch.get_rng_state()  # type: ignore[attr-defined]
        return 1 + value


class InGenerator(Late):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)

        def counting() -> Iterator[int]:
            number = 0
            while True:
                yield number
                number += 1

        self.numbers = counting()

    def factor(self, model: Any, loss: ls.Loss) -> float:
        return 1 + 0.1 * next(self.numbers) if self.is_late else 1.0


@pytest.mark.parametrize("kind", [InEnvironment, InThread, OfGlobalGenerator, InGenerator])
def test_state_that_lies_where_nobody_looks_is_found_by_doing_steps_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ls.Task]
) -> None:
    monkeypatch.setenv("LATE_STATE", "0")
    with pytest.raises(TaskError, match=r"step 5: gave another result|task\.numbers|os\.environ"):
        run(tmp_path, kind())


class NumbersBatches(Late):
    """Gives each new batch the next number: a cache by its looks, in the order of passes."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.numbers: dict[float, int] = defaultdict(itertools.count().__next__)

    def factor(self, model: Any, loss: ls.Loss) -> float:
        return 1 + 0.05 * self.numbers[float(loss.sum)] if self.is_late else 1.0


def test_a_cache_whose_values_depend_on_the_order_of_passes_is_none(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"step \d+: gave another result .* task\.numbers"):
        run(tmp_path, NumbersBatches())


class AtTheEnd(InThread):
    """Begins in the last step, which is none that is done again in any case."""

    @property
    def is_late(self) -> bool:
        return self.step >= 10


def test_the_last_step_is_done_again_if_that_takes_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TaskError, match="step 10: gave another result"):
        run(tmp_path / "found", AtTheEnd(), steps=11)
    with pytest.raises(TaskError, match="step 10: gave another result"):
        run(tmp_path / "of_session", AtTheEnd(), steps=13, stop_at_step=11)
    repeat_no_more_steps(monkeypatch)
    assert run(tmp_path / "missed", AtTheEnd(), steps=11).step == 11


class NowAndThen(InThread):
    """Counts in all steps, with an effect in some of them."""

    effective = range(8, 100, 4)  # the first steps of epochs

    def factor(self, model: Any, loss: ls.Loss) -> float:
        factor = super().factor(model, loss)
        return factor if self.step in self.effective else 1.0


class AnyStep(NowAndThen):
    effective = range(13, 14)


@pytest.mark.parametrize(("kind", "step"), [(NowAndThen, 8), (AnyStep, 13)])
def test_some_more_steps_are_done_again_among_them_those_that_begin_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ls.Task], step: int
) -> None:
    with pytest.raises(TaskError, match=f"step {step}: gave another result"):
        run(tmp_path / "found", kind(), steps=15, seed=0)
    repeat_no_more_steps(monkeypatch)
    assert run(tmp_path / "missed", kind(), steps=15, seed=0).step == 15


FAR = """
import functools
COUNTS, KEPT, NOW = [0], {}, [0.0]
def counted():
    COUNTS[0] += 1
    return 1 + 0.1 * COUNTS[0]
def kept(key, loss):
    return KEPT.setdefault(key, loss)
@functools.cache
def stale(key):
    return NOW[0]
"""


@pytest.fixture
def far_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of another folder, which this one has imported by way of a third."""
    for name, text in (("far_away", FAR), ("on_the_way", "import far_away")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    on_the_way = importlib.import_module("on_the_way")
    monkeypatch.setattr(sys.modules[__name__], "on_the_way", on_the_way, raising=False)
    yield on_the_way.far_away
    sys.modules.pop("on_the_way")
    sys.modules.pop("far_away")


class CountsFarAway(Late):
    def factor(self, model: Any, loss: ls.Loss) -> float:
        return float(sys.modules["far_away"].counted()) if self.is_late else 1.0


class KeepsFarAway(Numbered):
    """Weighs each sample by its first loss: where that is kept, all later epochs read it."""

    def weight(self, number: int, loss: float) -> float:
        return float(sys.modules["far_away"].kept(number, loss))


class CachedFarAway(Numbered):
    def weight(self, number: int, loss: float) -> float:
        sys.modules["far_away"].NOW[0] = loss
        return float(sys.modules["far_away"].stale(number))


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (CountsFarAway, r"far_away\.COUNTS"),
        (KeepsFarAway, r"far_away\.KEPT"),
        (CachedFarAway, r"far_away\.(stale|NOW)"),
    ],
)
def test_modules_of_other_folders_are_looked_at_if_the_tasks_module_leads_to_them(
    tmp_path: Path, far_away: Any, kind: type[ls.Task], place: str
) -> None:
    with pytest.raises(TaskError, match=place):
        run(tmp_path, kind())


@pytest.mark.parametrize(
    ("folder", "is_of_user"),
    [("my-packages/code", True), ("lib/site-packages", False), ("dist-packages/them/part", False)],
)
def test_modules_of_installed_packages_are_known_by_their_folder(
    monkeypatch: pytest.MonkeyPatch, folder: str, is_of_user: bool
) -> None:
    module = types.ModuleType("some_module")
    module.__file__ = f"/{folder}/some_module.py"
    monkeypatch.setitem(sys.modules, "some_module", module)
    kind = type("Kind", (), {"__module__": "some_module"})
    assert ("some_module" in modules_around([kind], with_folders=False)) == is_of_user


def watched(num_steps: int, has_validation: bool = True, **keys: Any) -> pass_state.PassState:
    """What chooses the steps of a run that are looked at and repeated."""
    config = ls.TrainConfig(batch_size=12, steps=num_steps, **keys)
    layout = BatchLayout(SAMPLES, 12, 1)
    saves = pass_state.ForeseenSaves(config, layout, num_steps, has_validation)
    return pass_state.PassState(TaskState(Late(), ()), Net(), {}, seed=0, saves=saves)


def foreseen(num_steps: int, spent: float, **keys: Any) -> list[float]:
    """How long each of some steps may take to be repeated."""
    state = watched(num_steps, **keys)
    state.is_due(0)
    return [state.seconds_to_repeat(step, spent) for step in range(num_steps)]


def test_steps_before_foreseen_checkpoints_are_repeated_within_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least = 0.2
    monkeypatch.setattr(pass_state, "_MOST_TIME", 1e-12)
    monkeypatch.setattr(pass_state, "_LEAST_SECONDS", least)
    keys: dict[str, Any] = {"eval_every": 5, "checkpoint": {"every": 6}}
    others = {7, 8, 12, 16, 20} | {13, 18}  # where epochs begin, and now and then
    due = {step for step, most in enumerate(foreseen(23, 0.0, **keys)) if most}
    assert due == others | {4, 5, 9, 11, 14, 17, 19, 22}
    at_epochs = {step for step, most in enumerate(foreseen(23, 0.0)) if most}
    assert at_epochs == others | {3, 11, 15, 19, 22}
    left = foreseen(23, 0.75 * least, **keys)
    assert (left[5], left[7], left[22]) == (pytest.approx(0.25 * least), math.inf, least)


def test_an_evaluation_is_followed_by_no_checkpoint_where_there_is_none() -> None:
    keys: dict[str, Any] = {"eval_every": 30, "checkpoint": {"every": 1000}}
    saved = [
        {step for step in range(99) if watched(100, has_validation, **keys).is_due(step)}
        for has_validation in (True, False)
    ]
    assert saved[0] - saved[1] == {29, 59, 89}


def test_repetitions_that_take_too_long_are_tried_again_once_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(pass_state, "perf_counter", lambda: now)
    monkeypatch.setattr(pass_state, "_LEAST_SECONDS", 0.1)
    state = watched(600, checkpoint={"every": 1000})
    state.is_due(200)
    tries, quiet = {*state.tries}, {*state.quiet}
    first = min(tries)
    now = 100.0
    spent = 0.002 * now
    assert not state.may_repeat(first, 0.002 * 3, spent, step_s=0.1)  # but in three seconds
    assert not state.is_due(first)
    dropped = tries - state.tries
    assert {step for step in tries if step < first + 30} >= dropped != set()
    assert state.quiet == quiet | dropped
    assert not [step for step in dropped if state.is_due(step)]
    state.is_due(300)  # the next hundred
    assert len(state.tries) > len(tries) / 2


def test_repetitions_go_on_where_steps_have_become_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pass_state, "perf_counter", lambda: now)
    monkeypatch.setattr(pass_state, "_LEAST_SECONDS", 0.1)
    state = watched(900, checkpoint={"every": 1000})
    state.is_due(200)
    tries = len(state.tries)
    assert not state.may_repeat(min(state.tries), 100.0, 0.0, step_s=0.1)
    state.is_due(300)
    assert len(state.tries) < tries / 2
    now = 1e6
    assert state.may_repeat(min(state.tries), 100.0, 0.0, step_s=0.1)  # one that is tried anyway
    state.is_due(400)
    assert len(state.tries) > tries / 2


def test_one_of_each_hundred_steps_is_looked_at_wherever_a_session_begins() -> None:
    keys: dict[str, Any] = {"eval_every": 1000, "checkpoint": {"every": 130}, "stop_at_step": 450}

    def looked_at(first: int) -> set[int]:
        state = watched(600, **keys)
        return {step for step in range(first, 600) if state.is_due(step)}

    powers = {(1 << bits) - 1 for bits in range(10)}
    drawn = looked_at(0) - powers - {129, 259, 389, 449, 519, 599}  # before saves and ends
    assert [step // 100 for step in sorted(drawn)] == [0, 1, 2, 3, 4, 5]
    assert powers <= looked_at(0)
    assert looked_at(250) == {step for step in looked_at(0) if step >= 250}


class Counted(Late):
    """Counts what the loop does once a step; its samples come from a stream."""

    scratch = ("task.seen", "Counted.seen")
    seen: tuple[list[str], list[float]] = [], []  # of all objects: a run has one of its own

    def hooks(self) -> list[ls.Hook]:
        task = self

        class Counts(ls.Hook):
            first_only = True

            def after_step(self, run: ls.Run) -> None:
                task.seen[0].append(f"hook {run.step} {run.train}")

        return [Counts()]

    def build_scheduler(self, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)

    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        self.seen[0].append(f"{step} {float(torch.rand(1))}")

    def factor(self, model: Any, loss: ls.Loss) -> float:
        self.seen[1].append(0.5 + float(torch.rand(1)))
        return self.seen[1][-1]


class CountedStream(Counted):
    def dataset(self, split: str) -> Any:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                yield from zip(*samples(), strict=True)

        return Stream() if split == "train" else super().dataset(split)


def trace(folder: Path) -> list[Any]:
    """What a run's events say, without what its hardware has to do with."""
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kept = ("event", "step", "num_steps", "epoch", "loss", "metrics", "lr", "samples", "split")
    return [
        [row.get(name) for name in kept]
        for row in rows
        if row["event"] in ("StepDone", "Evaluated", "CheckpointSaved", "Improved")
    ]


@pytest.mark.parametrize("kind", [Counted, CountedStream])
def test_a_step_that_is_done_again_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Counted]
) -> None:
    monkeypatch.setattr(Counted, "seen", often := ([], []))
    found = run(tmp_path / "often", kind(), steps=11, log_every=1)
    monkeypatch.setattr(Counted, "seen", once := ([], []))
    repeat_no_more_steps(monkeypatch)
    plain = run(tmp_path / "once", kind(), steps=11, log_every=1)
    assert len(often[1]) > len(once[1]) > 0
    assert often[0] == once[0] != []
    assert (found.params_sha256, found.metrics) == (plain.params_sha256, plain.metrics)
    assert trace(tmp_path / "often") == trace(tmp_path / "once") != []


class Memo(Late):
    """Keeps what it has computed of each number of samples, and of each batch's first label."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.weights: dict[int, Tensor] = {}
        self.mask: Tensor | None = None

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        y = batch[1]
        if self.is_late and (self.mask is None or len(self.mask) < len(y)):
            self.mask = torch.ones(len(y))
        if self.is_late:
            key = int(y[0]) + 2 * len(y)
            weights = self.weights.setdefault(key, torch.ones(len(y)))
            loss = self.plain(model, batch)
            return ls.Loss(loss.sum * weights.mean() * self.mask.mean(), loss.weight)
        return self.plain(model, batch)


class LastLogits(Late):
    """Keeps what only the same microbatch reads."""

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        if self.is_late:
            self.logits = model(x)
            return ls.Loss(nn.functional.cross_entropy(self.logits, y, reduction="sum"), len(y))
        return self.plain(model, batch)


class OpensParts(Late):
    """Reads a part of its samples at a time, as from files."""

    def dataset(self, split: str) -> Dataset[Any] | None:
        class Parts(Samples):
            present, part = -1, None

            def __getitem__(self, index: int) -> Any:
                if index // 16 != self.present and self.epoch:
                    self.present = index // 16
                    self.part = self.x[16 * self.present : 16 * self.present + 16].clone()
                if not self.epoch:
                    return self.x[index], self.y[index]
                return self.part[index % 16], self.y[index]  # type: ignore[index]

        return Parts() if split == "train" else super().dataset(split)


@pytest.mark.parametrize("kind", [Memo, LastLogits, OpensParts])
def test_caches_change_no_bit_and_are_let_be(tmp_path: Path, kind: type[ls.Task]) -> None:
    plain = run(tmp_path / "plain", Late())
    cached = run(tmp_path / "cached", kind())
    assert cached.params_sha256 == plain.params_sha256
    assert cached.metrics == plain.metrics


class Shown(Late):
    scratch = ("task.calls",)
    calls = 0

    def factor(self, model: Any, loss: ls.Loss) -> float:
        if self.is_late:
            self.calls += 1
        return 1.0


def test_what_a_task_names_in_scratch_may_be_set_and_read_by_any_microbatch(tmp_path: Path) -> None:
    assert run(tmp_path, Shown()).step == 12


class ShownInEnvironment(Late):
    """Tells others of the process, by a variable that no result depends on."""

    scratch = ("os.environ",)

    def factor(self, model: Any, loss: ls.Loss) -> float:
        os.environ["LATE_STATE"] = str(int(os.environ["LATE_STATE"]) + 1)
        return 1.0


def test_environment_variables_can_be_named_in_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATE_STATE", "0")
    assert run(tmp_path, ShownInEnvironment()).step == 12


class Unsaid(Shown):
    scratch = ()


def test_a_counter_that_nothing_depends_on_has_to_be_named_in_the_end(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"over and over again.*scratch = \('task\.calls',\)"):
        run(tmp_path, Unsaid(), steps=24)


class EvaluationMean(Late):
    mean: Tensor | None = None

    def evaluate(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        logits = model(x)
        own = logits.mean(0)
        if self.is_late:
            self.mean = own if self.mean is None else 0.9 * self.mean + 0.1 * own
            logits = logits - self.mean
        return ls.Loss(nn.functional.cross_entropy(logits, y, reduction="sum"), len(y))


class EvaluationCount(Late):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.counts = [0]

    def evaluate(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = self.plain(model, batch)
        if self.is_late:
            self.counts[0] += 1
        return ls.Loss(loss.sum + self.counts[0], loss.weight)


class EvaluationNoise(Late):
    def dataset(self, split: str) -> Dataset[Any] | None:
        task = self

        class Noisy(Samples):
            noise = torch.Generator().manual_seed(5)

            def __getitem__(self, index: int) -> Any:
                more = torch.randn(3, generator=self.noise) if task.is_late else 0.0
                return self.x[index] + more, self.y[index]

        return Noisy() if split == "val" else super().dataset(split)


class EvaluationInPlace(Late):
    def dataset(self, split: str) -> Dataset[Any] | None:
        task = self

        class Normed(Samples):
            def __getitem__(self, index: int) -> Any:
                if task.is_late:
                    self.x[index] /= 2
                return self.x[index], self.y[index]

        return Normed() if split == "val" else super().dataset(split)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (EvaluationMean, r"the evaluation of val: .* task\.mean"),
        (EvaluationCount, r"the evaluation of val: .* task\.counts"),
        (EvaluationNoise, r"the evaluation of val: .* dataset\('val'\)\.noise"),
        (EvaluationInPlace, r"the evaluation of val: .* dataset\('val'\)\.x"),
    ],
)
def test_state_of_evaluations_that_begins_late_is_refused_by_name(
    tmp_path: Path, kind: type[ls.Task], place: str
) -> None:
    with pytest.raises(TaskError, match=place):
        run(tmp_path, kind())


class MeanFromTheStart(EvaluationMean):
    is_late = True  # type: ignore[assignment]


class NoiseFromTheStart(EvaluationNoise):
    is_late = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (MeanFromTheStart, "Task.evaluate: gave another loss of val"),
        (NoiseFromTheStart, r"dataset\('val'\): gave another batch"),
    ],
)
def test_a_batch_is_evaluated_again_after_another_one_before_training(
    tmp_path: Path, kind: type[ls.Task], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        run(tmp_path, kind())


class Forgets(Late):
    """A `state_dict` that leaves something out once training has warmed up."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.total = 0

    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        self.total += step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step} | ({} if self.step > 9 else {"total": self.total})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.total = state.get("total", 0)


class Replaces(Late):
    """Puts a new module in place between two steps that are looked at."""

    def after_step(self, model: Any, step: int) -> None:
        super().after_step(model, step)
        if step == 13:
            model.extra = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Forgets,
            r"task\.total: is changed by after_step, and does not come back .*"
            r"scratch = \('task\.total',\)",
        ),
        (Replaces, r"extra\.weight is another tensor than when the model was built"),
    ],
)
def test_what_no_checkpoint_would_hold_is_found_before_it_is_saved(
    tmp_path: Path, kind: type[ls.Task], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        run(tmp_path, kind(), steps=13)
    assert not (tmp_path / "checkpoints" / "step_00000013").exists()


class StepsInGlobal(Late):
    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        NUM_SEEN[0] += 1


class StepsInClass(Late):
    num_steps = 0

    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        type(self).num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"num_steps": self.num_steps}


class ListInClass(Late):
    kept: list[int] = []  # noqa: RUF012

    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        self.kept.append(step)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"kept": self.kept}


class HookInClass(Late):
    def hooks(self) -> list[ls.Hook]:
        return [CountsInClass()]


class CountsInClass(ls.Hook):
    seen = 0

    def after_step(self, run: ls.Run) -> None:
        CountsInClass.seen += 1


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (StepsInGlobal, r"\.NUM_SEEN\[0\]"),
        (StepsInClass, r"StepsInClass\.num_steps"),
        (ListInClass, r"ListInClass\.kept"),
        (HookInClass, r"CountsInClass\.seen"),
    ],
)
def test_what_after_step_keeps_in_classes_and_modules_is_refused(
    tmp_path: Path, kind: type[ls.Task], place: str
) -> None:
    with pytest.raises(TaskError, match=rf"{place}: is changed by after_step, and belongs to"):
        run(tmp_path, kind())


class Allowed(Late):
    """Shares, as what it may: a cached function, a variable named in `scratch`, a dict it saves."""

    scratch = ("Allowed.calls",)
    calls = 0

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.shared = SHARED

    def after_step(self, model: nn.Module, step: int) -> None:
        super().after_step(model, step)
        type(self).calls += 1
        self.shared["twice"] = twice(step)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"shared": dict(self.shared)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.shared.update(state["shared"])


SHARED = {"twice": 0}


@functools.cache
def twice(step: int) -> int:
    return 2 * step


def test_what_after_step_shares_may_be_saved_cached_or_named_in_scratch(tmp_path: Path) -> None:
    assert run(tmp_path, Allowed()).step == 12


class GlobalCounter(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        NUM_SEEN[0] += 1
        for group in self.param_groups:
            group["lr"] *= 1 + 0.01 * NUM_SEEN[0]
        return super().step(closure)


class OwnOptimizer(Late):
    def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        return GlobalCounter(model.parameters(), lr=0.1)


class InnerOptimizer(Late):
    """Counts in a closure, inside of an optimizer that is Lockstep's."""

    def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        seen: list[int] = []

        class Counts(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                seen.append(1)
                return super().step(closure)

        return ls.optim.SAM(model.parameters(), lambda groups: Counts(groups, lr=0.1))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OwnOptimizer, r"NUM_SEEN\[0\]: is changed by GlobalCounter\.step"),
        (InnerOptimizer, r"Counts\.step\..*seen: is changed by SAM\.step"),
    ],
)
def test_state_of_an_optimizer_outside_of_it_is_refused_by_name(
    tmp_path: Path, kind: type[ls.Task], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        run(tmp_path, kind())


def test_classes_are_as_they_were_after_training(tmp_path: Path) -> None:
    before = {kind: dict(vars(kind)) for kind in (Late, Net, Memo, nn.Module)}
    run(tmp_path, Memo())
    assert {kind: dict(vars(kind)) for kind in before} == before
