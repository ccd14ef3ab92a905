"""The runs that are watched, one look after another, and what each look finds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import RunDirectoryError
from lockstep.observe.reading.diagnosis.facts import Calls, Cause, Signature, calls_of, signature_of
from lockstep.observe.reading.diagnosis.verdict import causes
from lockstep.observe.reading.follow import RunReader
from lockstep.observe.reading.history import History
from lockstep.observe.reading.listing import SOURCES, find_runs, summarise


class Watched:
    """A run that is watched; its events are read once somebody asks for its history.

    Attributes:
        path: run directory.
        summary: what a list shows of it.
        problem: why its events cannot be read; empty if they can.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self.summary = summarise(path)
        self._seen = _signature(path)
        self._reader: RunReader | None = None
        self._calls: tuple[Signature, Calls] = (), Calls()

    @property
    def history(self) -> History:
        """What its events tell, as of the last `poll`."""
        if self._reader is None:
            self._reader = RunReader(self.path)
            self._read(self._reader)
        return self._reader.history

    @property
    def is_open(self) -> bool:
        """Whether its history has been asked for, which is kept up to date until `close`."""
        return self._reader is not None

    def close(self) -> None:
        """Forget its history; it is read anew if somebody asks for it again."""
        self._reader = None
        self._calls = (), Calls()
        self.problem = ""

    def poll(self) -> bool:
        """Look again; returns whether anything may have changed."""
        seen = _signature(self.path)
        if seen == self._seen and self.summary.state not in ("running", "new"):
            return self.is_open and self._read_calls()  # which ranks write as they end
        before, self._seen, self.summary = self.summary, seen, summarise(self.path)
        read = self._reader is not None and self._read(self._reader)
        return read or self.summary != before

    def causes(self) -> list[Cause]:
        """What has ended it or costs it time, the heaviest first, as of the last `poll`."""
        return causes(self.summary, self.history, self._calls[1])

    def newest_calls(self) -> Calls:
        """The calls of its ranks; they are read, which may take seconds, if files have changed."""
        self._read_calls()
        return self._calls[1]

    def _read(self, reader: RunReader) -> bool:
        is_other = self._read_calls()
        try:
            self.problem = ""
            return reader.poll() or is_other
        except RunDirectoryError as error:
            self.problem = str(error)
            return is_other

    def _read_calls(self) -> bool:
        seen = signature_of(self.summary)
        if seen == self._calls[0]:
            return False
        self._calls = seen, calls_of(self.summary)
        return True


class Watch:
    """Runs in folders, found again at each look: one may come, and one may go.

    Attributes:
        folders: run directories, or folders with such.
        runs: by their folders.
    """

    def __init__(self, folders: Sequence[Path], may_come: bool = False) -> None:
        """Look for the first time.

        Args:
            folders: run directories, or folders with such.
            may_come: whether a folder need not be there yet.

        Raises:
            RunDirectoryError: a folder is not there.
        """
        self.folders = folders
        there = self._there() if may_come else folders
        self.runs: dict[Path, Watched] = {path: Watched(path) for path in find_runs(there)}

    def poll(self) -> list[Watched]:
        """Look again; returns those that are new or may have changed."""
        found = dict.fromkeys(find_runs(self._there()))
        self.runs = {path: run for path, run in self.runs.items() if path in found}
        changed = [run for run in self.runs.values() if run.poll()]
        for path in found:
            if path not in self.runs:
                changed.append(self.runs.setdefault(path, Watched(path)))
        return changed

    def _there(self) -> list[Path]:
        return [folder for folder in self.folders if folder.is_dir()]


def _signature(path: Path) -> tuple[tuple[int, int, int], ...]:
    """What is another one once a file that a summary is made of has been written."""
    return tuple(_stat(path / name) for name in SOURCES)


def _stat(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Alert:
    """Something that a rule looks for has come, or has gone.

    Attributes:
        rule: name of the rule.
        state: `on` or `over`.
        run: the run's folder; for a disk a folder on it.
        task: name of the run's task; empty if it is not known.
        step: that the run was at; 0 for a disk.
        message: what it is, in one line.
        since: Unix time at which it came.
        time: Unix time of this telling.
    """

    rule: str
    state: str
    run: str
    task: str
    step: int
    message: str
    since: float
    time: float

    def told(self) -> str:
        """One line for people."""
        lasted = f" after {self.time - self.since:.0f} s" if self.state == "over" else ""
        return f"alert {self.rule} {self.state}{lasted}: {self.run}: {self.message}"


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
