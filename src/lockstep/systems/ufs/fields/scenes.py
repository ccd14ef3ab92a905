"""The fields of one time, masked and checked, a band of rows at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.systems.ufs.decoding import Masked
from lockstep.systems.ufs.fields import VARIABLES, Variable, conversion
from lockstep.systems.ufs.fields.grids import Coordinates, filled
from lockstep.systems.ufs.netcdf_file import NetcdfFile, netcdf4

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

BAND_CELLS = 1 << 17
"""Approximate number of cells of the grid that are read at a time."""

_MOST_CHUNKED = 4
"""Factor by which bands may grow to match the chunks that files are stored in."""

_STRIP = 64
"""Rows of the grid whose areas are computed at a time."""

Date = tuple[int, int, int, int, int, int]
"""Year, month, day, hour, minute and second in the file's calendar."""


@dataclass(frozen=True)
class Moment:
    """The time of a field.

    Attributes:
        text: number, to ten digits, and unit as in the file; empty if it has no time.
        date: the same as a date; None if the unit is not a known `… since …`.
        month: calendar month of the field, from 1; None without a date. A mean over an interval,
            which files may date at its end, has the month of the middle.
        number: all digits of the number; None if there is none, or it is NaN.
    """

    text: str = ""
    date: Date | None = None
    month: int | None = None
    number: float | None = None

    @property
    def key(self) -> Date | tuple[float | None, str] | None:
        """A key that equal times share; None if the file has no time."""
        numbered = (self.number, self.text) if self.text else None
        return self.date or numbered

    @property
    def shown(self) -> str:
        """The date, to the minute, or the text of a time without a date."""
        if self.date is None:
            return self.text
        year, month, day, hour, minute, _ = self.date
        return f"{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}"


def moments(file: NetcdfFile, first: int, count: int) -> list[Moment]:
    """The times `first`, `first + 1`, … of a file, `count` of them.

    Raises:
        DataError: the variable `time` or its bounds are neither a number nor a list of numbers.
    """
    name = file.called("time")
    if name is None:
        return [Moment()] * count
    values = _values(file, name, (), first, count)
    if values is None:
        return [Moment()] * count
    unit, calendar = file.text(name, "units") or "", file.text(name, "calendar") or "standard"
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
    """The index in time of each moment, from 0: [moments].

    If not all have dates, they are taken to be in order.
    """
    order = list(range(len(times)))
    if are_dated(times):
        order.sort(key=lambda number: times[number].date or ())
    return np.asarray(np.argsort(order))  # the inverse permutation


def are_dated(times: Iterable[Moment]) -> bool:
    """Whether all moments have dates."""
    return all(moment.date is not None for moment in times)


def check_differ(times: Iterable[tuple[Path, int, Moment]]) -> None:
    """Check that no time occurs twice.

    Args:
        times: path, number in the file and time of each scene; scenes without times are ignored.

    Raises:
        DataError: one does.
    """
    seen: dict[Any, tuple[Path, int]] = {}
    for path, number, moment in times:
        if moment.key is None:
            continue
        other, index = seen.setdefault(moment.key, (path, number))
        if (other, index) != (path, number):
            shown = f"time {index} of {other}" if index or other == path else str(other)
            raise DataError(
                f"{path}: time: {moment.text} (time {number} of the file) is that of {shown} too; "
                "give each time once"
            )


class Field(NamedTuple):
    """A variable in N cells.

    Attributes:
        values: values in the variable's unit, [N], float32.
        there: whether they are present, rather than missing, [N].
        clipped: whether they were slightly out of range and are clipped to it, [N].
    """

    values: Floats
    there: Bools
    clipped: Bools


class Scene(ABC):
    """Fields on one grid at one time.

    Attributes:
        paths: paths of the scene's files.
        moment: time of the fields.
        shape: number of rows and columns of the grid.
        has_units: whether the files give the units of coordinates.
        chunk_rows: number of rows stored together: reading fewer at a time reads them twice.
    """

    paths: tuple[Path, ...]
    moment: Moment
    shape: tuple[int, int]
    has_units: bool
    chunk_rows: int

    @abstractmethod
    def check(self, names: Sequence[str]) -> None:
        """Check that variables are there, with the dims and the unit they must have.

        Args:
            names: short names of the variables.

        Raises:
            DataError: one is not.
        """

    @abstractmethod
    def all_moments(self) -> list[Moment]:
        """The times of all fields in the scene's files, in order."""

    @abstractmethod
    def ocean(self, rows: slice) -> Bools:
        """Which cells of some rows of the grid are ocean: bool [rows, columns]."""

    @abstractmethod
    def coordinates(self, rows: slice) -> Coordinates:
        """Latitude and longitude of the cells of some rows, in degrees: each [rows, columns]."""

    def bands(self) -> Iterator[slice]:
        """The rows of each band of the grid."""
        rows, columns = self.shape
        size = max(1, BAND_CELLS // columns)
        chunks = -(-size // self.chunk_rows) * self.chunk_rows
        size = chunks if chunks <= _MOST_CHUNKED * size else size
        for start in range(0, rows, size):
            yield slice(start, min(start + size, rows))

    def land(self, most: int = 40_000) -> Floats:
        """Coordinates [M, 2], latitude and longitude in degrees, of cells that are not ocean.

        Of a grid with more than `most` cells, every second, third, … row and column is used. Cells
        without coordinates are left out.

        Args:
            most: approximate number of cells that are used.
        """
        height, width = self.shape
        stride = math.ceil(math.sqrt(height * width / most))
        parts = []
        for row in range(0, height, stride):
            one = slice(row, row + 1)
            place = np.stack([np.ma.filled(a, np.nan).reshape(-1) for a in self.coordinates(one)])
            parts.append(place[:, ~self.ocean(one).reshape(-1)][:, ::stride])
        cells = np.concatenate(parts, axis=1).T.astype(np.float32)
        known: Floats = cells[np.isfinite(cells).all(axis=1)]
        return known

    def areas(self) -> npt.NDArray[np.float64]:
        """Relative areas [cells] of all cells of the grid, from the coordinates of neighbours.

        The area is |∂r/∂row × ∂r/∂column| of the cells' positions r on the unit sphere, by central
        differences. If a neighbour has no coordinates, the cosine of latitude is used instead.
        """
        height, width = self.shape
        if min(height, width) < 2:
            return np.ones(height * width)
        strips = []
        for start in range(0, height, _STRIP):
            first, last = max(start - 1, 0), min(start + _STRIP + 1, height)
            first = min(first, height - 2)
            place = [
                np.ma.filled(a.astype(float), np.nan) for a in self.coordinates(slice(first, last))
            ]
            latitude, longitude = np.radians(place)
            points = np.stack(
                [
                    np.cos(latitude) * np.cos(longitude),
                    np.cos(latitude) * np.sin(longitude),
                    np.sin(latitude),
                ],
                axis=-1,
            )
            down, across = np.gradient(points, axis=(0, 1))
            area = np.linalg.norm(np.cross(down, across), axis=-1)
            own = slice(start - first, min(start + _STRIP, height) - first)
            strips.append(np.stack([area[own], np.cos(latitude[own])]).reshape(2, -1))
        area, cosine = np.concatenate(strips, axis=1)
        known = np.isfinite(area)
        scale = area[known].sum() / cosine[known].sum() if known.any() else 1.0
        return np.asarray(np.where(known, area, scale * cosine))

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    @abstractmethod
    def _place(self, variable: Variable) -> tuple[NetcdfFile, str, str]:
        """The file that has a variable, its name there and the unit in which it is stored."""

    @abstractmethod
    def _read(self, variable: Variable, rows: slice) -> Masked:
        """A variable as it is stored: [rows, columns]."""

    def field(self, name: str, rows: slice, cells: Ints) -> Field:
        """A variable in some cells.

        Args:
            name: short name of the variable.
            rows: rows of the grid to read.
            cells: numbers of N cells within these rows, all of them ocean, [N], int64.

        Raises:
            DataError: it has NaN, infinite or implausible values.
        """
        variable = VARIABLES[name]
        file, stored_name, stored_unit = self._place(variable)
        stored = self._read(variable, rows)
        is_present = np.ones(len(cells), bool)
        if np.ma.is_masked(stored):
            is_present = ~np.ma.getmaskarray(stored).reshape(-1)[cells]
        values = _converted(stored.data.reshape(-1)[cells], variable.unit, stored_unit)
        low, high, slack = (np.float32(n) for n in (variable.low, variable.high, variable.slack))
        # NaN is in no range.
        bad = is_present & ~((values >= low - slack) & (values <= high + slack))
        if bad.any():
            row, column = divmod(int(cells[bad.argmax()]), self.shape[1])
            row += rows.start
            cell = f"row {row}, column {column} ({self._shown_place(row, column)})"
            raise DataError(
                _implausible(
                    f"{file.path}: {stored_name}", variable, stored_unit, values[bad], cell
                )
            )
        clipped = is_present & ((values < low) | (values > high))
        if clipped.any():
            values = np.where(clipped, values.clip(low, high), values)
        return Field(values, is_present, clipped)

    def _shown_place(self, row: int, column: int) -> str:
        """The coordinates of a cell for messages."""
        axes = (float(filled(a)[0, column]) for a in self.coordinates(slice(row, row + 1)))
        latitude, longitude = axes
        if not math.isfinite(latitude + longitude):
            return "whose place is missing"
        return f"{abs(latitude):.2f}°{'S' if latitude < 0 else 'N'}, {longitude % 360:.2f}°E"


@contextmanager
def closed_on_error(scene: Scene) -> Iterator[None]:
    """Closes a scene if its constructor fails."""
    try:
        yield
    except BaseException:
        scene.close()
        raise


def _converted(stored: npt.NDArray[Any], unit: str, stored_unit: str) -> Floats:
    """Stored values in another unit, float32."""
    factor, shift = conversion(unit, stored_unit)
    if factor != 1:
        stored = stored.astype(np.float64) * factor
    values: Floats = stored.astype(np.float32, copy=False)
    return values + np.float32(shift) if shift else values


def _implausible(where: str, variable: Variable, stored_unit: str, bad: Floats, cell: str) -> str:
    """The message for values that are not finite or out of range, the first one in a cell."""
    place = f"in {len(bad)} ocean cells, first in {cell}"
    finite = bad[np.isfinite(bad)]
    if not len(finite):
        return (
            f"{where}: NaN or infinite {place}; mark missing values with the attribute "
            "missing_value or _FillValue"
        )
    value = float(finite[np.argmax(np.abs(finite))])
    unit = "" if variable.unit == "1" else f" {variable.unit}"
    hint = "the unit or the missing value is wrong"
    if variable.unit == stored_unit == "degC" and value > variable.high:
        hint = "it seems to be in K: say so with the attribute units=K"
    elif variable.unit == "degC" and stored_unit == "K" and value < -150:
        hint = "it seems to be in degC: say so with the attribute units=degC"
    elif variable.unit == stored_unit == "1" and 1 < value <= 100 * (1 + variable.slack):
        hint = "it seems to be in %: say so with the attribute units=%"
    return (
        f"{where}: {value:.6g}{unit} is outside {variable.low:g} to {variable.high:g}, {place}; "
        f"{hint}"
    )
