"""Rows of events as values of curves, and how many curves there may be."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lockstep.config.files import MAX_TEXT_BYTES, open_to_read
from lockstep.engine.events import Evaluated, Event, Logged, RunStarted, StepDone
from lockstep.errors import RunDirectoryError
from lockstep.observe.reading.history import step_values
from lockstep.observe.reading.large.envelopes import Envelope, Row, joined, of_points
from lockstep.observe.storing.rows import event_from_row

Parse = Callable[[bytes], Any]
_TRAINING = "training"
LOGGED = "of log/"
"""What the name of a sheet begins with that has a logged scalar."""
_GREATEST_STEP = 1 << 53
_FEW = 32
"""Metrics of an evaluation that its event keeps; all of them are in the curves."""


class Taken:
    """A row of the file, understood.

    Attributes:
        event: of the row, without the metrics of a report and most of those of an evaluation.
        time: of it, in Unix seconds.
        sheet: where its values belong; None if it has none.
        row: the values.
    """

    __slots__ = ("event", "row", "sheet", "time")

    def __init__(self, event: Event, time: float, sheet: str | None, row: Row | None) -> None:
        self.event, self.time, self.sheet, self.row = event, time, sheet, row


class Taker:
    """Understands rows; names of curves are the same objects from row to row.

    Args:
        parse: makes an object of a line; raises `ValueError`.
    """

    def __init__(self, parse: Parse) -> None:
        self._parse = parse
        self._names: dict[str, tuple[list[str], list[str]]] = {}

    def take(self, line: bytes, start: int) -> Taken:
        """Understand a line that begins at byte `start`.

        Raises:
            ValueError: it is no row of events.
        """
        row = self._parse(line)
        if not isinstance(row, dict):
            raise ValueError(f"is no JSON object but a {type(row).__name__}")
        metrics = row.get("metrics")
        if row.get("event") == "Logged" and row.get("kind") == "scalar":
            metrics = {str(row.get("name")): row.get("value")}
        elif row.get("event") not in ("StepDone", "Evaluated"):
            metrics = None
        elif not isinstance(metrics, dict):
            raise ValueError("metrics: is missing, or no object")
        else:
            few = list(metrics.items())[:_FEW] if row["event"] == "Evaluated" else ()
            row["metrics"] = dict(few)
        try:
            event, time = event_from_row(row), float(row["time"])
            if not 0 <= event.step < _GREATEST_STEP:
                raise ValueError(f"step {event.step} is out of range")
            if metrics is None:
                return Taken(event, time, None, None)
            end = start + len(line)
            return Taken(event, time, *self._values(event, metrics, start, end))
        except (RunDirectoryError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None

    def _values(
        self, event: Event, metrics: Mapping[str, Any], start: int, end: int
    ) -> tuple[str, Row]:
        if isinstance(event, StepDone):
            sheet, split, own = _TRAINING, "train", step_values(event)
        else:
            split = event.split if isinstance(event, Evaluated) else "log"
            sheet, own = f"of {split}", {}
            if isinstance(event, Logged):  # one comes without the others
                sheet = f"{LOGGED}{event.name}"
        known = self._names.get(sheet)
        given = list(metrics)
        if known is None or known[0] != given:
            known = self._names[sheet] = (given, [*own, *(f"{split}/{name}" for name in given)])
        numbers = chain(own.values(), map(float, metrics.values()))
        values = np.fromiter(numbers, np.float64, len(known[1]))
        return sheet, Row(event.step, known[1], values, start, end)


def lines(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a file that begin in [start, end), each with the byte it begins at.

    Raises:
        OSError: the file cannot be read.
    """
    file.seek(start)
    while start < end and (line := file.readline(MAX_TEXT_BYTES)):
        if line.endswith(b"\n"):
            yield start, line
        start += len(line)


def without_arrays(event: Event) -> Event:
    """The event without metrics of more than one number, which may be large."""
    return replace(event, arrays={}) if isinstance(event, Evaluated) else event


Ranges = dict[str, tuple[int, int]]
"""By the names of sheets, the bytes of a file from which and up to which their rows are."""


def closest(ranges: Ranges, most: int) -> Ranges:
    """Those that reach over at most `most` bytes together, the smallest first."""
    found: Ranges = {}
    for sheet, (start, end) in sorted(ranges.items(), key=lambda item: item[1][1] - item[1][0]):
        least = min((one for one, _ in found.values()), default=start)
        greatest = max((one for _, one in found.values()), default=end)
        if max(greatest, end) - min(least, start) <= most:
            found[sheet] = (start, end)
    return found


def read_again(path: Path, file_number: int, taker: Taker, ranges: Ranges) -> dict[str, list[Row]]:
    """The rows of some sheets; none if the file cannot be read, or is another one.

    All that is between the first and the last of them is read, once.

    Args:
        path: of the file.
        file_number: its inode.
        taker: understands rows.
        ranges: where the rows of each sheet are.
    """
    if not ranges:
        return {}
    start, end = min(one for one, _ in ranges.values()), max(one for _, one in ranges.values())
    try:
        with open_to_read(path) as file:
            if os.fstat(file.fileno()).st_ino != file_number:
                return {}
            found = survivors(file, taker, ranges, start, end)
    except OSError:
        return {}
    # What is beside a sheet's own range may come again where nothing has been read.
    return {
        sheet: [row for row in rows if ranges[sheet][0] <= row.start < ranges[sheet][1]]
        for sheet, rows in found.items()
    }


def survivors(
    file: BinaryIO, taker: Taker, sheets: Collection[str], start: int, end: int
) -> dict[str, list[Row]]:
    """The rows of some sheets in a part of a file, but for those of steps that came again in it.

    Raises:
        OSError: the file cannot be read.
    """
    found: dict[str, list[Row]] = {sheet: [] for sheet in sheets}
    for place, line in lines(file, start, end):
        try:
            taken = taker.take(line, place)
        except ValueError:
            continue
        if isinstance(taken.event, RunStarted) and not taken.event.continued:
            for rows in found.values():
                _cut(rows, taken.event.step)
        elif taken.row is not None and taken.sheet is not None and taken.sheet in found:
            _cut(found[taken.sheet], taken.row.step - 1)
            found[taken.sheet].append(taken.row)
    return found


def _cut(rows: list[Row], last: int) -> None:
    while rows and rows[-1].step > last:
        rows.pop()


def points(rows: Sequence[Row], name: str) -> Envelope | None:
    """A curve in some rows, value by value; None if it is in none."""
    steps: list[int] = []
    values: list[float] = []
    names: Sequence[str] = ()
    place = -1
    for row in rows:
        if row.names is not names:
            names = row.names
            place = names.index(name) if name in names else -1
        if place >= 0:
            steps.append(row.step)
            values.append(float(row.values[place]))
    return of_points(steps, values) if steps else None


def finest(
    name: str, parts: Sequence[tuple[str, Envelope]], rows: Mapping[str, Sequence[Row]]
) -> Envelope:
    """A curve of its parts: of rows that were read again, and of envelopes where none were.

    Args:
        name: of the curve.
        parts: what sheets have of it, with their names.
        rows: what was read again, by the names of the sheets.
    """
    if not parts:
        return of_points([], [])
    found = [points(rows.get(key, ()), name) or part for key, part in parts]
    return found[0] if len(found) == 1 else joined(found)


_MOST_SHEETS = 256
"""Of what was logged, and as many of splits."""
_MOST_LEFT_OUT = 4096
"""Names without a sheet that are told; of more, no more is said."""


class Room:
    """Counts sheets; many of what was logged leave room for splits."""

    def __init__(self) -> None:
        self._num_logged = self._num_splits = 0
        self._left_out: set[int] = set()

    def take(self, name: str) -> bool:
        """Whether a sheet of a new name may come, which then counts."""
        if name.startswith(LOGGED):
            has_room = self._num_logged < _MOST_SHEETS
            self._num_logged += has_room
        else:
            has_room = self._num_splits < _MOST_SHEETS
            self._num_splits += has_room
        return has_room

    def problem(self, name: str) -> str:
        """What is to be told of a name that has no sheet; empty if it was told before."""
        key = hash(name)  # names may be long
        if key in self._left_out or len(self._left_out) == _MOST_LEFT_OUT:
            return ""
        self._left_out.add(key)
        return f"more than {_MOST_SHEETS} splits or scalars: {name!r} is left out"
