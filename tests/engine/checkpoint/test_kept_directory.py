"""What a start leaves in a run directory goes, unless a run was started there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.checkpoint.kept_directory import kept_if_refused

STARTED = '{"event": "RunStarted"}\n'


def files(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run of before, with a checkpoint."""
    run = tmp_path / "run"
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    (run / "checkpoints" / "step_1" / "meta.json").write_text("{}")
    (run / "events.jsonl").write_text(STARTED)
    (run / "result.json").write_text("done")
    return run


def test_a_folder_that_cannot_be_read_is_taken_for_one_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a umask of 777 makes it; what went wrong there must be what is said."""
    stat = os.stat

    def refused(path: Any, **options: Any) -> os.stat_result:
        if "closed" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(KeyError, match="first"), kept_if_refused(tmp_path / "closed" / "run"):
        raise KeyError("first")


def test_a_refused_start_is_undone(finished: Path) -> None:
    before = files(finished)
    with kept_if_refused(finished):
        (finished / "result.json").write_text("failed")
        with (finished / "events.jsonl").open("a") as rows:
            rows.write('{"event": "Refused"}\n')
        (finished / "flight").mkdir()
        (finished / "flight" / "0.json").write_text("no")
    assert files(finished) == before
    assert not (finished / "flight").exists()


def test_folders_that_a_refused_start_made_go_again(tmp_path: Path) -> None:
    with kept_if_refused(tmp_path / "runs" / "new"):
        (tmp_path / "runs" / "new").mkdir(parents=True)
        (tmp_path / "runs" / "new" / "config.yaml").write_text("{}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("sign", ["a row", "a checkpoint", "a checkpoint half written", "a word"])
def test_a_run_that_was_started_is_let_be(tmp_path: Path, sign: str) -> None:
    """A full disk may have had room for a checkpoint, and none for the row that says so."""
    run = tmp_path / "run"
    with kept_if_refused(run) as kept:
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").write_text("{}")
        if sign == "a row":
            (run / "events.jsonl").write_text(STARTED)
        elif sign == "a word":
            kept.note_started()
        else:
            (run / "checkpoints" / f"{'.' if 'half' in sign else ''}step_4").mkdir()
    assert (run / "config.yaml").exists()


def test_checkpoints_of_before_are_no_sign_of_a_start(finished: Path) -> None:
    with kept_if_refused(finished):
        (finished / "result.json").write_text("failed")
    assert (finished / "result.json").read_text() == "done"
