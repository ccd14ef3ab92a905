"""The runs that are watched, and what is known of each by now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import RunDirectoryError
from lockstep.reading.diagnosis.calls import Calls, Signature, calls_of, signature_of
from lockstep.reading.diagnosis.cause import Cause
from lockstep.reading.diagnosis.verdict import causes
from lockstep.reading.follow import RunReader
from lockstep.reading.history import History
from lockstep.reading.listing import SOURCES, find_runs, summarise


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
