"""CICE history files: dims (time, nj, ni), temperatures in °C, a mask that is 1 on the ocean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from lockstep.errors import DataError
from lockstep.recipes.ufs.fields.decode import Masked
from lockstep.recipes.ufs.fields.netcdf import NetcdfFile
from lockstep.recipes.ufs.fields.places import Places
from lockstep.recipes.ufs.fields.scenes import (
    Bools,
    Scene,
    check_shape,
    check_unit,
    closed_on_error,
    wrong_dims,
)
from lockstep.recipes.ufs.fields.variables import OCEAN_MASK, VARIABLES, Variable

MOST_TIMES = 100_000
"""Most times in one file: more than ten years of hours."""

_PLACES = MappingProxyType({"ULAT": "degrees_north", "ULON": "degrees_east"})


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
        with closed_on_error(self):
            self._examine()

    def _examine(self) -> None:
        dims = self._file.dims(OCEAN_MASK)
        if len(dims) != 2:
            raise DataError(wrong_dims(self._file, OCEAN_MASK, "(nj, ni)"))
        self._dims = tuple(dims)
        rows, columns = dims.values()
        self.shape = check_shape(self._file, OCEAN_MASK, (rows, columns))
        for name in _PLACES:
            if tuple(self._file.dims(name)) != self._dims:
                raise DataError(wrong_dims(self._file, name, f"({', '.join(self._dims)})"))
        self.says_degrees = all(self._file.unit(name) is not None for name in _PLACES)
        self.when = self._file.time(self._time)
        self.chunk_rows = self._file.chunk_rows

    @staticmethod
    def count_times(path: Path) -> int:
        """The number of times in a history file.

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
        if count > MOST_TIMES:
            raise DataError(f"{path}: time: has size {count}; must be at most {MOST_TIMES}")
        return count

    def check(self, names: Sequence[str]) -> None:
        """See `Scene.check`."""
        for name, degrees in _PLACES.items():
            check_unit(self._file, name, degrees)
        wanted = ("time", *self._dims)
        for name in names:
            variable = VARIABLES[name]
            dims = self._file.dims(variable.cice_name)
            if tuple(dims) != wanted or tuple(dims.values())[1:] != self.shape:
                raise DataError(
                    wrong_dims(self._file, variable.cice_name, f"({', '.join(wanted)})")
                )
            check_unit(self._file, variable.cice_name, variable.unit)

    def ocean(self, rows: slice) -> Bools:
        """Which cells are ocean: those where umask is 1."""
        mask: Bools = np.ma.filled(self._file.read(OCEAN_MASK, (rows, slice(None))) == 1, False)
        return mask

    def coordinates(self, rows: slice) -> Places:
        """Latitude and longitude: ULAT and ULON."""
        latitude, longitude = (self._file.read(name, (rows, slice(None))) for name in _PLACES)
        return latitude, longitude

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _place(self, variable: Variable) -> tuple[NetcdfFile, str, str]:
        return self._file, variable.cice_name, variable.unit

    def _read(self, variable: Variable, rows: slice) -> Masked:
        return self._file.read(variable.cice_name, (self._time, rows, slice(None)))
