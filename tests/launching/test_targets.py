"""A run directory names code; what may be run of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.faults import PlannedFault, injector, to_env
from lockstep.engine.snapshot.restore import find_snapshot
from lockstep.errors import ConfigError, LockstepError, RunDirectoryError
from lockstep.launching.targets import trusted_target

CODE = "import pathlib\npathlib.Path('mark').touch()\n"


def run_of(folder: Path, target: str) -> Path:
    folder.mkdir(exist_ok=True)
    identity = {"task": "task", "config_hash": "0", "target": target, "overrides": []}
    (folder / "run.json").write_text(json.dumps(identity), encoding="utf-8")
    (folder / "config.yaml").write_text("{}", encoding="utf-8")
    return folder


@pytest.mark.parametrize("command", ["eval", "resume", "export"])
@pytest.mark.parametrize("name", ["task.py", "task.py:Task", "link.py", "deeper/../task.py"])
def test_code_in_the_run_directory_is_not_run(
    here, tmp_path: Path, command: str, name: str
) -> None:
    run = run_of(tmp_path / "run", str(tmp_path / "run" / name))
    (run / "deeper").mkdir()
    (run / "task.py").write_text(CODE, encoding="utf-8")
    (run / "link.py").symlink_to("task.py")
    done = here(command, "run", *(["out"] if command == "export" else []))
    assert done.returncode == 2
    assert "run.json: target=" in done.stderr
    assert "lies in the run directory" in done.stderr
    assert not (tmp_path / "mark").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_code_of_someone_else_is_not_run(here, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(CODE, encoding="utf-8")
    os.chown(task, 12345, -1)
    run_of(tmp_path / "run", str(task))
    done = here("eval", "run")
    assert done.returncode == 2
    assert "belongs to another user (number 12345)" in done.stderr
    assert not (tmp_path / "mark").exists()


def test_own_code_and_recipes_may_be_run(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(CODE, encoding="utf-8")
    for target in (f"{task}:Task", str(task), "digits"):
        assert trusted_target(RunDirectory(run_of(tmp_path / "run", target))) == target


@pytest.mark.parametrize("target", ["\0.py", "x" * 5000 + ".py", "\ud800.py", "none.py:Task"])
def test_a_target_that_is_no_file_is_a_short_message(tmp_path: Path, target: str) -> None:
    with pytest.raises(LockstepError) as caught:
        trusted_target(RunDirectory(run_of(tmp_path / "run", target)))
    assert len(str(caught.value)) < 600


TRAIN = ("train", "digits", "--run-dir", "run", "epochs=1")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("run.json", ("resume", "run")),
        ("run.json", TRAIN),
        (".lock", TRAIN),
        ("events.jsonl", TRAIN),
        ("metrics.csv", TRAIN),
        ("ranks.log", (*TRAIN, "-n", "2", "--launcher", "local")),
        ("config.yaml", ("train", "digits", "--config", "run/config.yaml")),
    ],
)
def test_a_fifo_in_a_run_directory_keeps_nobody_waiting(
    here, tmp_path: Path, name: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / name)
    done = here(*arguments)
    assert done.returncode == 2
    assert f"{name}: " in done.stderr or name == ".lock"
    assert "is a FIFO, socket or device, not a regular file" in done.stderr


def test_a_lock_that_is_a_link_leaves_its_target_whole(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept", encoding="utf-8")
    run = run_of(tmp_path / "run", "digits")
    (run / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(RunDirectoryError, match="is a symbolic link"):
        RunDirectory(run).lock()
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize("which", ["²", "9" * 5000, "-1", "x", "1.0", "\0"])
def test_a_checkpoint_that_is_none_is_a_short_message(tmp_path: Path, which: str) -> None:
    with pytest.raises(LockstepError, match=r"must be best, latest, or a step's number") as caught:
        find_snapshot(tmp_path, which)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "3", "\udcff"])
def test_a_damaged_log_of_faults_is_named(tmp_path: Path, text: str) -> None:
    log = tmp_path / "log"
    log.write_text(text + "\n", encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match="is no log of faults"):
        injector(to_env([PlannedFault(0, 1)], log), 0)
