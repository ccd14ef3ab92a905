"""`ls.steps`: a run as a loop of one's own, in one process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import run
from tests.launching.api.test_train import Line, config

import lockstep as ls
from lockstep.errors import ConfigError, TaskError

KEYS: dict[str, Any] = {"steps": 6, "eval_every": 2, "log_every": 1}
KEYS["checkpoint"] = ls.CheckpointConfig(background=False)  # else its event may come a step later
TIMES = {"seconds", "ranks", "stall_s", "write_s", "wall_s", "time", "run_dir", "path", "pid"}
TIMES |= {"checkpoint", "num_bytes", "ran_s", "samples_per_s", "compute_efficiency"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ls.Result:
    """The same run, by `ls.train`."""
    path = tmp_path_factory.mktemp("plain") / "run"
    return ls.train(Line(), config(**KEYS), run_dir=path, quiet=True)


def loop(path: Path, resume: bool = False, **keys: Any) -> ls.Steps:
    return ls.steps(Line(), config(**KEYS | keys), run_dir=path, resume=resume, quiet=True)


def goes_on(path: Path) -> tuple[list[int], str]:
    """The steps of a resumed loop, and the SHA-256 at its end."""
    steps = loop(path, resume=True)
    return [step.number for step in steps], steps.result.params_sha256


def events(path: Path) -> list[dict[str, Any]]:
    """Events without what differs between any two runs."""
    rows = map(json.loads, (path / "events.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def test_a_loop_is_the_same_run_one_step_at_a_time(tmp_path: Path, plain: ls.Result) -> None:
    states = torch.get_rng_state(), signal.getsignal(signal.SIGINT)
    steps, seen = loop(tmp_path / "run"), []
    with pytest.raises(ConfigError, match=r"steps\.result: is there once the loop is over"):
        _ = steps.result
    for step in steps:
        assert step.is_first
        assert step.model.training
        seen.append((step.number, step.epoch, sorted(step.metrics), sorted(step.evaluated)))
        ls.log("of/a body", step.metrics["loss"])
    assert seen == [(n, n > 4, ["loss"], [] if n % 2 else ["val/loss"]) for n in range(1, 7)]
    result = steps.result
    assert (result.status, result.step, result.run_dir) == ("completed", 6, tmp_path / "run")
    assert result.params_sha256 == plain.params_sha256
    assert result.metrics == plain.metrics
    assert not result.model.training
    mine = events(tmp_path / "run")
    assert [row for row in mine if row["event"] != "Logged"] == events(plain.run_dir)
    assert len(mine) == len(events(plain.run_dir)) + 6
    assert torch.equal(torch.get_rng_state(), states[0])
    assert signal.getsignal(signal.SIGINT) is states[1]
    assert goes_on(tmp_path / "run") == ([], plain.params_sha256)
    with pytest.raises(ConfigError, match="has been looped over already"):
        iter(steps)


def broken(path: Path) -> None:
    for step in loop(path):
        if step.number == 3:
            break


def raising(path: Path) -> None:
    def raises() -> None:
        for step in loop(path):
            if step.number == 3:
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        raises()


def returning(path: Path) -> None:
    def leaves() -> None:
        for step in loop(path):
            if step.number == 3:
                return

    leaves()


def closed(path: Path) -> None:
    steps = iter(loop(path))
    assert [next(steps).number for _ in range(3)] == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"train: a loop over lockstep\.steps is under way"):
        ls.train(Line(), config(steps=1))
    with pytest.raises(ConfigError, match=r"steps: a loop over lockstep\.steps is under way"):
        next(iter(loop(path)))
    steps.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("leave", [broken, raising, returning, closed])
def test_leaving_the_loop_stops_the_run_which_can_go_on(
    tmp_path: Path, plain: ls.Result, leave: Callable[[Path], None]
) -> None:
    leave(tmp_path / "run")
    ended = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (ended["status"], ended["reason"]) == ("stopped", "the loop was left")
    assert ended["step"] == 3
    assert goes_on(tmp_path / "run") == ([4, 5, 6], plain.params_sha256)


@pytest.mark.parametrize("number", [3, 4, 6])  # step 4 is saved before the body has it
def test_a_run_is_complete_when_the_body_says_so(tmp_path: Path, number: int) -> None:
    steps = loop(tmp_path / "run", checkpoint=ls.CheckpointConfig(every=2))
    older = None
    for step in steps:
        if older is not None:
            with pytest.raises(TaskError, match=rf"step\.stop: step {older.number} is over"):
                older.stop()
        older = step
        if step.number == number:
            with pytest.raises(TaskError, match="must say why"):
                step.stop("")
            step.stop("good enough")
            step.stop("again")
            if number == 3:
                break
    result = steps.result
    assert (result.status, result.reason, result.step) == ("completed", "good enough", number)
    again = loop(tmp_path / "run", resume=True)
    assert list(again) == []
    assert (again.result.status, again.result.reason) == ("completed", "good enough")
    assert again.result.params_sha256 == result.params_sha256


def adds(model: torch.nn.Module, task: ls.Task) -> None:
    with torch.no_grad():
        model.weight.add_(1)  # type: ignore[operator, union-attr]


def evaluates(model: torch.nn.Module, task: ls.Task) -> None:
    model.eval()


def slows(model: torch.nn.Module, task: ls.Task) -> None:
    task.optimizer.param_groups[0]["lr"] = 0.5  # type: ignore[attr-defined]


class Own(Line):
    """Keeps its optimizer."""

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return self.optimizer


def keeps(model: torch.nn.Module, task: ls.Task) -> None:
    task.seen = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (adds, "weight was changed; change it in Task.after_step"),
        (evaluates, "model.training: is changed by the body of the loop"),
        (slows, r"'lr'.* was changed; change it in Task.after_step"),
        (keeps, "task.seen: is changed by the body of the loop"),
    ],
)
@pytest.mark.parametrize("is_left", [False, True])
def test_a_body_changes_nothing_of_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: Any, message: str, is_left: bool
) -> None:
    task = Own()
    steps = ls.steps(task, config(**KEYS), run_dir=tmp_path / "run", quiet=True)

    def looped() -> None:
        for step in steps:
            change(step.model, task)
            if is_left:
                break

    if is_left:  # nothing can be raised by then
        looped()
        assert re.search(message, capfd.readouterr().err)
    else:
        with pytest.raises(TaskError, match=message):
            looped()
    with pytest.raises(TaskError, match=message):
        _ = steps.result
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def test_errors_and_ctrl_c_are_those_of_train(tmp_path: Path, plain: ls.Result) -> None:
    with pytest.raises(ConfigError, match="names no run to go on with"):
        ls.steps(Line(), config(), resume=True)
    with pytest.raises(ConfigError, match="from_only: names tensors"):
        ls.steps(Line(), config(), from_only=["a"])
    with pytest.raises(ls.LockstepError, match="already holds this run"):
        list(ls.steps(Line(), config(**KEYS), run_dir=plain.run_dir, quiet=True))

    def interrupted(at: int, times: int, resume: bool) -> None:
        for step in loop(tmp_path / "run", resume):
            for _ in range(times if step.number == at else 0):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(ls.Stopped, match="stopped after step 4: interrupted") as caught:
        interrupted(3, 1, False)
    assert caught.value.exit_code == 130
    with pytest.raises(KeyboardInterrupt):
        interrupted(5, 2, True)
    assert goes_on(tmp_path / "run") == ([6], plain.params_sha256)
    result = ls.train(Line(), config(**KEYS), run_dir=tmp_path / "after", quiet=True)
    assert result.params_sha256 == plain.params_sha256


SCRIPT = """
import lockstep as ls
from tests.launching.api.test_train import Line, config
steps = iter(ls.steps(Line(), config(steps=6), run_dir="run", quiet=True))
print(next(steps).number, flush=True)
raise SystemExit(3)
"""


@pytest.mark.slow
def test_a_loop_that_a_variable_holds_is_left_when_the_program_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[3])
    done: subprocess.CompletedProcess[str] = run(
        [sys.executable, "script.py"], tmp_path, PYTHONPATH=root
    )
    assert (done.returncode, done.stderr) == (3, "")
    ended = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (ended["status"], ended["step"]) == ("stopped", 1)
