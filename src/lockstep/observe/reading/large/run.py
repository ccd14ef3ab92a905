"""Runs of any size: first a sample of the rows, then all of them in slices of time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import BinaryIO

from lockstep.config.files import MAX_TEXT_BYTES, open_to_read
from lockstep.config.parsing import parse_object
from lockstep.engine.events import StepDone
from lockstep.observe.reading.follow import EVENTS, EventLines, too_long
from lockstep.observe.reading.history import History
from lockstep.observe.reading.large.envelopes import MOST_CURVES, Envelope, Row, Sheet, merged
from lockstep.observe.reading.large.rows import (
    Parse,
    Ranges,
    RowParser,
    SheetLimit,
    closest,
    finest,
    lines,
    read_again,
)

_SAMPLES = 256
_SMALL = 8 << 20
"""A file below this size is not sampled, since it is read at once."""
_MOST_READ_AGAIN = 64 << 20
"""Bytes that are read again for parts of curves."""
_SAMPLED = ""
"""Name of all sheets of sampled rows, which are never read again."""


class LargeRun:
    """Keeps the events of a run up to date in bounded memory; used from any thread.

    Args:
        run_dir: run directory.
        parse: function that parses a line of JSON; raises `ValueError`.

    Attributes:
        run_dir: run directory.
        history: the events, without curves.
        generation: a number that changes when the file was replaced, which invalidates the rest.
        size: size of the file in bytes.
        num_rows: number of rows that have been read.
        names: names of the curves, in the order of their appearance.
        newest: the newest report of steps.
        problem: why the file cannot be read; empty if it can.
    """

    def __init__(self, run_dir: Path, parse: Parse = parse_object) -> None:
        self.run_dir = run_dir
        self._events = run_dir / EVENTS
        self.generation = 0
        self._parse = parse
        self._parser = RowParser(parse)
        self.lock = RLock()
        self._forget()

    def _forget(self) -> None:
        self.history = History(_Cutter(self))
        self.generation += 1
        self.size = self.num_rows = 0
        self.names: list[str] = []
        self.newest: StepDone | None = None
        self.problem = ""
        self._lines = EventLines()
        self._sheets: dict[str, Sheet] = {}
        self._sampled: dict[str, Sheet] = {}
        self._limit, self._sample_limit = SheetLimit(), SheetLimit()
        self._known: set[str] = set()
        self._listed: dict[Sheet, int] = {}
        self._is_sampled = self._is_at_end = False

    @property
    def is_whole(self) -> bool:
        """Whether the whole file has been read."""
        return self._is_at_end

    @property
    def offset(self) -> int:
        """The number of bytes that have been read."""
        return self._lines.offset

    @property
    def num_bytes(self) -> int:
        """The memory of the curves in bytes."""
        return sum(sheet.num_bytes for sheet in self._all_sheets())

    @property
    def sampled_of(self) -> int:
        """About how many rows there are for each that was read; 1 if all were."""
        count = max((sheet.count for sheet in self._sampled.values()), default=0)
        if not count or not self.num_rows:
            return 1
        rows = self.size / max(1.0, self.offset / self.num_rows)
        return max(1, round(rows / count))

    def advance(self, budget_s: float) -> bool:
        """Read further rows for some time; returns whether anything has changed.

        Args:
            budget_s: seconds after which it stops, at the end of a row.
        """
        deadline = time.monotonic() + budget_s
        with self.lock:
            try:
                with open_to_read(self._events) as file:
                    self._look(file)
                    return self._read(file, deadline)
            except FileNotFoundError:
                problem = f"{EVENTS}: is gone" if self.offset else ""
            except OSError as error:
                problem = f"{EVENTS}: cannot be read: {error.strerror or error}"
            self._is_at_end = True
            was, self.problem = self.problem, problem
            return problem != was

    def curves(self, names: Sequence[str], first: int, last: int, most: int) -> list[Envelope]:
        """The same part of several curves; the lock is free while rows are read again.

        Args:
            names: names of the curves.
            first: first step; a bucket that contains it is included as a whole.
            last: last step.
            most: greatest number of buckets of each curve.

        Returns:
            The curves; if `generation` has changed meanwhile, those of the replaced file.
        """
        with self.lock:
            generation, file_number = self.generation, self._lines.file_number
            coarse: Ranges = {}
            parts = [list(self._parts(name, first, last, most, coarse)) for name in names]
        coarse = closest(coarse, _MOST_READ_AGAIN)
        rows = read_again(self._events, file_number, RowParser(self._parse), coarse)
        if self.generation != generation:
            rows = {}
        curves = (finest(*pair, rows) for pair in zip(names, parts, strict=True))
        return [merged(curve, most) for curve in curves]

    def _parts(
        self, name: str, first: int, last: int, most: int, coarse: Ranges
    ) -> Iterator[tuple[str, Envelope]]:
        """A curve in the sheets, with their names; notes those that are too coarse."""
        read = -1
        for key, sheet in self._sheets.items():
            if name not in sheet.columns:
                continue
            read = max(read, sheet.newest)
            buckets, start, end = sheet.range_of(first, last)
            if sheet.width > 1 and 0 < buckets.stop - buckets.start < most:
                coarse[key] = (start, end)
            part = sheet.envelope(name, buckets)
            if part is not None:
                yield key, part
        for sheet in self._sampled.values():
            buckets, _, _ = sheet.range_of(max(first, read + 1), last)
            part = sheet.envelope(name, buckets)
            if part is not None and len(part.step):
                yield _SAMPLED, part

    def cut(self, last: int) -> None:
        """Remove the values of later steps from all curves."""
        for sheet in self._sheets.values():
            sheet.cut(last)

    def _all_sheets(self) -> list[Sheet]:
        return [*self._sheets.values(), *self._sampled.values()]

    def _look(self, file: BinaryIO) -> None:
        """Start from the beginning if the file was replaced."""
        status = os.fstat(file.fileno())
        if not self._lines.are_in(file):
            if self._lines.file_number:
                self._forget()
            self._lines = EventLines(status.st_ino)
        self.size = status.st_size
        self.problem = ""
        if not self._is_sampled:
            self._is_sampled = True
            if self.size > _SMALL:
                self._sample(file)

    def _read(self, file: BinaryIO, deadline: float) -> bool:
        before, was_at_end = self.offset, self._is_at_end
        self._is_at_end = False
        for start, line in self._lines.read(file):
            self._take(start, line)
            if time.monotonic() >= deadline:
                break
        else:
            self._is_at_end = True
            self._sampled.clear()
        self._list_names()
        return self.offset != before or self._is_at_end != was_at_end

    def _take(self, start: int, line: bytes | None) -> None:
        self.num_rows += 1
        try:
            if line is None:
                raise ValueError(too_long())
            event, at, name, row = self._parser.row(line, start)
        except ValueError as error:
            self._add_problem(start, str(error))
            return
        self.history.add_event(event, at)
        if isinstance(event, StepDone):
            self.newest = event
        if row is None or name is None:
            return
        sheet = self._sheets.get(name)
        if sheet is None:
            if not self._limit.take(name):
                if problem := self._limit.problem(name):
                    self._add_problem(start, problem)
                return
            sheet = self._sheets[name] = Sheet(partial(self._survivors, name))
        was_dropped = sheet.dropped
        sheet.add(row)
        if sheet.dropped and not was_dropped:
            problem = f"more than {MOST_CURVES:,} metrics: the further ones are left out"
            self._add_problem(start, problem)

    def _add_problem(self, start: int, problem: str) -> None:
        self.history.add_problem(f"{EVENTS}: byte {start:,}: {problem}")

    def _list_names(self) -> None:
        for sheet in self._all_sheets():
            for name in islice(sheet.columns, self._listed.get(sheet, 0), None):
                if name not in self._known:
                    self._known.add(name)
                    self.names.append(name)
            self._listed[sheet] = len(sheet.columns)

    def _sample(self, file: BinaryIO) -> None:
        """Read rows at even distances."""
        end = 0
        for number in range(_SAMPLES):
            begin = self.size * number // _SAMPLES
            if begin < end:
                continue
            if begin:
                file.seek(begin)
                begin += len(file.readline(MAX_TEXT_BYTES))
            for start, line in lines(file, begin, min(begin + 1, self.size)):
                end = start + len(line)
                with suppress(ValueError):
                    _, _, name, row = self._parser.row(line, start)
                    if row is None or name is None:
                        continue
                    if name in self._sampled or self._sample_limit.take(name):
                        self._sampled.setdefault(name, Sheet(lambda *_: ())).add(row)

    def _survivors(self, sheet: str, start: int, end: int, last: int) -> Iterable[Row]:
        part = {sheet: (start, end)}
        rows = read_again(self._events, self._lines.file_number, self._parser, part)
        return [row for row in rows.get(sheet, ()) if row.step <= last]


class _Cutter:
    """A store of curves that only passes on cuts: the sheets take the values themselves."""

    def __init__(self, run: LargeRun) -> None:
        self._run = run

    def add(self, step: int, values: object, origin: object = None) -> None:
        """Ignore the values."""

    def cut(self, last: int) -> None:
        """Remove the values of later steps from all curves."""
        self._run.cut(last)
