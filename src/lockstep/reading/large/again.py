"""Parts of a file read again, for curves value by value."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from lockstep.engine.events import RunStarted
from lockstep.files import open_to_read
from lockstep.reading.large.envelopes import Envelope, Row, of_points
from lockstep.reading.large.rows import Taker, lines


def read_again(
    path: Path, file_number: int, taker: Taker, sheet: str, start: int, end: int
) -> list[Row]:
    """The rows of a sheet in a part of a file; none if it cannot be read, or is another file.

    Args:
        path: of the file.
        file_number: its inode.
        taker: understands rows.
        sheet: whose rows are meant.
        start: byte at which the part begins.
        end: byte after it.
    """
    try:
        with open_to_read(path) as file:
            if os.fstat(file.fileno()).st_ino != file_number:
                return []
            return survivors(file, taker, sheet, start, end)
    except OSError:
        return []


def survivors(file: BinaryIO, taker: Taker, sheet: str, start: int, end: int) -> list[Row]:
    """The rows of a sheet in a part of a file, but for those of steps that came again in it.

    Raises:
        OSError: the file cannot be read.
    """
    found: list[Row] = []

    def cut(last: int) -> None:
        while found and found[-1].step > last:
            found.pop()

    for place, line in lines(file, start, end):
        try:
            taken = taker.take(line, place)
        except ValueError:
            continue
        if isinstance(taken.event, RunStarted) and not taken.event.continued:
            cut(taken.event.step)
        elif taken.row is not None and taken.sheet == sheet:
            cut(taken.row.step - 1)
            found.append(taken.row)
    return found


def points(rows: list[Row], name: str) -> Envelope | None:
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
