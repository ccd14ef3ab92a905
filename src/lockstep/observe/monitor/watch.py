"""The runs that a monitor watches: found in folders, and read again and again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import RunDirectoryError
from lockstep.observe.reading.diagnosis import Calls, Cause, Signature, calls_of, signature_of
from lockstep.observe.reading.diagnosis.verdict import causes
from lockstep.observe.reading.follow import RunReader
from lockstep.observe.reading.history import History
from lockstep.observe.reading.listing import SOURCES, find_runs, summarise


class Watched:
    """A run that is watched; its events are read once its history is requested.

    Attributes:
        path: run directory.
        summary: summary of the run, as of the last `poll`.
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
        """Its events, as of the last `poll`."""
        if self._reader is None:
            self._reader = RunReader(self.path)
            self._read(self._reader)
        return self._reader.history

    @property
    def is_open(self) -> bool:
        """Whether its history was requested, which is kept up to date until `close`."""
        return self._reader is not None

    def close(self) -> None:
        """Forget its history; the next request reads it again."""
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
        """The newest calls of its ranks; reading them, if files have changed, may take seconds."""
        self._read_calls()
        return self._calls[1]

    def _read(self, reader: RunReader) -> bool:
        has_changed = self._read_calls()
        try:
            self.problem = ""
            return reader.poll() or has_changed
        except RunDirectoryError as error:
            self.problem = str(error)
            return has_changed

    def _read_calls(self) -> bool:
        seen = signature_of(self.summary)
        if seen == self._calls[0]:
            return False
        self._calls = seen, calls_of(self.summary)
        return True


def _signature(path: Path) -> tuple[tuple[int, int, int], ...]:
    """Differs from before once a file that a summary is made of has been written."""
    signature = []
    for name in SOURCES:
        try:
            status = (path / name).stat()
        except OSError:
            signature.append((0, 0, 0))
        else:
            signature.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(signature)


class Watch:
    """The runs in some folders, searched again at each `poll`: runs may appear and disappear.

    Attributes:
        folders: run directories, or folders that contain some.
        runs: the runs by their run directories.
    """

    def __init__(self, folders: Sequence[Path], may_come: bool = False) -> None:
        """Look for the first time.

        Args:
            folders: run directories, or folders that contain some.
            may_come: whether a folder may be missing at first.

        Raises:
            RunDirectoryError: a folder does not exist.
        """
        self.folders = folders
        candidates = self._there() if may_come else folders
        self.runs: dict[Path, Watched] = {path: Watched(path) for path in find_runs(candidates)}

    def poll(self) -> list[Watched]:
        """Look again; returns the runs that are new or may have changed."""
        found = dict.fromkeys(find_runs(self._there()))
        self.runs = {path: run for path, run in self.runs.items() if path in found}
        changed = [run for run in self.runs.values() if run.poll()]
        for path in found:
            if path not in self.runs:
                changed.append(self.runs.setdefault(path, Watched(path)))
        return changed

    def _there(self) -> list[Path]:
        return [folder for folder in self.folders if folder.is_dir()]


@dataclass(frozen=True)
class Alert:
    """An alert that has begun or ended.

    Attributes:
        rule: name of its rule.
        state: `on` or `over`.
        run: run directory; for a disk the directory of a run on it.
        task: name of the run's task; empty if it is not known.
        step: step of the run; 0 for a disk.
        message: what was found, in one line.
        since: Unix time at which it was first found.
        time: Unix time at which it began or ended.
    """

    rule: str
    state: str
    run: str
    task: str
    step: int
    message: str
    since: float
    time: float

    @property
    def line(self) -> str:
        """One line for people."""
        lasted = f" after {self.time - self.since:.0f} s" if self.state == "over" else ""
        return f"alert {self.rule} {self.state}{lasted}: {self.run}: {self.message}"


Listener = Callable[[Watch, Sequence[Watched]], None]
"""Takes all runs, and those of them that are new or may have changed."""


class Monitor:
    """Runs that one thread reads and another one shows.

    Attributes:
        watch: the runs; only to be read inside `free` or `look`.
        interval_s: seconds between two looks.
        alerts: function that returns the alerts that are on.
        notes: the newest lines for people, where a screen is to show them.
        due: set when the next look should not wait for its time.

    Args:
        watch: the runs.
        listeners: functions that are called at each look.
        interval_s: seconds between two looks.
        alerts: function that returns the alerts that are on.
        notes: the newest lines for people.
    """

    def __init__(
        self,
        watch: Watch,
        listeners: Sequence[Listener] = (),
        interval_s: float = 1.0,
        alerts: Callable[[], Sequence[Alert]] = lambda: (),
        notes: deque[str] | None = None,
    ) -> None:
        self.watch = watch
        self.interval_s = interval_s
        self.due = threading.Event()
        self._wanted: dict[Path, int] = {}
        """How often each is wanted: a screen may open before an older one of its run is closed."""
        self.alerts = alerts
        self.notes: deque[str] = deque() if notes is None else notes
        self._listeners = listeners
        self._lock = threading.Lock()
        self._is_first = True

    def look(self) -> Sequence[Watched]:
        """Look again, and call the listeners; returns the runs that may have changed.

        At the first look these are all of them.
        """
        with self._lock:
            if not self._listeners:  # they may read a run that nobody else wants
                for path, run in self.watch.runs.items():
                    if run.is_open and path not in self._wanted:
                        run.close()
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
        # A new dict, since another thread may iterate over the old one.
        self._wanted = {**self._wanted, path: self._wanted.get(path, 0) + 1}
        self.due.set()

    def leave(self, path: Path) -> None:
        """Take back one `want`; after the last one the next look forgets the run's events."""
        counts = {**self._wanted, path: self._wanted.get(path, 0) - 1}
        self._wanted = {wanted: count for wanted, count in counts.items() if count > 0}

    @contextmanager
    def free(self) -> Iterator[bool]:
        """Whether no look is going on; if so, none begins inside the `with` block."""
        is_free = self._lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._lock.release()


class MonitorThread(threading.Thread):
    """A thread that looks again and again, so that what shows the runs never waits for a disk.

    Args:
        monitor: the runs.
        looked: called after each look.
        failed: called with the exception that has ended the thread before `end`.
    """

    def __init__(
        self,
        monitor: Monitor,
        looked: Callable[[], object] = lambda: None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        super().__init__(name="lockstep-monitor", daemon=True)
        self._monitor = monitor
        self._looked, self._failed = looked, failed
        self._is_ended = False

    def run(self) -> None:
        """Look until `end`."""
        try:
            while not self._is_ended:
                self._monitor.due.clear()
                self._monitor.look()
                self._looked()
                self._monitor.due.wait(self._monitor.interval_s)
        except Exception as error:
            if not self._is_ended:  # else what listeners need may be closed by now
                self._failed(error)

    def end(self) -> None:
        """Look no more."""
        self._is_ended = True
        self._monitor.due.set()
