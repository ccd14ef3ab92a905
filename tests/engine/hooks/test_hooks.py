"""Hooks in one process: when they are called, what they may do, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import slow
from tests.launching.api.test_train import Line, config

import lockstep as ls
from lockstep.errors import CheckpointError, ConfigError, TaskError, TaskFailure


def train(task: ls.Task, folder: Path, resume: bool = False, **keys: Any) -> ls.Result:
    return ls.train(task, config(**keys), run_dir=folder, resume=resume, quiet=True)


def with_hooks(make: Callable[[], list[Any]]) -> ls.Task:
    class Hooked(Line):
        def hooks(self) -> list[ls.Hook]:
            return make()

    return Hooked()


class Diary(ls.Hook):
    first_only = True

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_start(self, run: ls.Run) -> None:
        self.lines.append(f"start {run.step} of {run.total_steps}")

    def after_step(self, run: ls.Run) -> None:
        assert run.train["loss"] >= 0
        assert run.lr == 0.1
        assert run.grad_norm > 0
        self.lines.append(f"step {run.step} epoch {run.epoch} {run.is_epoch_end}")

    def after_evaluation(self, run: ls.Run, split: str, metrics: dict[str, float]) -> None:
        assert run.evaluated[f"{split}/loss"] == metrics["loss"]
        self.lines.append(f"{split} {run.step}")

    def after_checkpoint(self, run: ls.Run, folder: Path) -> None:
        assert (folder / "manifest.json").is_file()
        self.lines.append(folder.name)

    def on_end(self, run: ls.Run, status: str, reason: str) -> None:
        self.lines.append(f"{status}: {reason}")


def test_are_called_at_their_moments_in_order(tmp_path: Path) -> None:
    diary = Diary()
    keys = {"checkpoint": {"background": False}}
    train(with_hooks(lambda: [diary]), tmp_path, epochs=1, **keys)
    assert diary.lines == [
        "start 0 of 4",
        "step 1 epoch 0 False",
        "step 2 epoch 0 False",
        "step 3 epoch 0 False",
        "step 4 epoch 0 True",
        "val 4",
        "step_00000004",
        "completed: all steps done",
    ]


def test_change_nothing_where_they_only_look(tmp_path: Path) -> None:
    plain = train(Line(), tmp_path / "plain", epochs=2)
    looked = train(with_hooks(lambda: [Diary(), ls.hooks.EMA()]), tmp_path / "looked", epochs=2)
    assert looked.params_sha256 == plain.params_sha256


class Changes(ls.Hook):
    def after_step(self, run: ls.Run) -> None:
        with torch.no_grad():
            run.model.get_parameter("bias").add_(0.01)


class MayChange(Changes):
    changes_model = True


class Hides(ls.Hook):
    def after_step(self, run: ls.Run) -> None:
        run.model.get_parameter("bias").data.add_(0.01)


class Forgets(ls.Hook):
    count = 0

    def after_step(self, run: ls.Run) -> None:
        self.count += 1


class SavesOnly(Forgets):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


class Raises(ls.Hook):
    def after_step(self, run: ls.Run) -> None:
        if run.step == 2:
            raise RuntimeError("no more")


class StopsAlone(ls.Hook):
    first_only = True

    def after_step(self, run: ls.Run) -> None:
        run.stop("enough")


class TunesAlone(ls.Hook):
    first_only = True

    def after_step(self, run: ls.Run) -> None:
        run.optimizer.param_groups[0]["weight_decay"] = 0.1


class ForgetsMomentsAlone(ls.Hook):
    first_only = True

    def after_step(self, run: ls.Run) -> None:
        for state in run.optimizer.state.values():
            state["exp_avg"].zero_()


class ChangesAlone(MayChange):
    first_only = True


class AtTheEnd(ls.Hook):
    def on_end(self, run: ls.Run, status: str, reason: str) -> None:
        raise OSError("the disk is full")


class LeavesEvaluationMode(ls.Hook):
    first_only = True

    def after_step(self, run: ls.Run) -> None:
        if run.step == 11:  # where no other changes are looked for
            run.model.eval()


class StopsAtOnce(ls.Hook):
    def on_start(self, run: ls.Run) -> None:
        run.stop("nothing to do")


class StopsWhenSaved(ls.Hook):
    def after_checkpoint(self, run: ls.Run, folder: Path) -> None:
        run.stop("saved")


@pytest.mark.parametrize(
    ("hook", "kind", "message"),
    [
        (
            LeavesEvaluationMode,
            TaskError,
            r"model\.training: is changed by LeavesEvaluationMode\.after_step",
        ),
        (StopsWhenSaved, TaskError, r"StopsWhenSaved\.after_checkpoint: cannot end the run"),
        (
            Changes,
            TaskError,
            r"Changes\.after_step: bias was changed; set `changes_model",
        ),
        (Hides, TaskError, r"Hides\.after_step: bias was changed"),
        (Forgets, TaskError, r"hooks\[0\]\.count: is changed by after_step, and does not come"),
        (SavesOnly, TaskError, r"SavesOnly\.load_state_dict: is missing"),
        (Raises, TaskFailure, "no more"),
        (StopsAlone, TaskError, "StopsAlone: has first_only = True, so it cannot end the run"),
        (ChangesAlone, TaskError, r"Hooked\.hooks: ChangesAlone has first_only = True and"),
        (StopsAtOnce, TaskError, r"StopsAtOnce\.on_start: cannot end the run; call run\.stop in"),
        (TunesAlone, TaskError, r"TunesAlone\.after_step: the optimizer was changed, on the first"),
        (ForgetsMomentsAlone, TaskError, r"ForgetsMomentsAlone\.after_step: the optimizer was"),
        (AtTheEnd, TaskFailure, "the disk is full"),
        (lambda: "a text", TaskError, r"Hooked\.hooks: 'a text' is no lockstep\.Hook"),
    ],
)
def test_refusals(tmp_path: Path, hook: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        train(with_hooks(lambda: [hook()]), tmp_path, epochs=3)


@pytest.mark.parametrize("every", [3, slow(10), slow(25), 120])  # an epoch has four steps
def test_state_that_changes_now_and_then_is_found(tmp_path: Path, every: int) -> None:
    class CountsSome(Forgets):
        def after_step(self, run: ls.Run) -> None:
            self.count += run.step % every == 0

    with pytest.raises(TaskError, match=r"hooks\[0\]\.count: is changed by after_step"):
        train(with_hooks(lambda: [CountsSome()]), tmp_path, steps=121)


def test_hyperparameters_that_a_hook_sets_come_back(tmp_path: Path) -> None:
    class SetsDecay(ls.Hook):
        def after_step(self, run: ls.Run) -> None:
            if run.step == 3:
                run.optimizer.param_groups[0]["weight_decay"] = 0.5

    def make() -> list[Any]:
        return [SetsDecay()]

    keys = {"optimizer": {"name": "adam"}, "steps": 6}
    whole = train(with_hooks(make), tmp_path / "whole", **keys)
    train(with_hooks(make), tmp_path / "halves", stop_at_step=4, **keys)
    halves = train(with_hooks(make), tmp_path / "halves", True, **keys)
    assert halves.params_sha256 == whole.params_sha256


def test_one_hook_for_two_tasks_is_refused(tmp_path: Path) -> None:
    ema = ls.hooks.EMA()
    with pytest.raises(TaskError, match=r"Hooked\.hooks: two tasks have the same EMA; make it in"):
        train(with_hooks(lambda: [ema]), tmp_path, epochs=1)


def test_something_else_than_a_list(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Hooked\.hooks: must return a list of hooks"):
        train(with_hooks(lambda: Diary()), tmp_path)  # type: ignore[arg-type, return-value]


def test_go_on_from_a_checkpoint_with_their_state(tmp_path: Path) -> None:
    def make() -> list[Any]:
        return [MayChange(), ls.hooks.EMA(0.9), ls.hooks.EarlyStopping("loss", 3, "max")]

    keys = {"steps": 8, "eval_every": 2}
    whole = train(with_hooks(make), tmp_path / "whole", **keys)
    assert whole.reason == "no better loss of val in 3 evaluations"
    train(with_hooks(make), tmp_path / "halves", stop_at_step=5, **keys)
    halves = train(with_hooks(make), tmp_path / "halves", True, **keys)
    assert (halves.reason, halves.step) == (whole.reason, whole.step)
    assert halves.params_sha256 == whole.params_sha256
    again = train(with_hooks(make), tmp_path / "halves", True, **keys)
    assert (again.reason, again.step) == (whole.reason, whole.step)


def test_other_hooks_than_before_are_refused(tmp_path: Path) -> None:
    def both() -> list[Any]:
        return [ls.hooks.EMA(), ls.hooks.EarlyStopping("loss", 1)]

    train(with_hooks(lambda: [ls.hooks.EMA()]), tmp_path, steps=4, stop_at_step=2)
    with pytest.raises(CheckpointError, match="hooks/EMA/bias: is state of a hook that"):
        train(with_hooks(lambda: []), tmp_path, True, steps=4)
    with pytest.raises(CheckpointError, match="task: has no 'hooks/EarlyStopping/best'"):
        train(with_hooks(both), tmp_path, True, steps=4)


def test_two_of_a_kind_keep_apart(tmp_path: Path) -> None:
    def make() -> list[Any]:
        return [ls.hooks.EMA(0.5), ls.hooks.EMA(0.9)]

    train(with_hooks(make), tmp_path / "whole", steps=6)
    train(with_hooks(make), tmp_path / "halves", steps=6, stop_at_step=3)
    train(with_hooks(make), tmp_path / "halves", True, steps=6)
    kept = [
        tmp_path / n / "checkpoints/step_00000006/task.safetensors" for n in ("whole", "halves")
    ]
    assert kept[0].read_bytes() == kept[1].read_bytes()


def test_the_average_is_that_of_the_definition(tmp_path: Path) -> None:
    seen: list[float] = []
    averages: list[ls.hooks.EMA] = []

    def make() -> list[ls.Hook]:
        averages.append(ls.hooks.EMA(0.75))
        return [averages[-1], Looks()]

    class Looks(ls.Hook):
        first_only = True

        def after_step(self, run: ls.Run) -> None:
            seen.append(run.model.get_parameter("bias").item())

    train(with_hooks(make), tmp_path, steps=4)
    expected = seen[0]
    for value in seen[1:]:
        expected = 0.75 * expected + 0.25 * value
    assert averages[0].average["bias"].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.hooks.EMA(1.0), "EMA: decay=1.0: must be at least 0 and less than 1"),
        (lambda: ls.hooks.EarlyStopping("loss", 0), "patience=0: must be at least 1"),
        (lambda: ls.hooks.EarlyStopping("loss", 1, "up"), "mode='up': must be min or max"),
    ],
)
def test_bad_arguments_of_hooks(make: Callable[[], ls.Hook], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_metric_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metric='f1': no such metric; the evaluation has loss"):
        train(with_hooks(lambda: [ls.hooks.EarlyStopping("f1", 1)]), tmp_path, epochs=1)
