"""The newest rows of each kind in a file of events, without reading all of it."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.files import open_to_read
from lockstep.parsing import parse_object

_BLOCK = 1 << 22
"""Bytes at the beginning and at the end of a file of events that are looked through."""
_MOST_BYTES = 1 << 26
"""And so many from the end, where no report of steps is in them."""
_MOST_ROWS = 64
"""So many of the newest rows of each kind are read."""
_KINDS = ("RunStarted", "Joined", "Recovered", "StepDone", "Evaluated")
_ROW = re.compile(rb'"event": "(\w+)"')
_NAMED_WITHIN = 200
"""The first bytes of a row, in which it says what it is."""
_FRESH_S = 30.0
"""A run on another host, whose lock may not be seen, goes on if it has written within this time."""
_GAPS = 4.0
"""Or within so many times the longest time between two of its reports."""
_BEYOND = 1e15
"""No clock or counter shows this."""


@dataclass
class NewestRows:
    """Some rows of a file of events.

    Attributes:
        by_kind: the newest ones of each kind that a summary needs, in their order.
        first_time: Unix time of the first row; 0.0 if there is none.
        last_time: of the newest row.
        ran_s: seconds that the run has taken, without the pauses between its sessions; with them
            where an earlier version has written the newest row.
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
        """Whether a run that nobody here seems to have claimed may go on on another host."""
        if self.newest("Joined").get("host") == socket.gethostname():
            return False
        times = [number(row.get("time")) for row in self.by_kind.get("StepDone", [])]
        gap = max((after - before for before, after in pairwise(times)), default=0.0)
        return time.time() - self.written < max(_FRESH_S, _GAPS * gap)


def rows_at_both_ends(path: Path) -> NewestRows:
    """What the first and the last rows of a file of events tell; what is no row is left out.

    Where much else is logged, rows further from the end are looked at too, until there is a report
    of steps. If there is none, those of the beginning are no newest ones, and left out as well.
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
        rows = [row for line in some[-_MOST_ROWS:] if (row := _row(line))]
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
    while start > _BLOCK and size - start < _MOST_BYTES:
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
