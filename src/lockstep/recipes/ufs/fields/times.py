"""The times of fields: how files give them, which month they are of, and which come twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.recipes.ufs.fields.netcdf.file import NetcdfFile, netcdf4

Date = tuple[int, int, int, int, int, int]
"""Year, month, day, hour, minute and second in the file's calendar."""


@dataclass(frozen=True)
class Moment:
    """The time of a field.

    Attributes:
        text: number, to ten digits, and unit as the file has them; empty if it says nothing.
        date: the same as a date; None if the unit is no `… since …` that is understood.
        month: number of the calendar month, from 1, that the field is of; None without a date. Of
            a mean over an interval, which files may date at its end, the month of its middle.
        number: all digits of the number; None if there is none, or it is NaN.
    """

    text: str = ""
    date: Date | None = None
    month: int | None = None
    number: float | None = None

    @property
    def key(self) -> Date | tuple[float | None, str] | None:
        """What equal times have in common; None if the file says nothing."""
        numbered = (self.number, self.text) if self.text else None
        return self.date or numbered

    @property
    def shown(self) -> str:
        """For people: the date, to the minute, or what the file says where that is none."""
        if self.date is None:
            return self.text
        year, month, day, hour, minute, _ = self.date
        return f"{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}"


def moments(file: NetcdfFile, first: int, count: int) -> list[Moment]:
    """The times `first`, `first + 1`, … of a file, `count` of them.

    Raises:
        DataError: the variable `time` is no number or no list of numbers, or its bounds are not.
    """
    name = file.called("time")
    if name is None:
        return [Moment()] * count
    values = _values(file, name, (), first, count)
    if values is None:
        return [Moment()] * count
    unit, calendar = file.unit(name) or "", file.text(name, "calendar") or "standard"
    dates = [_date(value, unit, calendar) for value in values]
    middles = dates
    bounds = file.text(name, "bounds") or ""
    if file.has(bounds):
        limits = _values(file, bounds, (2,), first, count)
        if limits is not None:
            middles = [_date(value, unit, calendar) for value in np.ma.mean(limits, axis=-1)]
    found = []
    for value, date, middle in zip(values, dates, middles, strict=True):
        if np.ma.is_masked(value):
            found.append(Moment())
            continue
        text = f"{float(value):.10g} {unit}".rstrip()
        number = None if np.isnan(value) else value.item()
        found.append(Moment(text, date, (middle or date or (0, None))[1], number))
    return found


def _values(
    file: NetcdfFile, name: str, more: tuple[int, ...], first: int, count: int
) -> Any | None:
    """Values [count, *more] of a variable of times; None if it does not have so many."""
    sizes = tuple(file.dims(name).values())
    if sizes[len(sizes) - len(more) :] != more or len(sizes) > 1 + len(more):
        shown = ", ".join(map(str, sizes))
        raise DataError(f"{file.path}: {name}: has the shape ({shown}); must be a list of times")
    rest = (slice(None),) * len(more)
    if len(sizes) == len(more):
        return file.read(name, rest)[None] if first == 0 and count == 1 else None
    if first + count > sizes[0]:
        return None
    return file.read(name, (slice(first, first + count), *rest))


def _date(value: Any, unit: str, calendar: str) -> Date | None:
    """A number of time as a date, to the second."""
    if np.ma.is_masked(value) or not np.isfinite(value):
        return None
    try:
        date = netcdf4().num2date(float(value), unit, calendar, only_use_cftime_datetimes=True)
        date += timedelta(microseconds=500_000)
    except (ValueError, OverflowError, TypeError):
        return None
    return date.year, date.month, date.day, date.hour, date.minute, date.second


def in_time(times: Sequence[Moment]) -> npt.NDArray[np.int64]:
    """The place in time of each moment, from 0: [moments].

    Where not all have dates, they count as in order.
    """
    order = list(range(len(times)))
    if are_dated(times):
        order.sort(key=lambda number: times[number].date or ())
    places: npt.NDArray[np.int64] = np.argsort(order)  # the permutation the other way round
    return places


def are_dated(times: Iterable[Moment]) -> bool:
    """Whether the files give all of some moments as dates."""
    return all(moment.date is not None for moment in times)


def check_differ(times: Iterable[tuple[Path, int, Moment]]) -> None:
    """Check that no time comes twice.

    Args:
        times: path, number in the file and time of each scene; what has no time is not compared.

    Raises:
        DataError: one does.
    """
    seen: dict[Any, tuple[Path, int]] = {}
    for path, number, moment in times:
        if moment.key is None:
            continue
        other, place = seen.setdefault(moment.key, (path, number))
        if (other, place) != (path, number):
            shown = f"time {place} of {other}" if place or other == path else str(other)
            raise DataError(
                f"{path}: time: {moment.text} (time {number} of the file) is that of {shown} too; "
                "give each time once"
            )
