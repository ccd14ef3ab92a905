"""The fields of one time in either file format, masked and checked, a band of rows at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.recipes.ufs.netcdf import NetcdfFile
from lockstep.recipes.ufs.variables import (
    OCEAN_MASK,
    THICKNESS,
    VARIABLES,
    Variable,
    known_unit,
    to_unit,
)

Masked = np.ma.MaskedArray[Any, Any]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

MOST_THICKNESS = 500.0
"""A cell thicker than this, in m, is not a surface cell of the ocean."""

_TOLERANCE_DEG = 1e-4


class Scene(ABC):
    """Fields on one grid at one time.

    Attributes:
        paths: its files.
        when: the time as the files give it, empty if they do not.
        shape: rows and columns of the grid.
        chunk_rows: rows stored together: to read fewer at a time is to read them twice.
    """

    paths: tuple[Path, ...]
    when: str
    shape: tuple[int, int]
    chunk_rows: int

    @abstractmethod
    def check(self, names: Sequence[str]) -> None:
        """See that variables are there, with the dims and the unit they must have.

        Raises:
            DataError: they are not.
        """

    @abstractmethod
    def ocean(self, rows: slice) -> Bools:
        """Which cells of some rows are ocean."""

    @abstractmethod
    def coordinates(self, rows: slice) -> tuple[Masked, Masked]:
        """Latitude and longitude of the cells of some rows, in degrees."""

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
            name: its short name.
            rows: of the grid.
            cells: [N], numbers of cells in these rows, all of them ocean.

        Returns:
            Values [N] in its unit, float32, and whether they are there [N].

        Raises:
            DataError: it has NaN, infinite or implausible values.
        """
        variable = VARIABLES[name]
        file, stored_name, stored_unit = self._place(variable)
        found = self._read(variable, rows)
        there = np.ones(len(cells), bool)
        if np.ma.is_masked(found):
            there = ~np.ma.getmaskarray(found).reshape(-1)[cells]
        values = found.data.reshape(-1)[cells].astype(np.float32, copy=False)
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


class HistoryScene(Scene):
    """One time of a CICE history file: dims (time, nj, ni)."""

    def __init__(self, path: Path, time: int) -> None:
        """Open the file.

        Raises:
            DataError: it is damaged, or is no history file.
        """
        self.paths = (path,)
        self._time = time
        self._file = NetcdfFile(path)
        dims = self._file.dims(OCEAN_MASK)
        if len(dims) != 2:
            raise DataError(_wrong_dims(self._file, OCEAN_MASK, "(nj, ni)"))
        self._dims = tuple(dims)
        rows, columns = dims.values()
        self.shape = (rows, columns)
        self.when = self._file.time(time)
        self.chunk_rows = self._file.chunk_rows

    @staticmethod
    def count_times(path: Path) -> int:
        """How many times a history file has.

        Raises:
            DataError: it is damaged, or has none.
        """
        file = NetcdfFile(path)
        try:
            count = file.size("time")
        finally:
            file.close()
        if not count:
            raise DataError(f"{path}: time: has size 0; there are no fields")
        return count

    def check(self, names: Sequence[str]) -> None:
        """See `Scene.check`."""
        wanted = ("time", *self._dims)
        for name in names:
            variable = VARIABLES[name]
            dims = self._file.dims(variable.cice_name)
            if tuple(dims) != wanted or tuple(dims.values())[1:] != self.shape:
                raise DataError(
                    _wrong_dims(self._file, variable.cice_name, f"({', '.join(wanted)})")
                )
            _check_unit(self._file, variable.cice_name, variable.unit)

    def ocean(self, rows: slice) -> Bools:
        """Where umask is 1."""
        mask: Bools = np.ma.filled(self._file.read(OCEAN_MASK, (rows,)) == 1, False)
        return mask

    def coordinates(self, rows: slice) -> tuple[Masked, Masked]:
        """ULAT and ULON."""
        for name in ("ULAT", "ULON"):
            if tuple(self._file.dims(name)) != self._dims:
                raise DataError(_wrong_dims(self._file, name, f"({', '.join(self._dims)})"))
        return self._file.read("ULAT", (rows,)), self._file.read("ULON", (rows,))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _place(self, variable: Variable) -> tuple[NetcdfFile, str, str]:
        return self._file, variable.cice_name, variable.unit

    def _read(self, variable: Variable, rows: slice) -> Masked:
        return self._file.read(variable.cice_name, (self._time, rows))


class PairScene(Scene):
    """An atmosphere and an ocean file with CF names: dims (latitude, longitude, levels)."""

    def __init__(self, atmosphere: Path, ocean: Path, level: int | None) -> None:
        """Open both.

        Args:
            atmosphere: the file of the atmosphere.
            ocean: the file of ocean and ice.
            level: the number of the model level of upper-air fields; None is the greatest one,
                which is the lowest in height.

        Raises:
            DataError: a file is damaged, has no such level, or they are on different grids or of
                different times.
        """
        self.paths = (atmosphere, ocean)
        self._level = level
        files = {"atmosphere": NetcdfFile(atmosphere), "ocean": NetcdfFile(ocean)}
        self._files: Mapping[str, NetcdfFile] = MappingProxyType(files)
        axes = {kind: _axes(file) for kind, file in files.items()}
        sizes = {kind: tuple(len(axis) for axis in found) for kind, found in axes.items()}
        if sizes["atmosphere"] != sizes["ocean"]:
            shown = " and ".join(f"{a}x{b}" for a, b in sizes.values())
            raise DataError(f"{atmosphere} and {ocean}: are on different grids: {shown}")
        for name, one, other in zip(("latitude", "longitude"), *axes.values(), strict=True):
            gap = float(np.abs(one - other).max())
            if gap > _TOLERANCE_DEG:
                raise DataError(
                    f"{atmosphere} and {ocean}: are on different grids: {name} differs by up to "
                    f"{gap:.4g} degrees"
                )
        self._latitude, self._longitude = axes["ocean"]
        self.shape = sizes["ocean"][0], sizes["ocean"][1]
        times = {kind: file.time() for kind, file in files.items()}
        if all(times.values()) and times["atmosphere"] != times["ocean"]:
            raise DataError(
                f"{atmosphere} and {ocean}: are of different times: {times['atmosphere']} and "
                f"{times['ocean']}"
            )
        self.when = times["atmosphere"] or times["ocean"]
        self.chunk_rows = max(file.chunk_rows for file in files.values())

    def check(self, names: Sequence[str]) -> None:
        """See `Scene.check`."""
        for name in names:
            variable = VARIABLES[name]
            if not variable.cf_file:
                raise DataError(
                    f"{self.paths[0]}: CF pairs have no {name} ({variable.cf_name}); leave it out "
                    "of inputs and outputs"
                )
            file, stored_name, unit = self._place(variable)
            self._index(file, stored_name)
            _check_unit(file, stored_name, unit)
        self._index(self._files["ocean"], THICKNESS)

    def ocean(self, rows: slice) -> Bools:
        """Where the ocean's uppermost cell has a thickness above 0 and at most 500 m."""
        file = self._files["ocean"]
        thickness = file.read(THICKNESS, (rows, slice(None), self._index(file, THICKNESS)))
        found: Bools = np.ma.filled((thickness > 0) & (thickness <= MOST_THICKNESS), False)
        return found

    def coordinates(self, rows: slice) -> tuple[Masked, Masked]:
        """The axes, spread over the cells."""
        latitude, longitude = np.meshgrid(self._latitude[rows], self._longitude, indexing="ij")
        return np.ma.asarray(latitude), np.ma.asarray(longitude)

    def close(self) -> None:
        """Close both files."""
        for file in self._files.values():
            file.close()

    def _place(self, variable: Variable) -> tuple[NetcdfFile, str, str]:
        kind = variable.cf_file
        return self._files[kind], variable.cf_name, variable.stored_unit(kind)

    def _read(self, variable: Variable, rows: slice) -> Masked:
        file, name, _ = self._place(variable)
        return file.read(name, (rows, slice(None), self._index(file, name)))

    def _index(self, file: NetcdfFile, name: str) -> int:
        """Which entry of a field's last dim is meant."""
        dims = file.dims(name)
        first, last = tuple(dims)[:2], tuple(dims)[2:]
        horizontal = ("latitude", "longitude")
        vertical = ("levels",), ("dummy_surface_levels",)
        if first != horizontal or last not in vertical:
            wanted = "(latitude, longitude, levels or dummy_surface_levels)"
            raise DataError(_wrong_dims(file, name, wanted))
        if last == ("dummy_surface_levels",) or dims["levels"] == 1 or file is self._files["ocean"]:
            return 0
        numbers = [int(n) for n in file.read("model_levels", (slice(None),))]
        if self._level is None:
            return int(np.argmax(numbers))
        if self._level not in numbers:
            raise DataError(
                f"{file.path}: model_levels: has no level={self._level}; it has {min(numbers)} to "
                f"{max(numbers)}"
            )
        return numbers.index(self._level)


def _axes(file: NetcdfFile) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Latitude and longitude of a CF file."""
    for name in ("latitude", "longitude"):
        if tuple(file.dims(name)) != (name,):
            raise DataError(_wrong_dims(file, name, f"({name})"))
    latitude, longitude = (file.read(n, (slice(None),)).data for n in ("latitude", "longitude"))
    return latitude, longitude


def _wrong_dims(file: NetcdfFile, name: str, wanted: str) -> str:
    found = ", ".join(f"{dim}={size}" for dim, size in file.dims(name).items())
    return f"{file.path}: {name}: has dims ({found}); must be {wanted}"


def _check_unit(file: NetcdfFile, name: str, unit: str) -> None:
    """Refuse a variable that says it is in another unit; one that says nothing is believed."""
    said = file.unit(name)
    if said is not None and not known_unit(said, unit):
        raise DataError(f"{file.path}: {name}: units={said!r}: must be {unit}")
