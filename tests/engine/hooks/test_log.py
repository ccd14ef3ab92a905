"""`lockstep.log` in one process: where it may be called, what it leaves, what stays as it is."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launching.api.test_train import Line, config
from torch import nn

import lockstep as ls
from lockstep.errors import TaskError, TaskFailure
from lockstep.observe import read_events


def train(task: ls.Task, folder: Path, resume: bool = False, **keys: Any) -> ls.Result:
    return ls.train(task, config(**keys), run_dir=folder, resume=resume, quiet=True)


class Logs(Line):
    """Logs one of each kind, in all places."""

    def after_step(self, model: nn.Module, step: int) -> None:
        ls.log("norm", model.get_parameter("weight").norm())
        ls.log("weights/all", torch.cat([p.detach().flatten() for p in model.parameters()]))
        ls.log("noise", torch.rand(3, 4, 4), kind="image")

    def hooks(self) -> list[ls.Hook]:
        return [Everywhere(), First()]


class Everywhere(ls.Hook):
    def on_start(self, run: ls.Run) -> None:
        ls.log("at/start", run.step)

    def after_step(self, run: ls.Run) -> None:
        ls.log("twice loss", 2 * run.train["loss"])

    def after_evaluation(self, run: ls.Run, split: str, metrics: dict[str, float]) -> None:
        ls.log(f"said/{split}", f"loss {metrics['loss']:.3f}")

    def on_end(self, run: ls.Run, status: str, reason: str) -> None:
        ls.log("at/end", f"{status}: {reason}")


class First(ls.Hook):
    first_only = True

    def after_step(self, run: ls.Run) -> None:
        ls.log("first", run.lr)


def logged(folder: Path) -> dict[str, dict[int, Any]]:
    """What was logged, by name and step."""
    found: dict[str, dict[int, Any]] = {}
    for row in read_events(folder / "events.jsonl"):
        if row["event"] == "RunStarted":
            for steps in found.values():
                for step in [step for step in steps if step > row["step"]]:
                    del steps[step]
        if row["event"] == "Logged":
            found.setdefault(row["name"], {})[row["step"]] = row.get("value", row.get("text"))
    return found


def pictures(folder: Path) -> dict[str, bytes]:
    root = folder / "logged"
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


def test_a_run_that_logs_has_the_bits_of_one_that_does_not(tmp_path: Path) -> None:
    plain = train(Line(), tmp_path / "plain", epochs=2)
    logs = train(Logs(), tmp_path / "logs", epochs=2)
    assert logs.params_sha256 == plain.params_sha256
    assert logs.metrics == plain.metrics
    found = logged(tmp_path / "logs")
    assert found["at/start"] == {0: 0.0}
    assert [*found["norm"]] == [*found["twice loss"]] == [*found["first"]] == [*range(1, 9)]
    assert sum(found["weights/all"][3]["counts"]) == 2
    assert [*found["said/val"]] == [4, 8]
    assert found["at/end"] == {8: "completed: all steps done"}
    assert [*pictures(tmp_path / "logs")] == [f"noise/{step:08}.png" for step in range(1, 9)]


def test_scalars_are_rows_of_the_split_log(tmp_path: Path) -> None:
    train(Logs(), tmp_path, epochs=1, log_every=1)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    curve = {int(r["step"]): float(r["norm"]) for r in rows if r["split"] == "log" and r["norm"]}
    assert curve == logged(tmp_path)["norm"]
    train_rows = [r for r in rows if r["split"] == "train"]
    twice = [float(r["twice loss"]) for r in rows if r["split"] == "log" and r["twice loss"]]
    assert twice == [2 * float(r["loss"]) for r in train_rows]


def test_a_resumed_run_has_what_an_uninterrupted_one_has(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"epochs": 3, "checkpoint": {"every": 5}}
    train(Logs(), tmp_path / "whole", **keys)
    train(Logs(), tmp_path / "parts", stop_at_step=7, **keys)
    newest = tmp_path / "parts" / "checkpoints" / "step_00000007"
    for path in newest.iterdir():  # as if the run had been killed: it goes back to step 5
        path.unlink()
    newest.rmdir()
    late = tmp_path / "parts" / "logged" / "gone" / "00000007.png"
    late.parent.mkdir()
    late.write_bytes(b"")
    train(Logs(), tmp_path / "parts", resume=True, **keys)
    assert not late.exists()
    assert pictures(tmp_path / "parts") == pictures(tmp_path / "whole")
    whole, parts = logged(tmp_path / "whole"), logged(tmp_path / "parts")
    for name in ("norm", "weights/all", "noise", "twice loss", "first", "said/val"):
        assert parts[name] == whole[name]


def elsewhere(method: str) -> ls.Task:
    class Misplaced(Line):
        pass

    original: Callable[..., Any] = getattr(Line, method)

    def misplaced(self: ls.Task, *arguments: Any) -> Any:
        ls.log("x", 1.0)
        return original(self, *arguments)

    setattr(Misplaced, method, misplaced)
    return Misplaced()


@pytest.mark.parametrize("method", ["loss", "evaluate", "dataset", "build_model", "lr_factor"])
def test_logging_in_other_methods_is_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises((TaskError, TaskFailure), match=r"may be called in Task\.after_step"):
        train(elsewhere(method), tmp_path, steps=2)


def test_not_after_a_checkpoint_which_rank_0_alone_sees(tmp_path: Path) -> None:
    class Late(ls.Hook):
        def after_checkpoint(self, run: ls.Run, folder: Path) -> None:
            ls.log("x", 1.0)

    class Hooked(Line):
        def hooks(self) -> list[ls.Hook]:
            return [Late()]

    with pytest.raises(TaskError, match="may be called in"):
        train(Hooked(), tmp_path, steps=2, checkpoint={"background": False})


def test_a_wrong_value_ends_the_run_by_its_name(tmp_path: Path) -> None:
    class Wrong(Line):
        def after_step(self, model: nn.Module, step: int) -> None:
            ls.log("net/w", torch.zeros(4, 4))

    with pytest.raises(TaskError, match=r"lockstep\.log\('net/w'\): a tensor of shape \(4, 4\)"):
        train(Wrong(), tmp_path, steps=2)
