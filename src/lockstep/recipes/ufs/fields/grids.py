"""The grid of a file: which dims it has, where its cells are, and how fields lie on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import DataError
from lockstep.recipes.ufs.fields.netcdf.decode import Masked
from lockstep.recipes.ufs.fields.netcdf.file import NetcdfFile, printable
from lockstep.recipes.ufs.fields.places import Places

Index = tuple[int | slice, ...]

MOST_SIDE = 100_000
"""Most rows or columns of a grid: at the equator, cells of 400 m."""

MOST_CELLS = 1 << 30
"""Most cells of a grid."""

_DEGREES = ("degrees_north", "degrees_east")


@dataclass(frozen=True)
class Grid:
    """The cells of a file.

    Attributes:
        file: file that has the places of the cells.
        names: names of the variables with latitudes and longitudes.
        dims: names of the dims of rows and columns.
        shape: number of rows and columns.
        is_regular: whether latitudes are of rows and longitudes of columns, rather than each of
            cells.
        num_times: number of times in the file.
    """

    file: NetcdfFile
    names: tuple[str, str]
    dims: tuple[str, str]
    shape: tuple[int, int]
    is_regular: bool
    num_times: int

    @staticmethod
    def find(file: NetcdfFile, names: tuple[str, str]) -> Grid:
        """The grid that two variables of places are on.

        Raises:
            DataError: one is not there, they do not make a grid, or one of no or too many cells.
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
        return Grid(file, names, (rows, columns), shape, is_regular, file.num_times)

    @property
    def says_degrees(self) -> bool:
        """Whether the file gives the units of both."""
        return all(self.file.unit(name) is not None for name in self.names)

    def check_units(self) -> None:
        """Check that places are in degrees, as far as the file says.

        Raises:
            DataError: it says that they are not.
        """
        for name, degrees in zip(self.names, _DEGREES, strict=True):
            self.file.unit_of(name, degrees, degrees)

    def places(self, rows: slice) -> Places:
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

    def axes(self, rows: slice) -> Places:
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
        """Where a field's rows are in a variable.

        Args:
            file: file that has the variable; this one's, or one on the same grid.
            name: name of the variable.
            time: number of the time.
            rows: rows of the grid.
            last: names that a further dim behind rows and columns may have.
            is_fixed: whether it may be the same at all times, and have no dim for them.

        Returns:
            The index of its first dims, without that of a further one, and the name of the further
            one, empty if there is none.

        Raises:
            DataError: it has other dims.
        """
        sizes = file.dims(name)
        dims = tuple(sizes)
        lead: Index = ()
        if dims[:1] and dims[0].lower() == "time":
            lead = (0 if sizes[dims[0]] == 1 else time,)
        elif self.num_times > 1 and not is_fixed:
            self._refuse(file, name, last, f", since the file has {self.num_times} times")
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
