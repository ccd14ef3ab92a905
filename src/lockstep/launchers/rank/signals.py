"""Asking a rank to stop: signals only set a flag, which the engine looks at between steps."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from lockstep.launchers.rank.early import EarlyNotice, begin_training

ASK_STOP = signal.SIGUSR2
"""Signal from the launcher to its ranks to stop at the next step boundary: mpirun passes it on,
where it would answer SIGINT and SIGTERM by killing the ranks."""

PREEMPTED = signal.SIGUSR1
"""Signal that a batch system sends some time before it ends the job."""

STOP_FILE = "LOCKSTEP_STOP_FILE"
"""Environment variable with the path of a file in which a launcher says what `ASK_STOP` is for."""

_REASONS = {
    signal.SIGINT: "interrupted",
    ASK_STOP: "interrupted",
    signal.SIGHUP: "hung up",
    signal.SIGTERM: "terminated",
    PREEMPTED: "preempted",
}


def write_reason(path: Path, signum: signal.Signals) -> None:
    """Say what ranks are asked to stop for, before they are sent `ASK_STOP`."""
    with suppress(OSError):  # they then count it as an interruption
        path.write_text(_REASONS[signum])


class Terminal:
    """The terminal of this process, if it has one."""

    def __init__(self) -> None:
        self._was_there = self._is_there()
        self._files = [fd for fd in range(3) if os.isatty(fd)]

    def meant_by(self, signum: int) -> signal.Signals:
        """The signal that one stands for: closing the terminal is as pressing Ctrl-C in it."""
        if signum != signal.SIGHUP or not self._was_there or self._is_there():
            return signal.Signals(signum)
        # What is printed from here on has nowhere to go, and must not end what is to stop in order.
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in self._files:
            os.dup2(nowhere, fd)
        os.close(nowhere)
        return signal.SIGINT

    @staticmethod
    def _is_there() -> bool:
        try:
            os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            return False
        return True


class StopRequest:
    """Turns signals into a request to stop, while it is entered as a context manager.

    Enter it before other ranks can know of this one: from then on no such signal kills it. A
    preemption that came while this process started counts.
    A second SIGINT raises `KeyboardInterrupt`. Outside of the main thread, where Python allows
    no signal handlers, nothing is ever requested.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._interrupts = 0
        self._terminal = Terminal()
        self._previous: dict[signal.Signals, Any] = {}

    def reason(self) -> str | None:
        """Why a stop has been requested, as soon as it has: one of `STOP_REASONS`."""
        return self._reason

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            begin_training()
            for signum in _REASONS:
                if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                    continue  # nohup
                previous = self._previous[signum] = signal.signal(signum, self._handle)
                if isinstance(previous, EarlyNotice) and previous.came:
                    self._reason = self._reason or _REASONS[signum]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._previous.items():
            # None stands for a handler that was not installed from Python: it can't be put back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._reason = self._reason or _reason(self._terminal.meant_by(signum))
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt


def _reason(signum: signal.Signals) -> str:
    path = os.environ.get(STOP_FILE)
    if signum == ASK_STOP and path:
        with suppress(OSError, ValueError):
            said = Path(path).read_text()
            if said in _REASONS.values():
                return said
    return _REASONS[signum]
