from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lockstep
from lockstep.data.workers import share_out
from lockstep.errors import DataError

PACKAGE = str(Path(lockstep.__file__).parent)
WORKER = """
import os, sys, time, types
from pathlib import Path
sys.modules["lockstep"] = package = types.ModuleType("lockstep")
package.__path__ = [sys.argv[3]]  # without torch, which takes seconds to import
from lockstep.data.workers import share_out
folder, pause = Path(sys.argv[1]), float(sys.argv[2])
def make(number, path):
    (folder / f"begun-{number}-{os.getpid()}").touch()
    time.sleep(pause)
    path.write_text(f"{number} {os.getpid()}")
share_out(folder, [f"item-{n}" for n in range(6)], make)
"""


def worker(folder: Path, pause: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER, str(folder), str(pause), PACKAGE])


def made_by(folder: Path) -> list[str]:
    return [(folder / f"item-{n}").read_text().split()[1] for n in range(6)]


def test_each_file_is_made_once_by_one_of_several(tmp_path: Path) -> None:
    workers = [worker(tmp_path, 0.2) for _ in range(3)]
    assert [w.wait(60) for w in workers] == [0, 0, 0]
    assert len(list(tmp_path.glob("begun-*"))) == 6
    assert len(set(made_by(tmp_path))) > 1


@pytest.mark.slow
def test_what_a_dead_process_was_at_is_taken_over(tmp_path: Path) -> None:
    victim = worker(tmp_path, 60)
    while not list(tmp_path.glob("begun-0-*")):
        time.sleep(0.01)
    heir = worker(tmp_path, 0)
    while len(list(tmp_path.glob("item-*"))) < 5:
        time.sleep(0.01)
    assert heir.poll() is None  # it waits for the first
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    assert heir.wait(60) == 0
    assert set(made_by(tmp_path)) == {str(heir.pid)}


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    share_out(tmp_path, ["a"], lambda _, path: path.write_text("first"))
    (path,) = share_out(tmp_path, ["a"], lambda _, path: path.write_text("second"))
    assert path.read_text() == "first"


def test_an_error_leaves_nothing_half_written(tmp_path: Path) -> None:
    def fail(_: int, path: Path) -> None:
        path.write_text("half")
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        share_out(tmp_path, ["a"], fail)
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file/in: cannot be written: Not a directory"):
        share_out(tmp_path / "file" / "in", ["a"], lambda *_: None)
