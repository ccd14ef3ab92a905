"""Parts of a file read again, for curves value by value."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from lockstep.engine.events import RunStarted
from lockstep.files import open_to_read
from lockstep.reading.large.envelopes import Envelope, Row, joined, of_points
from lockstep.reading.large.rows import Taker, lines

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
