"""A process beside each rank that kills the rank if it hangs, so that the others can recover.

A rank that is stopped, or stuck in a deadlock, an endless loop or a dead file system, would keep
all others waiting for ever. Its watchdog reads its heartbeat. When that has stood still for too
long, it saves the rank's Python stack and newest calls, and kills the rank. A rank that waits for
others is not the one that hangs. The newest calls of a rank that has waited for long are saved too:
the launcher may end all ranks once one is dead, and ranks that have made different calls wait for
each other for ever. A rank whose watchdog has been killed or stopped starts another one. A rank
that is stopped cannot, so each watchdog has a deputy, which sleeps until the watchdog has ended.

This file is also run as a script, without site packages and without importing `lockstep`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

STACK_SIGNAL = signal.SIGRTMIN + 3
"""At this signal a rank writes out its Python stacks, whatever it is doing."""

_POLL_S = 0.1
_STACK_S = 0.3
_SAY_S = 1.0
_QUIET_S = 0.05
"""A stack that has not grown for this long is complete: nothing else marks its end."""
_PATIENCE = 0.5
"""Part of the timeout after which the calls of a waiting rank are written to a file."""
_LIFE_S = 0.1
"""A watchdog is replaced this long after it was started, at the earliest: it may fail each time."""
_REPLACED_S = 10 * _LIFE_S
"""A rank that runs has replaced its watchdog by then."""
_STOPS = {
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
}  # fmt: skip
"""Signals to the rank's process group that ask the rank to stop: its watchdog stays meanwhile."""
_STOPPED = "was stopped by a signal for {:g} s"
_FACTOR = 10
"""A rank may pause this many times as long as its longest pause so far."""
_WAITS = ("", "in one call: another rank, or its host, does not answer", "for the disk of its run")
"""What a rank waits for, by the second number of its heartbeat."""


class Watchdog:
    """Watches this process, while it is entered as a context manager.

    Args:
        heartbeat_fd: file descriptor of the memory that holds the heartbeat; -1 if there is none.
        timeout_s: seconds for which a rank may stand still; more after a long pause.
        report: path of the JSON file for the reason and the Python stacks.
        calls_fd: file descriptor of the memory with the newest calls; -1 if there is none.
        calls: path of the file for the newest calls of a rank that is killed.
        waiting: path of the file for those of one that waits; it is there as long as it does.
        name: name of the rank in the message that it has waited for `timeout_s`; "" for no message.
        stays: whether to watch on after the session, until this process has ended: a rank that is
            stopped while it leaves would keep the others, and the launcher, waiting.
    """

    _staying: ClassVar[Watchdog | None] = None

    def __init__(
        self,
        heartbeat_fd: int,
        timeout_s: float,
        report: Path,
        calls_fd: int,
        calls: Path,
        waiting: Path,
        name: str = "",
        stays: bool = False,
    ) -> None:
        self._heartbeat_fd, self._calls_fd = heartbeat_fd, calls_fd
        self._timeout_s = timeout_s
        self._report, self._calls, self._waiting = report, calls, waiting
        self._name = name
        self._stays = stays
        self._child: subprocess.Popen[bytes] | None = None
        self._changing = threading.Lock()
        self._is_ending = threading.Event()
        self._stack_fd = -1

    def __enter__(self) -> Watchdog:
        if self._heartbeat_fd < 0 or not Path("/proc/self/stat").exists():
            return self
        with contextlib.suppress(OSError):
            self._report.unlink(missing_ok=True)
        if Watchdog._staying is not None:
            Watchdog._staying._end()
        self._stack_fd = os.memfd_create("lockstep-stack")
        faulthandler.register(STACK_SIGNAL, file=self._stack_fd, all_threads=True)
        self._child = self._started()
        self._keeper = threading.Thread(target=self._keep, args=[self._child], daemon=True)
        self._keeper.start()
        return self

    def _started(self) -> subprocess.Popen[bytes]:
        descriptors = (self._heartbeat_fd, self._stack_fd, self._calls_fd)
        paths = (self._report, self._calls, self._waiting)
        arguments = [os.getpid(), *descriptors, self._timeout_s, *paths, self._name]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # which a child inherits
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *map(str, arguments)],
                pass_fds=[fd for fd in descriptors if fd >= 0],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _keep(self, child: subprocess.Popen[bytes]) -> None:
        """Replace the watchdog whenever it has ended or was stopped by anyone else."""
        while not self._is_ending.is_set():
            started = time.monotonic()
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            self._is_ending.wait(started + _LIFE_S - time.monotonic())
            with self._changing:
                child.kill()
                child.wait()
                if not self._is_ending.is_set():
                    with contextlib.suppress(OSError):
                        self._child = child = self._started()

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            if self._stays:
                Watchdog._staying = self
            else:
                self._end()
            with contextlib.suppress(OSError):
                self._waiting.unlink(missing_ok=True)
                self._waiting.parent.rmdir()  # if it is empty

    def _end(self) -> None:
        assert self._child is not None, "it has begun"
        with self._changing:
            self._is_ending.set()
            self._child.kill()
        self._keeper.join()
        self._child = Watchdog._staying = None
        faulthandler.unregister(STACK_SIGNAL)
        os.close(self._stack_fd)


def main(
    pid: int,
    heartbeat_fd: int,
    stack_fd: int,
    calls_fd: int,
    timeout_s: float,
    report: str,
    calls: str,
    waiting: str,
    name: str,
) -> None:
    """Watch the process `pid`, this one's parent, until it ends."""

    def end(reason: str, is_stopped: bool = False) -> None:
        _copy(calls_fd, calls)
        # To write its stack, a stopped process would have to continue, and would train meanwhile.
        # Besides, the place where it was stopped does not explain who has stopped it.
        text = reason if is_stopped else f"{reason}; its Python stack:\n{_stack(pid, stack_fd)}"
        _end(pid, report, text)

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    heartbeat = memoryview(mmap.mmap(heartbeat_fd, 24, prot=mmap.PROT_READ)).cast("q")
    poll_s = min(_POLL_S, timeout_s / 10)
    with contextlib.suppress(OSError):  # an old kernel
        _appoint_deputy(pid, timeout_s, poll_s, end)
    longest_s = 0.0
    beats, since, stopped_since = heartbeat[0], time.monotonic(), 0.0
    waiting_beats, waiting_since = heartbeat[0], since
    is_written = is_reported = False
    _remove(waiting)  # an earlier watchdog's
    while os.getppid() == pid:
        now, waits_for = time.monotonic(), heartbeat[1]
        if heartbeat[0] != beats or waits_for:
            longest_s = max(longest_s, now - since) if not waits_for else longest_s
            beats, since = heartbeat[0], now
        if heartbeat[0] != waiting_beats or not waits_for:
            waiting_beats, waiting_since = heartbeat[0], now
            if is_written:
                _remove(waiting)
                is_written = is_reported = False
        elif not is_written and now - waiting_since > timeout_s * _PATIENCE:
            is_written = True
            _copy(calls_fd, waiting)
        elif name and not is_reported and now - waiting_since > timeout_s:
            # The connections to a host that is cut off stay open, so nothing else reports it.
            is_reported = True
            _say(f"{name} has waited for {timeout_s:g} s {_WAITS[waits_for]}")
        stopped_since = (stopped_since or now) if _is_stopped(pid) else 0.0
        if stopped_since:
            if now - stopped_since > timeout_s:
                end(_STOPPED.format(timeout_s), is_stopped=True)
        elif heartbeat[2] and now - since > max(timeout_s, _FACTOR * longest_s):
            end(f"did nothing for {now - since:.1f} s")
        time.sleep(poll_s)


def _appoint_deputy(pid: int, timeout_s: float, poll_s: float, end: Callable[..., None]) -> None:
    """Start a process that ends the rank if it is stopped when this one has been killed.

    Raises:
        OSError: there is no way to.
    """
    rank = os.pidfd_open(pid)
    told, life = os.pipe()
    if os.fork():
        os.close(told)  # the other end stays open as long as this process lives
        return
    os.close(life)
    os.read(told, 1)
    since, was_stopped = time.monotonic(), False
    while not select.select([rank], [], [], poll_s)[0]:  # until it ends
        now, is_stopped = time.monotonic(), _is_stopped(pid)
        if is_stopped != was_stopped:
            since, was_stopped = now, is_stopped
        elif is_stopped and now - since > timeout_s:
            end(_STOPPED.format(timeout_s), is_stopped=True)
        elif not is_stopped and now - since > _REPLACED_S:
            break
    os._exit(0)


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


def _stack(pid: int, stack_fd: int) -> str:
    """The Python stacks of the process, if it can still write them."""
    os.kill(pid, STACK_SIGNAL)
    grown = time.monotonic()
    deadline, size = grown + _STACK_S, 0
    while (now := time.monotonic()) < deadline and (not size or now - grown < _QUIET_S):
        time.sleep(0.002)
        before, size = size, os.fstat(stack_fd).st_size
        if size > before:
            grown = time.monotonic()
    return os.pread(stack_fd, 1 << 16, 0).decode(errors="replace")


def _end(pid: int, report: str, text: str) -> None:
    """Write the reason to a file, and kill the process."""
    _write(report, json.dumps({"reason": text}).encode())
    _say(f"process {pid} {text}")
    os.kill(pid, signal.SIGKILL)


def _say(text: str) -> None:
    # In a thread: the reader of standard error may have stalled, and must not save a hung process.
    writing = threading.Thread(target=os.write, args=(2, f"{text}\n".encode()), daemon=True)
    writing.start()
    writing.join(_SAY_S)


def _copy(calls_fd: int, path: str) -> None:
    """Write the newest calls of the process to a file."""
    if calls_fd >= 0:
        _write(path, os.pread(calls_fd, os.fstat(calls_fd).st_size, 0))


def _write(path: str, data: bytes) -> None:
    """Write a file as a whole; a failure must not keep a hung process alive."""
    with contextlib.suppress(OSError):
        folder, name = os.path.split(path)
        os.makedirs(folder or ".", exist_ok=True)
        # A file name that cannot be guessed, so that no link can have been put there.
        temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(data)
        os.replace(temporary, path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


if __name__ == "__main__":
    watched, heartbeat, stack, ring, limit, *files = sys.argv[1:]
    main(int(watched), int(heartbeat), int(stack), int(ring), float(limit), *files)
