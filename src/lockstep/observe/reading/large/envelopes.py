"""Curves in bounded memory: the least, greatest and last value in each of some ranges of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_BUCKETS = 2048
_LEAST_BUCKETS = 128
_FIRST_BUCKETS = 32
_MOST_CELLS = 1 << 21
"""Buckets times curves; buckets are widened beyond. A cell takes 25 bytes."""
MOST_CURVES = 20_000
"""Curves of a sheet; values of further names are left out."""
NAN, INFINITE = 1, 2
"""Flags of a bucket with values that are not finite."""
_PRESENT = np.uint8(4)
"""Flag of a bucket that has a value at all."""
_FIRST, _LAST, _START, _END, _COUNT = range(5)
"""Columns of a bucket's rows: first and last step, bytes in the file, number of rows."""


class Row(NamedTuple):
    """The values of a step, and where they are in the file.

    Attributes:
        step: the step.
        names: names of the curves; the same object as long as the names do not change.
        values: one value for each name.
        start: byte at which the row begins.
        end: byte after it.
    """

    step: int
    names: Sequence[str]
    values: Floats
    start: int
    end: int


class Envelope(NamedTuple):
    """A curve or a part of it, as arrays with an element for each bucket.

    Attributes:
        first: first step of the bucket.
        step: last step of the bucket.
        low: least finite value; NaN if there is none.
        high: greatest finite value.
        value: last value, finite or not.
        odd: the flags `NAN` and `INFINITE`.
    """

    first: Ints
    step: Ints
    low: Floats
    high: Floats
    value: Floats
    odd: NDArray[np.uint8]


class Sheet:
    """Curves whose values come in the same rows, as envelopes over ranges of rows.

    A bucket holds `width` rows. When all buckets are in use, pairs are merged and the width
    doubles. Least and greatest values stay exact, so that no spike is ever lost.

    Args:
        reread: function of `start`, `end` and `last` that reads the rows again that begin in
            [start, end) of the file and belong to steps up to `last`, without those that came again
            later. A bucket is rebuilt from them when a resumed run cuts it in two.

    Attributes:
        columns: index of each curve by its name, in the order of their appearance.
        width: rows of a full bucket.
        count: buckets in use.
        dropped: whether values were left out, because there are too many names.
    """

    def __init__(self, reread: Callable[[int, int, int], Iterable[Row]]) -> None:
        self._reread = reread
        self.columns: dict[str, int] = {}
        self.width, self.count, self.dropped = 1, 0, False
        self._names: Sequence[str] = ()
        self._targets: NDArray[np.intp] = np.empty(0, np.intp)
        self._taken: NDArray[np.intp] | None = None
        self._rows = np.zeros((_FIRST_BUCKETS, 5), np.int64)
        self._cells = _empty_cells(_FIRST_BUCKETS, 0)
        self._odd = np.zeros((_FIRST_BUCKETS, 0), np.uint8)

    @property
    def newest(self) -> int:
        """The newest step; -1 before the first."""
        return int(self._rows[self.count - 1, _LAST]) if self.count else -1

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays in bytes."""
        return self._cells.nbytes + self._odd.nbytes + self._rows.nbytes

    def add(self, row: Row) -> None:
        """Take the next row; those of its step and later ones come again, so they are removed."""
        if row.step <= self.newest:
            self.cut(row.step - 1)
        if row.names is not self._names:
            self._meet(row.names)
        values = row.values if self._taken is None else row.values[self._taken]
        if not self.count or self._rows[self.count - 1, _COUNT] >= self.width:
            self._open_bucket(row)
        bucket = self.count - 1
        facts = self._rows[bucket]
        facts[_LAST], facts[_END] = row.step, row.end
        facts[_COUNT] += 1
        low, high, last = self._cells[:, bucket]
        finite = np.isfinite(values)
        shown = values if finite.all() else np.where(finite, values, np.nan)
        columns = self._targets
        low[columns] = np.fmin(low[columns], shown)
        high[columns] = np.fmax(high[columns], shown)
        last[columns] = values
        self._odd[bucket, columns] |= _oddity(values, finite) | _PRESENT

    def cut(self, last: int) -> None:
        """Remove the rows of steps later than `last`."""
        steps = self._rows[: self.count, _FIRST]
        keep = int(np.searchsorted(steps, last, side="right"))
        partial = keep > 0 and self._rows[keep - 1, _LAST] > last
        self._clear(keep - partial, self.count)
        self.count = keep - partial
        if partial:
            start, end = (int(byte) for byte in self._rows[keep - 1, [_START, _END]])
            for row in self._reread(start, end, last):
                self.add(row)

    def range_of(self, first: int, last: int) -> tuple[slice, int, int]:
        """The buckets that overlap the steps [first, last].

        Returns:
            The buckets, and the bytes of the file at which their rows begin and end.
        """
        rows = self._rows[: self.count]
        begin = int(np.searchsorted(rows[:, _LAST], first))
        stop = max(begin, int(np.searchsorted(rows[:, _FIRST], last, side="right")))
        if begin == stop:
            return slice(begin, stop), 0, 0
        return slice(begin, stop), int(rows[begin, _START]), int(rows[stop - 1, _END])

    def envelope(self, name: str, buckets: slice) -> Envelope | None:
        """A curve in some buckets, without those in which it has no value."""
        column = self.columns.get(name)
        if column is None:
            return None
        odd = self._odd[: self.count][buckets, column]
        odd_at = np.flatnonzero(odd & _PRESENT)
        rows = self._rows[: self.count][buckets][odd_at]
        low, high, last = self._cells[:, : self.count, column][:, buckets][:, odd_at]
        return Envelope(rows[:, _FIRST], rows[:, _LAST], low, high, last, odd[odd_at] & ~_PRESENT)

    def _meet(self, names: Sequence[str]) -> None:
        """Look up the columns of some names, and add one for each new name."""
        for name in names:
            if name not in self.columns and len(self.columns) < MOST_CURVES:
                self.columns[name] = len(self.columns)
        known = [index for index, name in enumerate(names) if name in self.columns]
        self._taken = np.array(known, np.intp) if len(known) < len(names) else None
        self.dropped |= self._taken is not None
        self._targets = np.array([self.columns[names[index]] for index in known], np.intp)
        self._names = names
        more = len(self.columns) - self._odd.shape[1]
        if more > 0:
            # Grow by half, since names may come one by one.
            more = max(more, self._odd.shape[1] // 2) if self._odd.shape[1] else more
            while self.count > _most_buckets(self._odd.shape[1] + more):
                self._halve()
            self._cells = np.concatenate([self._cells, _empty_cells(len(self._rows), more)], axis=2)
            self._odd = np.pad(self._odd, ((0, 0), (0, more)))

    def _open_bucket(self, row: Row) -> None:
        most = _most_buckets(self._odd.shape[1])
        if self.count >= most:
            self._halve()
        elif self.count == len(self._rows):
            more = min(len(self._rows), most - self.count)
            self._rows = np.pad(self._rows, ((0, more), (0, 0)))
            blank = _empty_cells(more, self._odd.shape[1])
            self._cells = np.concatenate([self._cells, blank], axis=1)
            self._odd = np.pad(self._odd, ((0, more), (0, 0)))
        self._rows[self.count] = (row.step, row.step, row.start, row.end, 0)
        self.count += 1

    def _halve(self) -> None:
        """Merge each two buckets."""
        whole, half = self.count, (self.count + 1) // 2
        pairs = whole // 2
        low, high, last = self._cells
        odd, rows = self._odd, self._rows
        one, other = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        is_there = (odd[other] & _PRESENT) > 0
        last[:pairs] = np.where(is_there, last[other], last[one])
        low[:pairs] = np.fmin(low[one], low[other])
        high[:pairs] = np.fmax(high[one], high[other])
        odd[:pairs] = odd[one] | odd[other]
        merged = rows[one].copy()
        merged[:, [_LAST, _END]] = rows[other][:, [_LAST, _END]]
        merged[:, _COUNT] += rows[other, _COUNT]
        rows[:pairs] = merged
        if half > pairs:
            self._cells[:, pairs], odd[pairs] = self._cells[:, whole - 1].copy(), odd[whole - 1]
            rows[pairs] = rows[whole - 1]
        self._clear(half, whole)
        self.count, self.width = half, 2 * self.width

    def _clear(self, first: int, end: int) -> None:
        self._cells[:, first:end] = np.nan
        self._odd[first:end] = 0


def merged(envelope: Envelope, most: int) -> Envelope:
    """A curve in at most `most` buckets, merged of neighbours; least and greatest stay exact."""
    count = len(envelope.step)
    if count <= most:
        return envelope
    starts = np.arange(0, count, -(-count // most))
    ends = np.append(starts[1:], count) - 1
    return Envelope(
        envelope.first[starts],
        envelope.step[ends],
        np.fmin.reduceat(envelope.low, starts),
        np.fmax.reduceat(envelope.high, starts),
        envelope.value[ends],
        np.bitwise_or.reduceat(envelope.odd, starts),
    )


def of_points(steps: Sequence[int], values: Sequence[float]) -> Envelope:
    """A curve with a bucket for each value."""
    step, value = np.array(steps, np.int64), np.array(values, np.float64)
    finite = np.isfinite(value)
    shown = np.where(finite, value, np.nan)
    return Envelope(step, step, shown, shown, value, _oddity(value, finite))


def joined(parts: Sequence[Envelope]) -> Envelope:
    """The parts of a curve in one, by their steps."""
    fields: list[Any] = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    order = np.argsort(fields[1], kind="stable")
    return Envelope(*(field[order] for field in fields))


def _most_buckets(curves: int) -> int:
    return int(min(MOST_BUCKETS, max(_LEAST_BUCKETS, _MOST_CELLS // max(1, curves))))


def _empty_cells(buckets: int, curves: int) -> Floats:
    return np.full((3, buckets, curves), np.nan)


def _oddity(values: Floats, finite: NDArray[np.bool_]) -> NDArray[np.uint8]:
    if finite.all():
        return np.zeros(len(values), np.uint8)
    is_nan = np.isnan(values)
    return np.where(finite, 0, np.where(is_nan, NAN, INFINITE)).astype(np.uint8)
