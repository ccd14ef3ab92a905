"""One look after another: at the runs, and at what each says to those who listen."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.monitor.alerts.alert import Alert
from lockstep.monitor.watch import Watch, Watched

_MOST_NOTES = 50

Listener = Callable[[Watch, Sequence[Watched]], None]
"""Takes the runs, and those of them that are new or may have changed."""


def no_alerts() -> Sequence[Alert]:
    """What is on where there are no rules."""
    return ()


class Notes:
    """Lines for people that come while a screen is there, which shows them.

    Attributes:
        lines: the newest ones.
    """

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_MOST_NOTES)

    def __call__(self, line: str) -> None:
        """Take a line; from any thread."""
        self.lines.append(line)


class Session:
    """The runs that are watched, read by one thread and shown by another.

    Attributes:
        watch: the runs; to be read inside `free` or `look` only.
        interval_s: seconds between two looks.
        alerts: function that returns the alerts that are on.
        notes: lines for people that have come meanwhile.
        due: set when somebody does not want to wait for the next look.

    Args:
        watch: the runs.
        listeners: called at each look.
        interval_s: seconds between two looks.
        alerts: function that returns the alerts that are on.
        notes: lines for people, where a screen shows them.
    """

    def __init__(
        self,
        watch: Watch,
        listeners: Sequence[Listener] = (),
        interval_s: float = 1.0,
        alerts: Callable[[], Sequence[Alert]] = no_alerts,
        notes: Notes | None = None,
    ) -> None:
        self.watch = watch
        self.interval_s = interval_s
        self.due = threading.Event()
        self._wanted: dict[Path, int] = {}
        """How often each is wanted: a screen may open before an older one of its run is gone."""
        self.alerts = alerts
        self.notes = notes or Notes()
        self._listeners = listeners
        self._lock = threading.Lock()
        self._is_first = True

    def look(self) -> Sequence[Watched]:
        """Look again, and tell the listeners; returns the runs that may have changed.

        The first look tells of all of them.
        """
        with self._lock:
            self._close_unwanted()
            changed = self.watch.poll()
            if self._is_first:
                changed, self._is_first = list(self.watch.runs.values()), False
            for path in self._wanted.keys() & self.watch.runs.keys():
                _ = self.watch.runs[path].history
            for listener in self._listeners:
                listener(self.watch, changed)
            return changed

    def want(self, path: Path) -> None:
        """Have a run's events read, at once and at each look."""
        # Another thread may go through the old one.
        self._wanted = {**self._wanted, path: self._wanted.get(path, 0) + 1}
        self.due.set()

    def leave(self, path: Path) -> None:
        """Take back one `want`; after the last one the next look forgets the run's events.

        With listeners the run stays open, for they may read it too.
        """
        counts = {**self._wanted, path: self._wanted.get(path, 0) - 1}
        self._wanted = {wanted: count for wanted, count in counts.items() if count > 0}

    def _close_unwanted(self) -> None:
        if self._listeners:
            return
        for path, run in self.watch.runs.items():
            if run.is_open and path not in self._wanted:
                run.close()

    @contextmanager
    def free(self) -> Iterator[bool]:
        """Whether nobody reads at the moment; nobody begins to while in here, if it is so."""
        is_free = self._lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._lock.release()


class Looker(threading.Thread):
    """A thread that looks again and again, so that what shows the runs never waits for a disk.

    Args:
        session: the runs.
        looked: called after each look.
        failed: called with what has ended the thread before `end`.
    """

    def __init__(
        self,
        session: Session,
        looked: Callable[[], None] = lambda: None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        super().__init__(name="lockstep-monitor", daemon=True)
        self._session = session
        self._looked, self._failed = looked, failed
        self._is_ended = False

    def run(self) -> None:
        """Look until `end`."""
        try:
            while not self._is_ended:
                self._session.due.clear()
                self._session.look()
                self._looked()
                self._session.due.wait(self._session.interval_s)
        except Exception as error:
            if not self._is_ended:  # else what listeners need may be closed by now
                self._failed(error)

    def end(self) -> None:
        """Look no more."""
        self._is_ended = True
        self._session.due.set()
