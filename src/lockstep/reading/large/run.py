"""Runs of any size: a sample of rows first, then all in slices of time, as envelopes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import BinaryIO

from lockstep.engine.events import StepDone
from lockstep.files import MAX_TEXT_BYTES, open_to_read
from lockstep.parsing import parse_object
from lockstep.reading.follow import EVENTS
from lockstep.reading.history import History
from lockstep.reading.large.again import points, read_again
from lockstep.reading.large.envelopes import Envelope, Row, Sheet, joined, merged, of_points
from lockstep.reading.large.rows import Parse, Taker, lines, skip_line, without_arrays

_MOST_SHEETS = 256
_SAMPLES = 256
_SMALL = 8 << 20
"""A file below this size is not sampled: it is read sooner than one would look."""
_MOST_READ_AGAIN = 64 << 20
"""Bytes that are read again for a part of a curve."""


class LargeRun:
    """Keeps what the events of a run tell up to date, in bounded memory; used from any thread.

    Args:
        run_dir: of the run.
        parse: makes an object of a line; raises `ValueError` if it cannot.

    Attributes:
        run_dir: of the run.
        history: what its events tell, without curves.
        generation: another number after the file was replaced: nothing known before holds.
        offset: bytes that have been read.
        size: bytes that there are.
        num_rows: rows that have been read.
        names: of the curves, in the order in which they came.
        newest: the newest report of steps.
        problem: why the file cannot be read; empty if it can.
    """

    def __init__(self, run_dir: Path, parse: Parse = parse_object) -> None:
        self.run_dir = run_dir
        self._events = run_dir / EVENTS
        self.generation = 0
        self._taker = Taker(parse)
        self.lock = RLock()
        self._forget()

    def _forget(self) -> None:
        self.history = History(_Cutter(self))
        self.generation += 1
        self.offset = self.size = self.num_rows = 0
        self.names: list[str] = []
        self.newest: StepDone | None = None
        self.problem = ""
        self._file_number = 0
        self._sheets: dict[str, Sheet] = {}
        self._sampled: dict[str, Sheet] = {}
        self._known: set[str] = set()
        self._listed: dict[Sheet, int] = {}
        self._is_sampled = self._is_at_end = False

    @property
    def is_whole(self) -> bool:
        """Whether all that the file holds is known."""
        return self._is_at_end

    @property
    def num_bytes(self) -> int:
        """Memory of the curves."""
        return sum(sheet.num_bytes for sheet in self._all_sheets())

    @property
    def sampled_of(self) -> int:
        """Of how many rows, about, one was looked at; 1 where all were."""
        count = max((sheet.count for sheet in self._sampled.values()), default=0)
        if not count or not self.num_rows:
            return 1
        rows = self.size / max(1.0, self.offset / self.num_rows)
        return max(1, round(rows / count))

    def advance(self, budget_s: float) -> bool:
        """Read on for some time; returns whether there was anything.

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

    def curve(self, name: str, first: int, last: int, most: int) -> tuple[Envelope, bool]:
        """A part of a curve.

        Args:
            name: of the curve.
            first: step at which it begins; a bucket that reaches over it is part of it.
            last: step at which it ends.
            most: greatest number of buckets.

        Returns:
            It, and whether every value was looked at.
        """
        (found,) = self.curves([name], first, last, most)
        return found

    def curves(
        self, names: Sequence[str], first: int, last: int, most: int
    ) -> list[tuple[Envelope, bool]]:
        """The same parts of several curves, as `curve`; rows are read once for all of them."""
        with self.lock:
            again: dict[int, list[Row]] = {}
            return [self._curve(name, first, last, most, again) for name in names]

    def _curve(
        self, name: str, first: int, last: int, most: int, again: dict[int, list[Row]]
    ) -> tuple[Envelope, bool]:
        parts: list[Envelope] = []
        read = -1
        for key, sheet in self._sheets.items():
            if name not in sheet.columns:
                continue
            read = max(read, sheet.newest)
            buckets, start, end = sheet.range_of(first, last)
            is_fine = sheet.width == 1 or (buckets.stop - buckets.start) >= most
            part = None
            if not is_fine and end - start <= _MOST_READ_AGAIN:
                if id(sheet) not in again:
                    again[id(sheet)] = read_again(
                        self._events, self._file_number, self._taker, key, start, end
                    )
                part = points(again[id(sheet)], name)
            part = part if part is not None else sheet.envelope(name, buckets)
            parts += [part] if part is not None else []
        is_exact = True
        for sheet in self._sampled.values():
            buckets, _, _ = sheet.range_of(max(first, read + 1), last)
            part = sheet.envelope(name, buckets)
            if part is not None and len(part.step):
                parts.append(part)
                is_exact = False
        if not parts:
            return of_points([], []), is_exact
        return merged(parts[0] if len(parts) == 1 else joined(parts), most), is_exact

    def cut(self, last: int) -> None:
        """Remove what is of later steps, of all curves."""
        for sheet in self._sheets.values():
            sheet.cut(last)

    def _all_sheets(self) -> list[Sheet]:
        return [*self._sheets.values(), *self._sampled.values()]

    def _look(self, file: BinaryIO) -> None:
        """Begin anew if it is another file than the one that was read."""
        status = os.fstat(file.fileno())
        is_same = status.st_ino == self._file_number and status.st_size >= self.offset
        if is_same and self.offset:
            file.seek(self.offset - 1)
            is_same = file.read(1) == b"\n"
        if not is_same:
            if self._file_number:
                self._forget()
            self._file_number = status.st_ino
        self.size = status.st_size
        self.problem = ""
        if not self._is_sampled:
            self._is_sampled = True
            if self.size > _SMALL:
                self._sample(file)

    def _read(self, file: BinaryIO, deadline: float) -> bool:
        before, was_at_end = self.offset, self._is_at_end
        file.seek(self.offset)
        self._is_at_end = False
        while time.monotonic() < deadline:
            line = file.readline(MAX_TEXT_BYTES)
            if not line.endswith(b"\n") and len(line) < MAX_TEXT_BYTES:
                # A last line that is not yet whole is read next time.
                self._is_at_end = True
                self._sampled.clear()
                break
            if line.endswith(b"\n"):
                self._take(line)
            else:
                self._add_problem(f"a line of more than {MAX_TEXT_BYTES:,} bytes")
                self.offset += skip_line(file)
            self.offset += len(line)
        self._list_names()
        return self.offset != before or self._is_at_end != was_at_end

    def _take(self, line: bytes) -> None:
        self.num_rows += 1
        try:
            taken = self._taker.take(line, self.offset)
        except ValueError as error:
            self._add_problem(str(error))
            return
        self.history.add_event(without_arrays(taken.event), taken.time)
        if isinstance(taken.event, StepDone):
            self.newest = taken.event
        if taken.row is None or taken.sheet is None:
            return
        sheet = self._sheets.get(taken.sheet)
        if sheet is None:
            if len(self._sheets) >= _MOST_SHEETS:
                self._add_problem(
                    f"more than {_MOST_SHEETS} splits and scalars: {taken.sheet!r} is left out"
                )
                return
            sheet = self._sheets[taken.sheet] = Sheet(partial(self._survivors, taken.sheet))
        sheet.add(taken.row)

    def _add_problem(self, problem: str) -> None:
        self.history.add_problem(f"{EVENTS}: byte {self.offset:,}: {problem}")

    def _list_names(self) -> None:
        for sheet in self._all_sheets():
            for name in islice(sheet.columns, self._listed.get(sheet, 0), None):
                if name not in self._known:
                    self._known.add(name)
                    self.names.append(name)
            self._listed[sheet] = len(sheet.columns)

    def _sample(self, file: BinaryIO) -> None:
        """Look at rows at even distances."""
        end = 0
        for number in range(_SAMPLES):
            place = self.size * number // _SAMPLES
            if place < end:
                continue
            if place:
                file.seek(place)
                place += len(file.readline(MAX_TEXT_BYTES))
            for start, line in lines(file, place, min(place + 1, self.size)):
                end = start + len(line)
                self._take_sample(line, start)

    def _take_sample(self, line: bytes, start: int) -> None:
        try:
            taken = self._taker.take(line, start)
        except ValueError:
            return
        if taken.row is None or taken.sheet is None or len(self._sampled) >= _MOST_SHEETS:
            return
        self._sampled.setdefault(taken.sheet, Sheet(_nothing)).add(taken.row)

    def _survivors(self, sheet: str, start: int, end: int, last: int) -> Iterable[Row]:
        rows = read_again(self._events, self._file_number, self._taker, sheet, start, end)
        return [row for row in rows if row.step <= last]


class _Cutter:
    """Passes on which steps come again; values come to the sheets by another way."""

    def __init__(self, run: LargeRun) -> None:
        self._run = run

    def add(self, step: int, values: object, origin: object = None) -> None:
        """Nothing: the sheets have the values already."""

    def cut(self, last: int) -> None:
        """Remove what is of later steps, of all curves."""
        self._run.cut(last)


def _nothing(start: int, end: int, last: int) -> Iterable[Row]:
    return ()
