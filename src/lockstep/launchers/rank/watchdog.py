"""A process beside each rank that turns a hang into a death, which the others can recover from.

A rank that is stopped, or stuck in a deadlock, an endless loop or a dead file system, would keep
all others waiting for ever. Its watchdog reads its pulse, and when that has not beaten for too
long, saves the rank's Python stack and kills it. A rank that waits for others is not the one that
hangs. This file is also run as a script, without site packages and without importing `lockstep`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

STACK_SIGNAL = signal.SIGRTMIN + 3
"""At this signal a rank writes its Python stacks down, whatever it is doing."""

_POLL_S = 0.1
_STACK_S = 0.3
_QUIET_S = 0.05
"""A stack that has not grown for this long is complete: nothing else tells its end."""
_FACTOR = 10
"""A rank may pause this many times as long as it ever did."""


class Watchdog:
    """Watches this process, while it is entered as a context manager.

    Args:
        pulse_fd: file descriptor of the memory that holds the pulse; -1 if there is none.
        timeout_s: seconds that a rank may stand still; more if it has paused for long before.
        report: path of the JSON file for the reason and the Python stacks.
    """

    def __init__(self, pulse_fd: int, timeout_s: float, report: Path) -> None:
        self._pulse_fd = pulse_fd
        self._timeout_s = timeout_s
        self._report = report
        self._child: subprocess.Popen[bytes] | None = None
        self._stack_fd = -1

    def __enter__(self) -> Watchdog:
        if self._pulse_fd < 0 or not Path("/proc/self/stat").exists():
            return self
        with contextlib.suppress(OSError):
            self._report.unlink(missing_ok=True)
        self._stack_fd = os.memfd_create("lockstep-stack")
        faulthandler.register(STACK_SIGNAL, file=self._stack_fd, all_threads=True)
        arguments = [os.getpid(), self._pulse_fd, self._stack_fd, self._timeout_s, self._report]
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, arguments)],
            pass_fds=(self._pulse_fd, self._stack_fd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
            faulthandler.unregister(STACK_SIGNAL)
            os.close(self._stack_fd)


def main(pid: int, pulse_fd: int, stack_fd: int, timeout_s: float, report: str) -> None:
    """Watch the process `pid`, this one's parent, until it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    pulse = memoryview(mmap.mmap(pulse_fd, 24, prot=mmap.PROT_READ)).cast("q")
    poll_s = min(_POLL_S, timeout_s / 10)
    longest_s = 0.0
    beats, since, stopped_since = pulse[0], time.monotonic(), 0.0
    while os.getppid() == pid:
        now = time.monotonic()
        if pulse[0] != beats or pulse[1]:
            longest_s = max(longest_s, now - since) if not pulse[1] else longest_s
            beats, since = pulse[0], now
        stopped_since = (stopped_since or now) if _is_stopped(pid) else 0.0
        if stopped_since:
            if now - stopped_since > timeout_s:
                _end(pid, stack_fd, report, f"was stopped by a signal for {timeout_s:g} s")
        elif pulse[2] and now - since > max(timeout_s, _FACTOR * longest_s):
            _end(pid, stack_fd, report, f"did nothing for {now - since:.1f} s")
        time.sleep(poll_s)


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"


def _end(pid: int, stack_fd: int, report: str, reason: str) -> None:
    """Write down where the process stands, and kill it."""
    os.kill(pid, STACK_SIGNAL)
    os.kill(pid, signal.SIGCONT)  # or a stopped process would not write
    grown = time.monotonic()
    deadline, size = grown + _STACK_S, 0
    while (now := time.monotonic()) < deadline and (not size or now - grown < _QUIET_S):
        time.sleep(0.002)
        before, size = size, os.fstat(stack_fd).st_size
        if size > before:
            grown = time.monotonic()
    stack = os.pread(stack_fd, 1 << 16, 0).decode(errors="replace")
    text = f"{reason}; its Python stack:\n{stack}"
    with contextlib.suppress(OSError):
        folder, name = os.path.split(report)
        # A file name that cannot be guessed, so that no link can have been put there.
        temporary = os.path.join(folder, f".{name}.{os.urandom(8).hex()}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o666), "w", encoding="utf-8") as file:
            json.dump({"reason": text}, file)
        os.replace(temporary, report)
    sys.stderr.write(f"process {pid} {text}\n")
    sys.stderr.flush()
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watched, pulse, stack, limit, path = sys.argv[1:]
    main(int(watched), int(pulse), int(stack), float(limit), path)
