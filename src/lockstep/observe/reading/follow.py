"""Reading the events of a run: both ends of them, all, or what is new since the last time."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.config.files import MAX_TEXT_BYTES, open_regular, open_to_read
from lockstep.config.parsing import parse_object
from lockstep.engine.checkpoint.listing import IDENTITY
from lockstep.errors import RunDirectoryError
from lockstep.observe.reading.history import History

EVENTS = "events.jsonl"

_BLOCK = 1 << 22
"""Bytes that are searched at the beginning and at the end of a file of events."""
_MAX_BYTES = 1 << 26
"""Bytes that are searched at the end if no report of steps is found before."""
_MAX_ROWS = 64
"""The number of the newest rows of each kind that are parsed."""
_KINDS = ("RunStarted", "Joined", "Recovered", "StepDone", "Evaluated")
_ROW = re.compile(rb'"event": "(\w+)"')
_NAMED_WITHIN = 200
"""The first bytes of a row, which contain the name of its event."""
_FRESH_S = 30.0
"""A run on another host, whose lock may be invisible, is running if it wrote within this time."""
_GAPS = 4.0
"""Or within so many times the longest time between two of its reports."""
_BEYOND = 1e15
"""More than any clock or counter shows."""


@dataclass
class NewestRows:
    """Some rows of a file of events.

    Attributes:
        by_kind: the newest rows of each kind that a summary needs, in order.
        first_time: Unix time of the first row; 0.0 if there is none.
        last_time: Unix time of the newest row.
        ran_s: seconds that the run has taken, without the pauses between its sessions; with them
            if an earlier version has written the newest row.
        written: Unix time at which the file was last written.
    """

    by_kind: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    first_time: float = 0.0
    last_time: float = 0.0
    ran_s: float = 0.0
    written: float = 0.0

    def newest(self, kind: str) -> dict[str, Any]:
        """The newest row of a kind; empty if there is none."""
        return self.by_kind.get(kind, [{}])[-1]

    def may_go_on(self) -> bool:
        """Whether a run that no process here has locked may be running on another host."""
        if self.newest("Joined").get("host") == socket.gethostname():
            return False
        times = [number(row.get("time")) for row in self.by_kind.get("StepDone", [])]
        gap = max((after - before for before, after in pairwise(times)), default=0.0)
        return time.time() - self.written < max(_FRESH_S, _GAPS * gap)


def rows_at_both_ends(path: Path) -> NewestRows:
    """The first and the last rows of a file of events; what is not a row is ignored.

    Where much else is logged, the search goes on further from the end until it finds a report of
    steps. If it finds none, reports at the beginning are ignored too: they are not the newest.
    """
    found = NewestRows()
    try:
        with open_to_read(path) as file:
            head = file.read(_BLOCK)
            status = os.fstat(file.fileno())
            found.written = status.st_mtime
            tail, start = _tail(file, status.st_size)
    except FileNotFoundError:
        return found
    is_whole = start == _BLOCK
    lines = (head + tail).splitlines() if is_whole else head.splitlines() + tail.splitlines()[1:]
    by_kind = _by_kind(lines)
    if not is_whole and not _tells_steps(tail):
        by_kind |= {"StepDone": [], "Evaluated": _by_kind(tail.splitlines()[1:])["Evaluated"]}
    for kind, some in by_kind.items():
        rows = [row for line in some[-_MAX_ROWS:] if (row := _row(line))]
        found.by_kind |= {kind: rows} if rows else {}
    found.first_time = next((t for line in lines if (t := _time(line))), 0.0)
    newest = next((row for line in reversed(lines) if number((row := _row(line)).get("time"))), {})
    found.last_time = number(newest.get("time"))
    found.ran_s = max(0.0, number(newest.get("ran_s", found.last_time - found.first_time)))
    return found


def _tail(file: BinaryIO, size: int) -> tuple[bytes, int]:
    """The end of a file, with a report of steps if one is near; and where it begins."""
    blocks: list[bytes] = []
    start = max(_BLOCK, size)
    while start > _BLOCK and size - start < _MAX_BYTES:
        if blocks and _tells_steps(blocks[0]):
            break
        end, start = start, max(_BLOCK, start - _BLOCK)
        file.seek(start)
        blocks.insert(0, file.read(end - start))
    return b"".join(blocks), start


def _tells_steps(part: bytes) -> bool:
    """Whether there is a report of steps in the rows that are in a part as a whole."""
    first, end = part.find(b"\n") + 1, part.rfind(b"\n") + 1
    return part.find(b'"event": "StepDone"', first, end) >= 0


def _by_kind(lines: Iterable[bytes]) -> dict[str, list[bytes]]:
    """The rows of each kind that a summary needs, unread."""
    by_kind: dict[str, list[bytes]] = {kind: [] for kind in _KINDS}
    for line in lines:
        match = _ROW.search(line, 0, _NAMED_WITHIN)
        if match is not None:
            by_kind.get(match[1].decode(), []).append(line)
    return by_kind


def _row(line: bytes) -> dict[str, Any]:
    """The row of a line; empty if it is none."""
    try:
        return parse_object(line)
    except ValueError:
        return {}


def _time(line: bytes) -> float:
    return number(_row(line).get("time"))


def real(value: Any) -> float:
    """A number of a row, of which those that are not finite are strings; 0.0 for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0


def number(value: Any) -> float:
    """A finite number of a row that no clock or counter is beyond; 0.0 for anything else."""
    number = real(value)
    return number if abs(number) < _BEYOND else 0.0


def count(value: Any) -> int:
    """A count of a row; 0 for anything else, such as a negative number."""
    return max(0, int(number(value)))


class EventLines:
    """The lines of a file of events, from where the last reading ended.

    Attributes:
        file_number: inode of the file; 0 if none has been read.
        offset: number of bytes that have been read.
    """

    def __init__(self, file_number: int = 0) -> None:
        self.file_number = file_number
        self.offset = 0
        self._newest = b""
        self._is_within = False  # a line that is too long, of which a part has been read

    def are_in(self, file: BinaryIO) -> bool:
        """Whether a file is the one that was read, and has not been rewritten.

        Raises:
            OSError: the file cannot be read.
        """
        if os.fstat(file.fileno()).st_ino != self.file_number:
            return False
        # The inode of a file that was removed is soon given to another one.
        file.seek(self.offset - len(self._newest))
        return file.read(len(self._newest)) == self._newest

    def read(self, file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
        """The further lines with the bytes at which they begin; None for one that is too long.

        Raises:
            OSError: the file cannot be read.
        """
        file.seek(self.offset)
        while True:
            line = file.readline(MAX_TEXT_BYTES)
            is_whole = line.endswith(b"\n")
            if not is_whole and len(line) < MAX_TEXT_BYTES:
                return  # a last line that is not yet whole is read next time
            start, self.offset, self._newest = self.offset, self.offset + len(line), line
            is_rest, self._is_within = self._is_within, not is_whole
            if not is_rest:
                yield start, line if is_whole else None


def too_long() -> str:
    """The problem with a line that is too long."""
    return f"a row of more than {MAX_TEXT_BYTES:,} bytes is left out"


class RunReader:
    """Keeps a run's history up to date.

    Attributes:
        run_dir: run directory.
        history: events of the run; a new object after the file was replaced.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.history = History()
        self._lines = EventLines()

    def poll(self) -> bool:
        """Read what has been written since the last call; returns whether there was anything.

        Raises:
            RunDirectoryError: the file exists, but cannot be read at all.
        """
        path = self.run_dir / EVENTS
        try:
            with open_to_read(path) as file:
                if not self._lines.are_in(file):
                    self.history = History()
                    self._lines = EventLines(os.fstat(file.fileno()).st_ino)
                before = self._lines.offset
                for start, line in self._lines.read(file):
                    self._take(start, line)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from error
        return self._lines.offset != before

    def _take(self, start: int, line: bytes | None) -> None:
        if line is None:
            self.history.add_problem(f"{EVENTS}: byte {start}: {too_long()}")
            return
        try:
            row = parse_object(line)
        except ValueError as error:
            self.history.add_problem(f"{EVENTS}: byte {start}: is not JSON: {error}")
        else:
            self.history.add(row)


def read_run(run_dir: Path) -> History:
    """All events of a run.

    Raises:
        RunDirectoryError: the folder has none, or they cannot be read at all.
    """
    reader = RunReader(run_dir)
    if not reader.poll() and not any((run_dir / name).exists() for name in (EVENTS, IDENTITY)):
        raise RunDirectoryError(f"{run_dir}: is no run directory (no {EVENTS})")
    return reader.history


def is_claimed(run_dir: Path) -> bool:
    """Whether a process of this machine, or of one that shares its locks, trains in a folder.

    Queries the lock without taking it, since a taken lock would keep a run from starting. A process
    that trains must not ask about its own folder: by POSIX its lock ends when the file is closed.
    """
    query = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        descriptor = open_regular(run_dir / ".lock")
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, query)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return bool(struct.unpack("hhqqi", answer[: struct.calcsize("hhqqi")])[0] != fcntl.F_UNLCK)
