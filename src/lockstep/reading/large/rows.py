"""Rows of events as values of curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, BinaryIO

import numpy as np

from lockstep.engine.events import Evaluated, Event, Logged, StepDone
from lockstep.errors import RunDirectoryError
from lockstep.files import MAX_TEXT_BYTES
from lockstep.observe import event_from_row
from lockstep.reading.history import step_values
from lockstep.reading.large.envelopes import Row

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
