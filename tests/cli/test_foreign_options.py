"""Config keys written as options, a habit from other programs, are answered with their items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.launching.api import longer_tasks

import lockstep as ls
from lockstep.errors import ConfigError

TASK = f"{longer_tasks.__file__}:Line"
DASHES = ": config keys are written without dashes: "
NO_SUCH = ": no such option; did you mean the config key "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train digits --epochs 5", f"--epochs 5{DASHES}epochs=5"),
        ("train --lr=0.1 digits", f"--lr=0.1{DASHES}lr=0.1"),
        ("train digits -lr 0.1", f"-lr 0.1{DASHES}lr=0.1"),
        ("train digits -lr=0.1 -q", f"-lr=0.1{DASHES}lr=0.1"),
        ("train digits --optimizer.name adam", f"--optimizer.name adam{DASHES}optimizer.name=adam"),
        ("train digits --Batch-Size 64", f"--Batch-Size 64{DASHES}batch_size=64"),
        ("train digits --clip_norm", f"--clip_norm{DASHES}clip_norm=VALUE"),
        ("train digits --clip_norm lr=1", f"--clip_norm{DASHES}clip_norm=VALUE"),
        ("train --tensorboard digits", f"--tensorboard{DASHES}tensorboard=true"),
        ("train digits --strict no", f"--strict no{DASHES}strict=no"),
        ("train digits --hidden 12", f"--hidden 12{DASHES}hidden=12"),  # of the recipe's own
        ("train x.py --lr 1 -n 2", f"--lr 1{DASHES}lr=1"),
        ("train digits --epoch 5", f"--epoch 5{NO_SUCH}epochs=5?"),
        ("train digits --learning-rate 1", f"--learning-rate 1{NO_SUCH}lr=1?"),
        ("train digits --optimizer sgd", f"--optimizer sgd{NO_SUCH}optimizer.name=sgd?"),
        ("train digits --weight_decay 1", f"--weight_decay 1{NO_SUCH}optimizer.weight_decay=1?"),
        (
            "train x.py --depth 3",
            "--depth 3: no such option; if it is a config key of the script: depth=3",
        ),
        (f"train {TASK} --epochs 5", f"--epochs 5{DASHES}epochs=5"),
        ("resume runs/1 --epochs 5", f"--epochs 5{DASHES}epochs=5"),
        ("sweep digits --lr 0.1,0.2", f"--lr 0.1,0.2{DASHES}lr=0.1,0.2"),
        ("sweep digits seed=0..4 --epoch=5", f"--epoch=5{NO_SUCH}epochs=5?"),
        ("verify digits --epochs 5", f"--epochs 5{DASHES}epochs=5"),
    ],
)
def test_a_key_written_as_an_option_is_named(here: Any, arguments: str, message: str) -> None:
    done = here(*arguments.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")


def test_a_key_of_a_runs_own_task_is_named(here: Any, tmp_path: Path) -> None:
    assert here("train", "digits", "steps=1", "--run-dir", "run", "-q").returncode == 0
    done = here("resume", "run", "--hidden", "12")
    assert done.stderr == f"error: --hidden 12{DASHES}hidden=12\n"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("train digits --rank 2", "--ranks"),
        ("train digits --resum", "--resume"),
        ("train digits --xyzzy 2", "No such option: --xyzzy"),
        ("runs --epochs 5", "No such option: --epochs"),
        ("train digits --ranks two", "Invalid value"),
    ],
)
def test_what_is_no_key_is_told_as_of_any_command(here: Any, arguments: str, shown: str) -> None:
    done = here(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert shown in done.stderr
    assert "config key" not in done.stderr


@pytest.mark.parametrize("target", ["digits", "script.py"])
def test_a_resume_of_no_run_never_starts_one(here: Any, tmp_path: Path, target: str) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('was run')")
    done = here("train", target, "--resume", "steps=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --resume: names no run to go on with; add --run-dir RUN")
    assert not (tmp_path / "runs").exists()


def test_a_resume_of_no_run_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = longer_tasks.Line(longer_tasks.LineConfig(steps=2))
    with pytest.raises(ConfigError, match="resume=True: names no run to go on with"):
        ls.train(task, resume=True)
    with pytest.raises(ConfigError, match="resume=True: names no run to go on with"):
        ls.launch(task, num_ranks=1, resume=True)
    assert not (tmp_path / "runs").exists()
