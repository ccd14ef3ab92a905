"""The grid of a file: its dims, the coordinates of its cells, and the index of fields on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.systems.ufs.decoding import Masked, printable
from lockstep.systems.ufs.netcdf_file import NetcdfFile

Coordinates = tuple[Masked, Masked]
"""Latitude and longitude, of one shape."""

Box = tuple[float, float, float, float]
"""Least and greatest latitude, western and eastern longitude of a part of the globe, in degrees."""

EVERYWHERE: Box = (-90.0, 90.0, -180.0, 180.0)
"""The whole globe."""

REGIONS: Mapping[str, Box] = {
    "global": EVERYWHERE,
    "arctic": (50.0, 90.0, -180.0, 180.0),
    "antarctic": (-90.0, -50.0, -180.0, 180.0),
}
"""Regions that have a name."""

TOLERANCE_DEG = 1e-4
"""Coordinates that differ by less are the same: files round them differently."""

MOST_SIDE = 100_000
"""Most rows or columns of a grid: at the equator, cells of 400 m."""

MOST_CELLS = 1 << 30
"""Most cells of a grid."""

Index = tuple[int | slice, ...]

_DEGREES = ("degrees_north", "degrees_east")
_TOLERANCE_RADIANS = 1e-3

_RANGES = (("latitude", -90.0, 90.0), ("longitude", -360.0, 720.0))


def check_degrees(
    path: Path, coordinates: Coordinates, has_units: bool, first_row: int = 0
) -> None:
    """Check that coordinates can be in degrees.

    Args:
        path: path of their file, for the message.
        coordinates: latitude and longitude of cells, each [rows, columns].
        has_units: whether the file gives their units.
        first_row: number in the grid of the first of these rows.

    Raises:
        DataError: one is out of range; or all could be in radians, and the file gives no units.
    """
    could_be_radians = True
    limits = zip(coordinates, _RANGES, (math.pi / 2, 2 * math.pi), strict=True)
    for axis, (name, low, high), most_radians in limits:
        values = filled(axis)
        finite = values[np.isfinite(values)]
        if not finite.size:
            return
        least, greatest = float(finite.min()), float(finite.max())
        if least < low - TOLERANCE_DEG or greatest > high + TOLERANCE_DEG:
            bad = least if least < low - TOLERANCE_DEG else greatest
            row, column = np.argwhere(values == bad)[0]
            raise DataError(
                f"{path}: {name}: {bad:.6g} is outside {low:g} to {high:g} degrees, first in row "
                f"{first_row + row}, column {column}; mend it, or mark it as missing with the "
                "attribute _FillValue"
            )
        could_be_radians &= max(-least, greatest) < most_radians + _TOLERANCE_RADIANS
    if could_be_radians and not has_units:
        raise DataError(
            f"{path}: latitude: all places are within 1.57 of 0, as if they were in radians; must "
            "be in degrees. If they are, say so with the attribute units=degrees_north"
        )


def inside(
    latitude: npt.NDArray[Any], longitude: npt.NDArray[Any], box: Box
) -> npt.NDArray[np.bool_]:
    """Which points [N] are in a box, which may cross the date line or be the whole circle.

    Args:
        latitude: latitudes in degrees, [N].
        longitude: longitudes in degrees, from any origin, [N].
        box: its limits; from the western longitude eastwards to the eastern one.
    """
    south, north, west, east = box
    is_inside: npt.NDArray[np.bool_] = (latitude >= south) & (latitude <= north)
    if east - west < 360:
        is_inside &= (longitude - west) % 360 <= (east - west) % 360
    return is_inside


def check_shapes(
    first: Path, shape: tuple[int, int], other: Path, other_shape: tuple[int, int]
) -> None:
    """Check that the grids of two files have the same rows and columns.

    Raises:
        DataError: they do not.
    """
    if shape != other_shape:
        shapes = " and ".join(f"{rows}x{columns}" for rows, columns in (shape, other_shape))
        raise DataError(f"{first} and {other}: are on different grids: {shapes}")


def check_same(first: Path, expected: Coordinates, other: Path, coordinates: Coordinates) -> None:
    """Check that cells have the same coordinates in two files; missing ones are not compared.

    Args:
        first: path of the file of `expected`.
        expected: coordinates of some cells, in degrees.
        other: path of the file of `coordinates`.
        coordinates: coordinates of the same cells in the other file, of the same shape.

    Raises:
        DataError: they are not.
    """
    for (name, *_), one, two in zip(_RANGES, expected, coordinates, strict=True):
        a, b = filled(one), filled(two)
        if np.array_equal(a, b, equal_nan=True):
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        gaps = np.abs(a - b)
        if name == "longitude":
            gaps = np.abs((gaps + 180) % 360 - 180)
        gap = float(np.nanmax(gaps, initial=0))
        if gap > TOLERANCE_DEG:
            is_reversed = _direction(a) * _direction(b) < 0
            hint = f"; {name} runs the other way in one of them" if is_reversed else ""
            raise DataError(
                f"{first} and {other}: are on different grids: {name} differs by up to {gap:.4g} "
                f"degrees{hint}"
            )


def _direction(values: npt.NDArray[Any]) -> float:
    """The sign of the change of values from the first to the last row; 0 if there is none."""
    finite = values[np.isfinite(values).reshape(len(values), -1).all(axis=1)]
    return float(np.sign(np.mean(finite[-1] - finite[0]))) if len(finite) > 1 else 0.0


def filled(axis: Masked) -> npt.NDArray[Any]:
    """Coordinates as floats, NaN where they are missing."""
    floats = axis if axis.dtype.kind == "f" else axis.astype(np.float64)
    return np.asarray(np.ma.filled(floats, np.nan))


@dataclass(frozen=True)
class Grid:
    """The cells of a file.

    Attributes:
        file: file with the coordinates of the cells.
        names: names of the variables with latitudes and longitudes.
        dims: names of the dims of rows and columns.
        shape: number of rows and columns.
        is_regular: whether latitudes are of rows and longitudes of columns, rather than both of
            cells.
    """

    file: NetcdfFile
    names: tuple[str, str]
    dims: tuple[str, str]
    shape: tuple[int, int]
    is_regular: bool

    @staticmethod
    def find(file: NetcdfFile, names: tuple[str, str]) -> Grid:
        """The grid of two variables of coordinates.

        Raises:
            DataError: one is missing, they do not form a grid, or it has no or too many cells.
        """
        latitude, longitude = (file.dims(name) for name in names)
        is_regular = len(latitude) == len(longitude) == 1 and latitude != longitude
        sizes = {**latitude, **longitude} if is_regular else latitude
        if len(sizes) != 2 or (not is_regular and longitude != latitude):
            name = names[0] if len(latitude) not in (1, 2) else names[1]
            wanted = f"as those of {names[0]}" if name == names[1] else "(rows, columns) or (rows)"
            raise DataError(wrong_dims(file, name, wanted))
        rows, columns = sizes
        shape = sizes[rows], sizes[columns]
        if not 0 < min(shape) <= max(shape) <= MOST_SIDE or shape[0] * shape[1] > MOST_CELLS:
            raise DataError(
                f"{file.path}: {', '.join(names)}: is on a grid of {shape[0]}x{shape[1]} cells; "
                f"there must be at least one, and at most {MOST_SIDE} in a row or column and "
                f"{MOST_CELLS} in all"
            )
        return Grid(file, names, (rows, columns), shape, is_regular)

    @property
    def has_units(self) -> bool:
        """Whether the file gives the units of both."""
        return all(self.file.text(name, "units") is not None for name in self.names)

    def check_units(self) -> None:
        """Check that coordinates with units are in degrees.

        Raises:
            DataError: they are not.
        """
        for name, degrees in zip(self.names, _DEGREES, strict=True):
            self.file.unit_of(name, degrees, degrees)

    def coordinates(self, rows: slice) -> Coordinates:
        """Latitude and longitude of the cells of some rows, in degrees: each [rows, columns].

        Raises:
            DataError: those of a regular grid are missing somewhere.
        """
        if not self.is_regular:
            latitude, longitude = (self.file.read(n, (rows, slice(None))) for n in self.names)
            return latitude, longitude
        latitude, longitude = self.axes(rows)
        down, across = np.meshgrid(latitude, longitude, indexing="ij")
        return np.ma.asarray(down), np.ma.asarray(across)

    def axes(self, rows: slice) -> Coordinates:
        """Latitudes of some rows and longitudes of all columns of a regular grid, in degrees.

        Raises:
            DataError: one is missing.
        """
        return self._axis(self.names[0], rows), self._axis(self.names[1], slice(None))

    def index(
        self,
        file: NetcdfFile,
        name: str,
        time: int,
        rows: slice,
        last: Sequence[str] = (),
        is_fixed: bool = False,
    ) -> tuple[Index, str]:
        """The index of a field's rows in a variable.

        Args:
            file: file that has the variable; this one's, or one on the same grid.
            name: name of the variable.
            time: number of the time.
            rows: rows of the grid.
            last: names that a further dim after rows and columns may have.
            is_fixed: whether it may be constant in time, and have no time dim.

        Returns:
            The index of its first dims, without a further one, and the name of the further one,
            empty if there is none.

        Raises:
            DataError: it has other dims.
        """
        sizes = file.dims(name)
        dims = tuple(sizes)
        lead: Index = ()
        if dims[:1] and dims[0].lower() == "time":
            lead = (0 if sizes[dims[0]] == 1 else time,)
        elif self.file.num_times > 1 and not is_fixed:
            self._refuse(file, name, last, f", since the file has {self.file.num_times} times")
        own = dims[len(lead) : len(lead) + 2]
        rest = dims[len(lead) + 2 :]
        if own != self.dims or len(rest) > 1 or (rest and rest[0] not in last):
            self._refuse(file, name, last)
        if tuple(sizes[dim] for dim in own) != self.shape:
            self._refuse(file, name, last)
        return (*lead, rows, slice(None)), rest[0] if rest else ""

    def _refuse(self, file: NetcdfFile, name: str, last: Sequence[str], why: str = "") -> None:
        wanted = ", ".join((*self.dims, *filter(None, [" or ".join(last)])))
        time = "time, " if file.num_times > 1 or file.has_dim("time") else ""
        raise DataError(wrong_dims(file, name, f"({time}{wanted}){why}"))

    def _axis(self, name: str, part: slice) -> Masked:
        axis = self.file.read(name, (part,))
        if np.ma.is_masked(axis) or not np.isfinite(axis.data).all():
            raise DataError(f"{self.file.path}: {name}: has missing values; must be degrees")
        return axis


def wrong_dims(file: NetcdfFile, name: str, wanted: str) -> str:
    """The message for a variable with other dims than it must have."""
    dims = ", ".join(f"{printable(dim)}={size}" for dim, size in file.dims(name).items())
    return f"{file.path}: {name}: has dims ({dims}); must be {wanted}"
