from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import TrainConfig, load, override
from lockstep.config.files import temporary_beside
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.run_directory import Identity, RunDirectory
from lockstep.errors import RunDirectoryError

CONFIG = TrainConfig(seed=3)


def identity(config: TrainConfig = CONFIG, **fields: Any) -> Identity:
    made = Identity(
        "digits", config.hash, "digits.py:Digits", ("seed=3",), config.epochs, config.steps
    )
    return replace(made, **fields)


def opened(path: Path, config: TrainConfig = CONFIG, resume: bool = False) -> RunDirectory:
    directory = RunDirectory(path)
    directory.open(config, identity(config), resume)
    return directory


def used(path: Path, config: TrainConfig = CONFIG) -> Path:
    """A folder of a run that has committed a step."""
    opened(path, config).close()
    (path / "events.jsonl").write_text('{"event": "StepDone", "step": 1}\n')
    return path


@pytest.mark.parametrize("has_lock", [True, False])
def test_any_rank_can_rescue_a_run_whose_folder_is_gone(tmp_path: Path, has_lock: bool) -> None:
    path = used(tmp_path / "run")
    directory, other = RunDirectory(path), RunDirectory(path)
    if has_lock:
        directory.lock()
    for known in (directory, other):
        known.describe(CONFIG, identity())
        assert not known.is_gone()
    shutil.rmtree(path)
    assert directory.is_gone()
    if has_lock:  # a rank has died while it made the folder
        (tmp_path / "run-rescued" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run-rescued" / ".lock").touch()
    for _ in range(2):  # as after the loss of a rank
        assert directory.rescue() == str(tmp_path / "run-rescued")
        other.follow(directory.path)
        assert (other.lost, other.is_gone()) == (path, False)
    assert directory.identity() == identity()
    assert load(TrainConfig, tmp_path / "run-rescued" / "config.yaml") == CONFIG
    assert [p.name for p in tmp_path.iterdir()] == ["run-rescued"]
    directory.close()


def test_a_run_is_rescued_in_no_folder_that_has_something_in_it(tmp_path: Path) -> None:
    directory = opened(used(tmp_path / "run"))
    shutil.rmtree(directory.path)
    opened(tmp_path / "run-rescued").close()
    (tmp_path / "run-rescued-2" / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "run-rescued-3").mkdir()
    (tmp_path / "run-rescued-3" / "mine.txt").touch()
    (tmp_path / "run-rescued-4").touch()
    (tmp_path / "run-rescued-5").mkdir()
    assert directory.rescue() == str(tmp_path / "run-rescued-5")
    directory.close()


@pytest.mark.parametrize("fields", [{"task": "other"}, {}])
def test_a_run_without_a_committed_step_gives_way_to_any_other(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    opened(tmp_path).close()
    (tmp_path / "events.jsonl").write_text('{"event": "Failed", "step": 0}\n')
    (tmp_path / "mine.txt").write_text("kept")
    other = CONFIG.model_copy(update={"lr": 0.5})
    directory = RunDirectory(tmp_path)
    directory.open(other, identity(other, **fields), resume=False)
    assert directory.identity() == identity(other, **fields)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock", "checkpoints", "config.yaml", "mine.txt", "run.json",
    }  # fmt: skip
    directory.close()


def refused(path: Path, config: TrainConfig = CONFIG, resume: bool = True, **fields: Any) -> str:
    directory = RunDirectory(path)
    with pytest.raises(RunDirectoryError) as caught:
        directory.open(config, identity(config, **fields), resume)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def save(directory: RunDirectory, step: int) -> None:
    checkpoint.write(directory.checkpoints, Snapshot(step, {"w": torch.zeros(1)}, {}))


@pytest.mark.parametrize("name", ["run", "deep/er/run", "Läufe 実験 [1]/größe 🚀"])
def test_a_new_folder_is_made_and_described(tmp_path: Path, name: str) -> None:
    directory = opened(tmp_path / name)
    assert directory.checkpoints.is_dir()
    assert load(TrainConfig, tmp_path / name / "config.yaml") == CONFIG
    assert directory.identity() == identity()
    assert not [p for p in (tmp_path / name).iterdir() if p.suffix == ".tmp"]
    directory.close()


def test_the_same_run_opens_it_again(tmp_path: Path) -> None:
    used(tmp_path)
    opened(tmp_path).close()
    opened(tmp_path, resume=True).close()


def test_a_start_that_is_refused_leaves_what_an_earlier_one_has_written(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    save(directory, 1)
    directory.hang_report(1).write_text('{"reason": "did nothing"}')
    directory.flight.keep(0, b"calls")
    directory.flight.waiting_file(2).write_bytes(b"calls")
    directory.close()

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    assert "already holds this run" in refused(tmp_path, resume=False)
    assert files() == before
    opened(tmp_path, resume=True).close()
    assert directory.hang_reason(1) == ""
    assert sorted(path.name for path in (tmp_path / "flight").iterdir()) == ["0001"]


def test_keys_without_outcome_may_change(tmp_path: Path) -> None:
    used(tmp_path)
    other = override(CONFIG, ["log_every=3", "checkpoint.keep=1", "optimizer.sharded=true"])
    opened(tmp_path, other).close()
    assert load(TrainConfig, tmp_path / "config.yaml") == other


def test_another_target_or_other_overrides_are_the_same_run(tmp_path: Path) -> None:
    used(tmp_path)
    directory = RunDirectory(tmp_path)
    directory.open(CONFIG, identity(target="moved.py:Digits", overrides=()), resume=False)
    assert directory.identity().target == "moved.py:Digits"
    directory.close()


@pytest.mark.parametrize(
    ("item", "difference"),
    [
        ("lr=0.5", "lr is 0.001 there, 0.5 here"),
        ("optimizer.name=sgd", "optimizer.name is 'adamw' there, 'sgd' here"),
        ("optimizer.betas=[0.8, 0.9]", "optimizer.betas is [0.9, 0.999] there, [0.8, 0.9] here"),
        ("watch=größe", "watch is 'loss' there, 'größe' here"),
    ],
)
def test_another_config_is_refused_with_both_values(
    tmp_path: Path, item: str, difference: str
) -> None:
    used(tmp_path)
    message = refused(tmp_path, override(CONFIG, [item]))
    assert message == (
        f"{tmp_path}: holds a run with another config: {difference}; leave that as it is "
        "there, or choose another with --run-dir"
    )


def test_another_length_is_written_only_when_it_is_settled(tmp_path: Path) -> None:
    used(tmp_path)
    longer = override(CONFIG, ["steps=7"])
    assert "steps is None there, 7 here" in refused(tmp_path, longer, resume=False)
    before = [(tmp_path / name).read_text() for name in ("config.yaml", "run.json")]
    directory = opened(tmp_path, longer, resume=True)
    assert [(tmp_path / name).read_text() for name in ("config.yaml", "run.json")] == before
    directory.settle()
    directory.close()
    assert directory.identity().config_hash == longer.hash
    assert "steps: 7" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("order", [("config.yaml", "run.json"), ("run.json", "config.yaml")])
def test_a_run_that_was_killed_while_its_length_was_written_goes_on(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    used(tmp_path)
    before = {name: (tmp_path / name).read_text() for name in order}
    longer = override(CONFIG, ["steps=7"])
    directory = opened(tmp_path, longer, resume=True)
    directory.settle()
    directory.close()
    (tmp_path / order[1]).write_text(before[order[1]])  # as if it had not come to that
    there = load(TrainConfig, tmp_path / "config.yaml")
    assert (there == longer) == (order[0] == "config.yaml")
    for config in (there, longer, CONFIG):
        again = opened(tmp_path, config, resume=True)
        again.settle()
        again.close()
        assert again.identity() == identity(config)
        assert load(TrainConfig, tmp_path / "config.yaml") == config


def test_a_run_of_a_version_that_did_not_write_the_length_gets_another_one(tmp_path: Path) -> None:
    used(tmp_path)
    file = tmp_path / "run.json"
    kept = {k: v for k, v in json.loads(file.read_text()).items() if k not in ("epochs", "steps")}
    file.write_text(json.dumps(kept))
    longer = override(CONFIG, ["steps=7"])
    assert "steps is None there, 7 here" in refused(tmp_path, longer, resume=False)
    opened(tmp_path, longer, resume=True).close()


def test_another_length_beside_another_key_is_refused(tmp_path: Path) -> None:
    used(tmp_path)
    assert "lr is 0.001 there" in refused(tmp_path, override(CONFIG, ["steps=7", "lr=0.5"]))


def test_all_keys_that_matter_are_named(tmp_path: Path) -> None:
    used(tmp_path)
    message = refused(tmp_path, override(CONFIG, ["lr=1", "seed=4"]))
    assert "seed is 3 there, 4 here" in message
    assert "lr is 0.001 there, 1.0 here" in message


def test_keys_without_outcome_are_not_blamed(tmp_path: Path) -> None:
    used(tmp_path)
    harmless = ["log_every=3", "tensorboard=true", "digest_every=2", "stop_at_step=5"]
    harmless += ["optimizer.sharded=true", "checkpoint.every=1"]
    message = refused(tmp_path, override(CONFIG, [*harmless, "data.shuffle=false"]))
    assert "data.shuffle is True there, False here" in message
    assert "log_every" not in message
    assert "sharded" not in message


@pytest.mark.parametrize("content", [b"", b"[1", b"\xff", b"- 1", b"3"])
def test_a_damaged_config_does_not_hide_that_it_is_another(tmp_path: Path, content: bytes) -> None:
    used(tmp_path)
    (tmp_path / "config.yaml").write_bytes(content)
    assert "holds a run with another config" in refused(tmp_path, override(CONFIG, ["lr=1"]))


def test_another_task_is_refused(tmp_path: Path) -> None:
    used(tmp_path)
    message = refused(tmp_path, task="weather")
    assert "holds a run of digits, this is weather" in message


def test_a_refused_run_leaves_everything_as_it_was(tmp_path: Path) -> None:
    used(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    refused(tmp_path, override(CONFIG, ["lr=1"]))
    refused(tmp_path, task="weather")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_a_run_with_checkpoints_is_resumed_only_on_request(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    for step in (5, 10):
        save(directory, step)
    directory.close()
    message = refused(tmp_path, resume=False)
    assert "already holds this run up to step_00000010; add --resume" in message
    opened(tmp_path, resume=True).close()


_HOLD = """
import fcntl, os, sys, time
file = open(os.path.join(sys.argv[1], ".lock"), "w")
fcntl.lockf(file, fcntl.LOCK_EX)
"""
_FORK = """
import os, sys, time
from pathlib import Path
from lockstep.engine.checkpoint.run_directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
directory.lock()
child = os.fork() or time.sleep(60)
print(child)
"""


@contextmanager
def another(path: Path, script: str = _HOLD) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which has locked a folder."""
    argv = [sys.executable, "-c", f"{script}print('held', flush=True)\ntime.sleep(60)", str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def lines(child: subprocess.Popen[bytes]) -> list[str]:
    """What it prints until it holds the lock."""
    assert child.stdout is not None
    found = []
    while (line := child.stdout.readline().decode().strip()) != "held":
        assert child.poll() is None
        found.append(line)
    return found


def test_a_checkpoint_that_was_about_to_be_replaced_counts(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    save(directory, 5)
    folder = directory.checkpoints / "step_00000005"
    folder.rename(folder.with_name(".step_00000005.123.old"))
    directory.close()
    assert "already holds this run up to step_00000005" in refused(tmp_path, resume=False)
    assert folder.is_dir()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    used(tmp_path)
    with another(tmp_path) as other:
        lines(other)
        assert "another job is training in it" in refused(tmp_path)
    opened(tmp_path).close()


def test_a_process_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    used(tmp_path)
    waits: list[float] = []
    with another(tmp_path) as other:
        lines(other)
        killer = threading.Timer(0.2, other.kill)
        killer.start()
        directory = RunDirectory(tmp_path)
        directory.lock(30.0, on_wait=lambda: waits.append(time.monotonic()))
    assert 1 < len(waits) < 100
    directory.close()


def test_a_forked_child_that_outlives_its_parent_holds_no_claim(tmp_path: Path) -> None:
    with another(tmp_path, _FORK) as other:
        [orphan] = map(int, lines(other))
        try:
            other.kill()
            other.wait()
            opened(tmp_path).close()
        finally:
            os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("why", ["config", "task", "checkpoints", "identity"])
def test_a_refused_run_holds_no_claim(tmp_path: Path, why: str) -> None:
    directory = opened(tmp_path)
    save(directory, 1)
    directory.close()
    config = override(CONFIG, ["lr=1"]) if why == "config" else CONFIG
    if why == "identity":
        (tmp_path / "run.json").write_text("{", encoding="utf-8")
    kept = RunDirectory(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"choose|--resume|is damaged"):
        kept.open(
            config,
            identity(config, task="weather" if why == "task" else "digits"),
            resume=why != "checkpoints",
        )
    (tmp_path / "run.json").unlink()
    opened(tmp_path, resume=True).close()


def test_a_file_system_without_locks_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", fail)
    assert "cannot be locked: No locks available" in refused(tmp_path)


def test_closing_twice_or_unopened_is_fine(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    directory.close()
    directory.close()
    RunDirectory(tmp_path).close()


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        message = refused(path)
        assert "is not writable: " in message
        assert "choose another with --run-dir" in message

    (tmp_path / "link").symlink_to("nowhere")
    assert "link: is a link to nowhere, which does not exist; choose" in refused(tmp_path / "link")


def test_a_file_where_checkpoints_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    assert "is not writable: File exists" in refused(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
def test_a_folder_where_a_file_should_be_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert refused(tmp_path).startswith(f"{tmp_path / name}: cannot be ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"task": "digits"}',
        '{"overrides": 3}',
        "\x00",
        "[" * 100_000,
    ],
)
def test_a_damaged_identity_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    used(tmp_path)
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    assert refused(tmp_path).startswith(f"{tmp_path / 'run.json'}: is damaged: ")
    (tmp_path / "run.json").write_bytes(b"\xff\xfe")
    assert refused(tmp_path).startswith(f"{tmp_path / 'run.json'}: is damaged: ")


def test_an_identity_is_plain_json(tmp_path: Path) -> None:
    used(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8")) == {
        "task": "digits",
        "config_hash": CONFIG.hash,
        "target": "digits.py:Digits",
        "overrides": ["seed=3"],
        "epochs": CONFIG.epochs,
        "steps": None,
    }


def test_a_folder_without_a_run_has_no_identity(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"is no run directory \(no run\.json\)"):
        RunDirectory(tmp_path).identity()


def test_taking_the_lock_removes_leftovers_but_reports_of_hangs(tmp_path: Path) -> None:
    """Watchdogs of other ranks write theirs without the lock."""
    directory = RunDirectory(tmp_path)
    half, report = (temporary_beside(p) for p in (tmp_path / "a", directory.hang_report(3)))
    half.touch()
    report.touch()
    directory.lock()
    directory.close()
    assert report.exists()
    assert not half.exists()


def test_a_new_rank_0_takes_only_the_folder_of_its_run(tmp_path: Path) -> None:
    """Reports of this session stay; what a full disk has kept from being written is written."""
    path = used(tmp_path / "run")
    directory = RunDirectory(path)
    directory.hang_report(1).write_text("{}")
    status = (path / "run.json").stat()
    directory.open(CONFIG, identity(), resume=True, trains=True)
    assert (path / "run.json").stat() == status  # it may be on a full disk
    directory.close()
    (path / "run.json").unlink()
    directory.open(CONFIG, identity(), resume=True, trains=True)
    assert directory.identity() == identity()
    assert directory.hang_report(1).exists()
    directory.close()
    other = TrainConfig(seed=4)
    with pytest.raises(RunDirectoryError, match="another config: seed is 3 there, 4 here"):
        directory.open(other, identity(other), resume=True, trains=True)
    assert directory.identity() == identity()
    opened(path, resume=True).close()  # and it holds no lock
