"""The fields of one time, masked and checked, a band of rows at a time: what both formats share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.recipes.ufs.fields.decode import Masked
from lockstep.recipes.ufs.fields.netcdf import NetcdfFile, printable
from lockstep.recipes.ufs.fields.places import Places
from lockstep.recipes.ufs.fields.variables import (
    VARIABLES,
    Variable,
    known_unit,
    to_unit,
)

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


MOST_SIDE = 100_000
"""Most rows or columns of a grid: at the equator, cells of 400 m."""

MOST_CELLS = 1 << 30
"""Most cells of a grid."""

_STRIP = 64
"""Rows of the grid whose areas are computed at a time."""


class Scene(ABC):
    """Fields on one grid at one time.

    Attributes:
        paths: paths of the scene's files.
        when: the time as the files give it; empty if they do not.
        shape: number of rows and columns of the grid.
        says_degrees: whether the files give the units of places.
        chunk_rows: number of rows stored together: to read fewer at a time is to read them twice.
    """

    paths: tuple[Path, ...]
    when: str
    shape: tuple[int, int]
    says_degrees: bool
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
    def ocean(self, rows: slice) -> Bools:
        """Which cells of some rows of the grid are ocean: bool [rows, columns]."""

    @abstractmethod
    def coordinates(self, rows: slice) -> Places:
        """Latitude and longitude of the cells of some rows, in degrees: each [rows, columns]."""

    def land(self, most: int = 40_000) -> Floats:
        """Places [M, 2], latitude and longitude in degrees, of cells that are not ocean.

        Of a grid with more than `most` cells, every second, third, … row and column is looked at.
        Cells without a place are left out.

        Args:
            most: approximate number of cells that are looked at.
        """
        height, width = self.shape
        stride = math.ceil(math.sqrt(height * width / most))
        places = []
        for row in range(0, height, stride):
            one = slice(row, row + 1)
            place = np.stack([np.ma.filled(a, np.nan).reshape(-1) for a in self.coordinates(one)])
            places.append(place[:, ~self.ocean(one).reshape(-1)][:, ::stride])
        cells = np.concatenate(places, axis=1).T.astype(np.float32)
        known: Floats = cells[np.isfinite(cells).all(axis=1)]
        return known

    def areas(self) -> npt.NDArray[np.float64]:
        """Relative areas [cells] of all cells of the grid, from the places of their neighbours.

        The area is |∂r/∂row × ∂r/∂column| of the cells' places r on the unit sphere, by central
        differences. Where a neighbour has no place, the cosine of latitude stands in.
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
        filled: npt.NDArray[np.float64] = np.where(known, area, scale * cosine)
        return filled

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    @abstractmethod
    def _place(self, variable: Variable) -> tuple[NetcdfFile, str, str]:
        """The file that has a variable, its name there and the unit in which it is stored."""

    @abstractmethod
    def _read(self, variable: Variable, rows: slice) -> Masked:
        """A variable as it is stored: [rows, columns]."""

    def field(self, name: str, rows: slice, cells: Ints) -> tuple[Floats, Bools]:
        """A variable in some cells.

        Args:
            name: short name of the variable.
            rows: rows of the grid to read.
            cells: numbers of N cells within these rows, all of them ocean, [N], int64.

        Returns:
            Values [N] in its unit, float32, and whether they are there [N].

        Raises:
            DataError: it has NaN, infinite or implausible values.
        """
        variable = VARIABLES[name]
        file, stored_name, stored_unit = self._place(variable)
        stored = self._read(variable, rows)
        there = np.ones(len(cells), bool)
        if np.ma.is_masked(stored):
            there = ~np.ma.getmaskarray(stored).reshape(-1)[cells]
        values = stored.data.reshape(-1)[cells].astype(np.float32, copy=False)
        shift = to_unit(variable.unit, stored_unit)
        if shift:
            values = values + np.float32(shift)
        # NaN is in no range.
        bad = there & ~((values >= variable.low) & (values <= variable.high))
        if bad.any():
            first = divmod(int(cells[bad.argmax()]), self.shape[1])
            where = f"{file.path}: {stored_name}"
            raise DataError(
                _implausible(where, variable, values[bad], first[0] + rows.start, first[1])
            )
        return values, there


@contextmanager
def closed_on_error(scene: Scene) -> Iterator[None]:
    """Closes a scene that turns out to be unusable while it is made."""
    try:
        yield
    except BaseException:
        scene.close()
        raise


def _implausible(where: str, variable: Variable, bad: Floats, row: int, column: int) -> str:
    """The message for values that are not finite or out of range, the first of them at a cell."""
    place = f"in {len(bad)} ocean cells, first in row {row}, column {column}"
    finite = bad[np.isfinite(bad)]
    if not len(finite):
        return (
            f"{where}: NaN or infinite {place}; mark missing values with the attribute "
            "missing_value or _FillValue"
        )
    value = float(finite[np.argmax(np.abs(finite))])
    kelvin = variable.unit == "degC" and value > variable.high
    hint = "it seems to be in K" if kelvin else "the unit or the missing value is wrong"
    return (
        f"{where}: {value:.6g} {variable.unit} is outside {variable.low:g} to {variable.high:g}, "
        f"{place}; {hint}"
    )


def wrong_dims(file: NetcdfFile, name: str, wanted: str) -> str:
    """The message for a variable with other dims than it must have."""
    dims = ", ".join(f"{printable(dim)}={size}" for dim, size in file.dims(name).items())
    return f"{file.path}: {name}: has dims ({dims}); must be {wanted}"


def check_unit(file: NetcdfFile, name: str, unit: str) -> None:
    """Check a variable's `units` attribute; one without it is taken to be in the unit.

    Raises:
        DataError: the attribute names another unit.
    """
    said = file.unit(name)
    if said is not None and not known_unit(said, unit):
        raise DataError(f"{file.path}: {name}: units={printable(said)!r}: must be {unit}")


def check_shape(file: NetcdfFile, name: str, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of a grid, as the variable `name` has it.

    Raises:
        DataError: the grid has no cells, or more than any grid has.
    """
    if not 0 < min(shape) <= max(shape) <= MOST_SIDE or shape[0] * shape[1] > MOST_CELLS:
        raise DataError(
            f"{file.path}: {name}: is on a grid of {shape[0]}x{shape[1]} cells; there must be at "
            f"least one, and at most {MOST_SIDE} in a row or column and {MOST_CELLS} in all"
        )
    return shape
