from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launching.host.processes import MARK, is_alive, kill_marked, marked

HOLDS = """
import fcntl, sys, threading, time
memory = bytearray(600 << 20)
for _ in range(int(sys.argv[2])):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("up", flush=True)
time.sleep(600)
"""


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture(params=[0, 4], ids=["one thread", "5 threads"])
def holder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with much memory, which takes long to die, that holds a lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "lock"), str(request.param)],
        env={**os.environ, MARK: str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_a_process_is_alive_as_long_as_it_holds_locks(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    holder.kill()
    deadline = time.monotonic() + 30.0
    while is_alive(holder.pid):
        assert time.monotonic() < deadline
    assert not is_locked(tmp_path / "lock")


def test_nothing_is_locked_once_a_launch_is_killed(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert marked(str(tmp_path)) == [holder.pid]
    assert is_locked(tmp_path / "lock")
    kill_marked(str(tmp_path))
    assert not is_locked(tmp_path / "lock")


def test_a_known_process_that_is_dying_already_is_waited_for(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    while marked(str(tmp_path)):
        pass
    kill_marked(str(tmp_path), [holder.pid])
    assert not is_alive(holder.pid)
    assert not is_locked(tmp_path / "lock")


def test_processes_of_others_are_not_waited_for(tmp_path: Path) -> None:
    """The number of a process that has ended may be another one's by now."""
    start = time.monotonic()
    kill_marked(str(tmp_path), [os.getpid(), 1])
    assert time.monotonic() - start < 5.0
    assert is_alive(os.getpid())
