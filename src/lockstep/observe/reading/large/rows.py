"""Rows of events as values of curves, read first or again; and a bound on their number."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lockstep.config.files import MAX_TEXT_BYTES, open_to_read
from lockstep.engine.events import Evaluated, Event, Logged, RunStarted, StepDone
from lockstep.errors import RunDirectoryError
from lockstep.observe.reading.history import step_values
from lockstep.observe.reading.large.envelopes import Envelope, Row, joined, of_points
from lockstep.observe.storing.jsonl import event_from_row

Parse = Callable[[bytes], Any]
_TRAINING = "training"
LOGGED = "of log/"
"""Prefix of the names of sheets of logged scalars."""
_GREATEST_STEP = 1 << 53
_FEW = 32
"""Metrics that the event of an evaluation keeps; all of them are in the curves."""


class Parsed(NamedTuple):
    """A row of the file.

    Attributes:
        event: its event, without the metrics of a report and most of those of an evaluation.
        time: its Unix time.
        sheet: name of the sheet that its values belong to; None if it has no values.
        row: its values.
    """

    event: Event
    time: float
    sheet: str | None = None
    row: Row | None = None


class RowParser:
    """Parses rows; equal names of curves are the same objects from row to row.

    Args:
        parse: function that parses a line of JSON; raises `ValueError`.
    """

    def __init__(self, parse: Parse) -> None:
        self._parse = parse
        self._names: dict[str, tuple[list[str], list[str]]] = {}

    def row(self, line: bytes, start: int) -> Parsed:
        """Parse the line that begins at byte `start`.

        Raises:
            ValueError: it is not a row of an event.
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
            row |= {"metrics": dict(few), "arrays": {}}  # which may be large
        try:
            event, time = event_from_row(row), float(row["time"])
            if not 0 <= event.step < _GREATEST_STEP:
                raise ValueError(f"step {event.step} is out of range")
            if metrics is None:
                return Parsed(event, time)
            end = start + len(line)
            return Parsed(event, time, *self._values(event, metrics, start, end))
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


Ranges = dict[str, tuple[int, int]]
"""The bytes of a file at which the rows of sheets begin and end, by the names of the sheets."""


def closest(ranges: Ranges, most: int) -> Ranges:
    """The smallest ranges that together span at most `most` bytes."""
    found: Ranges = {}
    for sheet, (start, end) in sorted(ranges.items(), key=lambda item: item[1][1] - item[1][0]):
        least = min((one for one, _ in found.values()), default=start)
        greatest = max((one for _, one in found.values()), default=end)
        if max(greatest, end) - min(least, start) <= most:
            found[sheet] = (start, end)
    return found


def read_again(
    path: Path, file_number: int, parser: RowParser, ranges: Ranges
) -> dict[str, list[Row]]:
    """The rows of some sheets; none if the file cannot be read or was replaced.

    Everything between the first and the last of them is read, once.

    Args:
        path: path of the file.
        file_number: its inode.
        parser: parses its rows.
        ranges: where the rows of each sheet are.
    """
    if not ranges:
        return {}
    start, end = min(one for one, _ in ranges.values()), max(one for _, one in ranges.values())
    try:
        with open_to_read(path) as file:
            if os.fstat(file.fileno()).st_ino != file_number:
                return {}
            found = survivors(file, parser, ranges, start, end)
    except OSError:
        return {}
    # Rows outside of a sheet's own range may come again in bytes that were not read.
    return {
        sheet: [row for row in rows if ranges[sheet][0] <= row.start < ranges[sheet][1]]
        for sheet, rows in found.items()
    }


def survivors(
    file: BinaryIO, parser: RowParser, sheets: Collection[str], start: int, end: int
) -> dict[str, list[Row]]:
    """The rows of some sheets in a part of a file, without those of steps that came again in it.

    Raises:
        OSError: the file cannot be read.
    """
    found: dict[str, list[Row]] = {sheet: [] for sheet in sheets}
    for byte, line in lines(file, start, end):
        try:
            event, _, sheet, row = parser.row(line, byte)
        except ValueError:
            continue
        if isinstance(event, RunStarted) and not event.continued:
            for rows in found.values():
                _cut(rows, event.step)
        elif row is not None and sheet in found:
            _cut(found[sheet], row.step - 1)
            found[sheet].append(row)
    return found


def _cut(rows: list[Row], last: int) -> None:
    while rows and rows[-1].step > last:
        rows.pop()


def points(rows: Sequence[Row], name: str) -> Envelope | None:
    """A curve in some rows, value by value; None if no row has it."""
    steps: list[int] = []
    values: list[float] = []
    names: Sequence[str] = ()
    column = -1
    for row in rows:
        if row.names is not names:
            names = row.names
            column = names.index(name) if name in names else -1
        if column >= 0:
            steps.append(row.step)
            values.append(float(row.values[column]))
    return of_points(steps, values) if steps else None


def finest(
    name: str, parts: Sequence[tuple[str, Envelope]], rows: Mapping[str, Sequence[Row]]
) -> Envelope:
    """A curve, value by value where rows were read again, else of the envelopes of sheets.

    Args:
        name: name of the curve.
        parts: its parts in sheets, with the names of these.
        rows: rows that were read again, by the names of their sheets.
    """
    found = [points(rows.get(key, ()), name) or part for key, part in parts]
    return joined(found) if found else of_points([], [])


_MOST_SHEETS = 256
"""The number of sheets of logged scalars, and of sheets of splits."""
_MOST_LEFT_OUT = 4096
"""The number of names without a sheet that are reported."""


class SheetLimit:
    """Bounds the number of sheets; those of logged scalars do not count against splits."""

    def __init__(self) -> None:
        self._nums: Counter[bool] = Counter()
        self._left_out: set[int] = set()

    def take(self, name: str) -> bool:
        """Whether there may be a sheet of a new name, which then counts."""
        is_logged = name.startswith(LOGGED)
        has_room = self._nums[is_logged] < _MOST_SHEETS
        self._nums[is_logged] += has_room
        return has_room

    def problem(self, name: str) -> str:
        """The message about a name without a sheet; empty if it was reported before."""
        key = hash(name)  # names may be long
        if key in self._left_out or len(self._left_out) == _MOST_LEFT_OUT:
            return ""
        self._left_out.add(key)
        return f"more than {_MOST_SHEETS} splits or scalars: {name!r} is left out"
