"""The processes of a launch on this host: their cores and store, finding and ending all of them.

mpirun and torchrun put each rank into a process group of its own, and ranks whose launcher has died
have no parent that ends them. So a launch marks its processes by an environment variable that all
of them inherit, and finds them by it.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.comm.host import control_groups

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""Environment variables with the number of threads that numerical libraries start."""

_HOST_STORE = """
import socket, sys
if not sys.path[0]:  # the working directory, whose modules would hide others of their names
    del sys.path[0]
from lockstep.launching.host.supervisor import hosted_store
store = hosted_store(socket.socket(fileno=int(sys.argv[1])))
sys.stdin.read()
"""
_DIGITS = 10
"""A number with more digits is not taken as a number of cores."""


def thread_warnings(threads: int, ranks: int, cores: int) -> list[str]:
    """Warnings about `ranks` × `threads` on one host with `cores`, if they do not match."""
    wanted = ranks * threads
    load = f"{_count(ranks, 'rank')} x {_count(threads, 'thread')} on {_count(cores, 'core')}"
    if wanted > cores:
        fitting = cores // threads
        advice = f"{_count(fitting, 'rank')} would fit" if fitting else f"threads={cores} would fit"
        return [f"{load}: oversubscribed, steps will be slow; {advice}"]
    if wanted < cores:
        advice = "use more ranks"
        if cores // ranks > threads:
            advice += f", or threads={cores // ranks} (bits depend on threads)"
        return [f"{load}: {_count(cores - wanted, 'core')} idle; {advice}"]
    return []


def usable_cores(
    env: Mapping[str, str] | None = None,
    local_ranks: int = 1,
    pids: Iterable[int] = (),
    root: Path = Path("/"),
) -> int:
    """Cores that the ranks on this host may use.

    The least of: the cores that this process or any of `pids` may run on, the control group's
    quota, and what SLURM gives (`SLURM_CPUS_ON_NODE`, or `SLURM_CPUS_PER_TASK` for each rank).

    Args:
        env: environment variables; `os.environ` by default.
        local_ranks: number of ranks on this host.
        pids: process ids of the ranks on this host, where known.
        root: folder in which the file systems `/proc` and `/sys` are.
    """
    env = os.environ if env is None else env
    limits = [_affinity(pids), _quota(root)]
    per_task = env.get("SLURM_CPUS_PER_TASK", "")
    on_node = env.get("SLURM_CPUS_ON_NODE", "")
    if on_node.isdecimal() and len(on_node) < _DIGITS:
        limits.append(int(on_node))
    elif per_task.isdecimal() and len(per_task) < _DIGITS:
        limits.append(int(per_task) * local_ranks)
    return max(1, math.floor(min(limits)))


def _affinity(pids: Iterable[int]) -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set(os.sched_getaffinity(0))
    for pid in pids:
        with contextlib.suppress(OSError):
            cores |= os.sched_getaffinity(pid)
    return len(cores)


def _quota(root: Path) -> float:
    """CPU seconds a second that the control groups of this process grant (v2, then v1)."""
    limits = [math.inf]
    for is_v2, folder in control_groups("cpu", root):
        files = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        # The files are absent, or hold "max" or a quota of -1, where there is no limit.
        with contextlib.suppress(OSError, ValueError, ArithmeticError):
            quota, period = " ".join((folder / name).read_text() for name in files).split()
            if int(quota) > 0:
                limits.append(int(quota) / int(period))
    return min(limits)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


MARK = "LOCKSTEP_LAUNCH"
"""Environment variable that holds the launch's unique name."""

_POLL_S = 0.02
_FLAGS, _PF_EXITING = 6, 0x4
"""Where /proc/PID/stat has a process's flags, counted from its state; one flag of linux/sched.h."""


def marked(mark: str, name: str = MARK) -> list[int]:
    """The living processes of this host that carry a launch's mark (none where /proc is not)."""
    entry = f"{name}={mark}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            if entry in (folder / "environ").read_bytes().split(b"\0") and is_alive(pid):
                pids.append(pid)
    return pids


def shell_code(code: int) -> int:
    """An exit code of `subprocess` as shells have it: 128 + the number of a signal."""
    return 128 - code if code < 0 else code


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which has ended but was not waited for, does not.

    A process whose main thread has ended is not gone, nor are its files and locks, before its other
    threads have.
    """
    return _runs(pid) or any(_runs(pid, thread) for thread in _threads(pid))


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process."""
    return _state(pid) == "T"


def is_suspended(pid: int) -> bool:
    """Whether a process cannot run at the moment: it was stopped by a signal, or has ended."""
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
    """Whether a process is being removed: its environment is gone already, its locks are not.

    The more memory it has, the longer this takes.
    """
    return is_alive(pid) and bool(int(_columns(pid)[_FLAGS]) & _PF_EXITING)


def _runs(pid: int, thread: int | None = None) -> bool:
    """Whether a thread of a process has not ended; its main thread, if none is named."""
    return _columns(pid, thread)[0] not in "ZX"


def _state(pid: int) -> str:
    """The kernel's letter for a process's state; X if there is none."""
    return _columns(pid)[0]


def _columns(pid: int, thread: int | None = None) -> list[str]:
    """The columns of a thread in /proc, from its state on; a state of X if there is none."""
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


def kill_marked(
    mark: str, known: Iterable[int] = (), timeout_s: float = 10.0, name: str = MARK
) -> None:
    """Kill all processes of a launch, and return when they are gone, with their files and locks.

    Args:
        mark: the launch's unique name.
        known: processes that are known to be of it.
        timeout_s: seconds after which this returns in any case.
        name: the environment variable that holds it.
    """
    deadline = time.monotonic() + timeout_s
    seen = set(known)
    # A process may have been about to start another one, so look again until none is left.
    while time.monotonic() < deadline:
        pids = marked(mark, name)
        if not pids and not any(map(_is_exiting, seen)):
            return
        seen.update(pids)
        send(pids, signal.SIGKILL)
        time.sleep(_POLL_S)


class StoreProcess:
    """The store in which ranks find each other, in a process of its own.

    Importing torch would keep this one from answering for seconds. The other ends with it.

    Args:
        host: address of this host, to listen at.

    Attributes:
        address: host and port of the store, which ranks may connect to from now on.
    """

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=1024)
        self.address: tuple[str, int] = host, self._listener.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process."""
        with self._listener as listener:
            fd = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _HOST_STORE, str(fd)],
                stdin=subprocess.PIPE,
                pass_fds=[fd],
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """What the process has ended with, negative if a signal killed it; None if it has not."""
        return None if self._process is None else self._process.poll()

    def end(self) -> None:
        """End the process, and listen no longer."""
        self._listener.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
