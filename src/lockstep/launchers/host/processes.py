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
_FLAGS, _PF_EXITING = 6, 0x4
"""Where /proc/PID/stat has a process's flags, counted from its state; one flag of linux/sched.h."""


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
    """Whether a process runs; a zombie, which has ended but was not waited for, does not.

    A process whose main thread has ended is not gone, nor are its files and locks, before its other
    threads have.
    """
    return _runs(pid) or any(_runs(pid, thread) for thread in _threads(pid))


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


def _is_exiting(pid: int) -> bool:
    """Whether a process is about to be gone: its environment is already, its locks are not yet.

    This takes the longer the more memory it has.
    """
    return is_alive(pid) and bool(int(_columns(pid)[_FLAGS]) & _PF_EXITING)


def _runs(pid: int, thread: int | None = None) -> bool:
    """Whether a thread of a process has not ended; its main thread, if none is named."""
    return _columns(pid, thread)[0] not in "ZX"


def _state(pid: int) -> str:
    """The kernel's letter for a process's state; X if there is none."""
    return _columns(pid)[0]


def _columns(pid: int, thread: int | None = None) -> list[str]:
    """What the kernel tells of a thread, from its state on; a state of X if there is none."""
    folder = Path("/proc", str(pid), *([] if thread is None else ["task", str(thread)]))
    try:
        # The name before the state is in parentheses and may hold anything.
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"] + ["0"] * _FLAGS


def _threads(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


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


def kill_marked(mark: str, known: Iterable[int] = (), timeout_s: float = 10.0) -> None:
    """Kill all processes of a launch, and return when they are gone, with their files and locks.

    Args:
        mark: the launch's unique name.
        known: processes that are known to be of it.
        timeout_s: seconds after which this returns in any case.
    """
    deadline = time.monotonic() + timeout_s
    seen = set(known)
    # A process may have been about to start another one, so look again until none is left.
    while time.monotonic() < deadline:
        pids = marked(mark)
        if not pids and not any(map(_is_exiting, seen)):
            return
        seen.update(pids)
        send(pids, signal.SIGKILL)
        time.sleep(_POLL_S)
