"""The processes of a launch: finding all of them, wherever they have moved, and ending them.

mpirun and torchrun put each rank into a process group of its own, and ranks whose launcher died
have no parent that ends them. So a launch marks its processes by an environment variable, which
all of them inherit, and finds them by it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "LOCKSTEP_LAUNCH"
"""Environment variable that holds the launch's unique name."""

_POLL_S = 0.02


def marked(mark: str) -> list[int]:
    """The living processes of this host that carry a launch's mark (none where /proc is not)."""
    entry = f"{MARK}={mark}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            if entry in (folder / "environ").read_bytes().split(b"\0") and is_alive(pid):
                pids.append(pid)
    return pids


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which has ended but was not waited for, does not."""
    return _state(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process."""
    return _state(pid) == "T"


def is_held(pid: int) -> bool:
    """Whether a process cannot run at the moment: a signal has stopped it, or it has ended."""
    return _state(pid) in "TtZX"


def variable(pid: int, name: str) -> str:
    """An environment variable as it was when a process began; empty if it was not set."""
    with contextlib.suppress(OSError):
        for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            key, _, value = item.partition(b"=")
            if key == name.encode():
                return value.decode()
    return ""


def _state(pid: int) -> str:
    """The kernel's letter for a process's state; X if there is none."""
    try:
        # The name before the state is in parentheses and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def children(pid: int) -> list[int]:
    """The living direct children of a process (none where /proc is not)."""
    pids = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += [int(child) for child in path.read_text().split()]
    return [child for child in pids if is_alive(child)]


def send(pids: Iterable[int], signum: signal.Signals) -> None:
    """Signal those of the processes that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill_marked(mark: str, timeout_s: float = 10.0) -> None:
    """Kill all processes of a launch, and return when they are gone."""
    deadline = time.monotonic() + timeout_s
    # A process may have been about to start another one, so look again until none is left.
    while (pids := marked(mark)) and time.monotonic() < deadline:
        send(pids, signal.SIGKILL)
        time.sleep(_POLL_S)
