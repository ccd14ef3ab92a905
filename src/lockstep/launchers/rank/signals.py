"""Asking a rank to stop: signals only set a flag, which the engine looks at between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from lockstep.launchers.rank.early import EarlyNotice, begin_training

ASK_STOP = signal.SIGUSR2
"""Signal from the launcher to its ranks to stop at the next step boundary: mpirun passes it on,
where it would answer SIGINT and SIGTERM by killing the ranks."""

PREEMPTED = signal.SIGUSR1
"""Signal that a batch system sends some time before it ends the job."""

_REASONS = {
    signal.SIGINT: "interrupted",
    ASK_STOP: "interrupted",
    signal.SIGTERM: "terminated",
    PREEMPTED: "preempted",
}


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
        self._previous: dict[signal.Signals, Any] = {}

    def reason(self) -> str | None:
        """`interrupted`, `terminated` or `preempted`, as soon as a stop has been requested."""
        return self._reason

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            begin_training()
            for signum in _REASONS:
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
        self._reason = self._reason or _REASONS[signal.Signals(signum)]
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
