"""CICE history files: dims (time, nj, ni) or (nj, ni), a mask that is 1 on the ocean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.errors import DataError
from lockstep.recipes.ufs.fields.grids import Grid
from lockstep.recipes.ufs.fields.netcdf.decode import Masked
from lockstep.recipes.ufs.fields.netcdf.file import NetcdfFile
from lockstep.recipes.ufs.fields.places import Places
from lockstep.recipes.ufs.fields.scenes import Bools, Scene, closed_on_error
from lockstep.recipes.ufs.fields.times import Moment, moments
from lockstep.recipes.ufs.fields.variables import OCEAN_MASKS, VARIABLES, Variable

MOST_TIMES = 100_000
"""Most times in one file: more than ten years of hours."""


class HistoryScene(Scene):
    """One time of a CICE history file: dims (time, nj, ni), or (nj, ni) if there is one time."""

    def __init__(self, path: Path, time: int) -> None:
        """Open the file.

        Raises:
            DataError: it is damaged, or is no history file.
        """
        self.paths = (path,)
        self._time = time
        self._file = NetcdfFile(path)
        with closed_on_error(self):
            self._mask, *places = self._names()
            self._grid = Grid.find(self._file, (places[0], places[1]))
            self.shape = self._grid.shape
            self.says_degrees = self._grid.says_degrees
            self.moment = moments(self._file, time, 1)[0]
            self.chunk_rows = self._file.chunk_rows

    def _names(self) -> tuple[str, str, str]:
        """The names of mask, latitude and longitude: of the U grid, if all are there."""
        for names in OCEAN_MASKS:
            if all(map(self._file.has, names)):
                return names
        there = [names for names in OCEAN_MASKS if self._file.has(names[0])]
        # The message for what is missing comes from who asks for it.
        names = there[0] if there else OCEAN_MASKS[0]
        for name in names:
            self._file.dims(name)
        return names

    @staticmethod
    def count_times(path: Path) -> int:
        """The number of times in a history file.

        Raises:
            DataError: it is damaged, or has none.
        """
        file = NetcdfFile(path)
        try:
            return count_times(file)
        finally:
            file.close()

    def check(self, names: Sequence[str]) -> None:
        """See `Scene.check`."""
        self._grid.check_units()
        whole = slice(None)
        self._grid.index(self._file, self._mask, self._time, whole, is_fixed=True)
        for name in names:
            variable = VARIABLES[name]
            self._grid.index(self._file, variable.cice_name, self._time, whole)
            self._place(variable)

    def all_moments(self) -> list[Moment]:
        """See `Scene.all_moments`."""
        return moments(self._file, 0, self._grid.num_times)

    def ocean(self, rows: slice) -> Bools:
        """Which cells of some rows are ocean: those where umask or tmask is 1."""
        mask: Bools = np.ma.filled(self._stored(self._mask, rows, True) == 1, False)
        return mask

    def coordinates(self, rows: slice) -> Places:
        """Latitude and longitude: ULAT and ULON, or TLAT and TLON."""
        return self._grid.places(rows)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _place(self, variable: Variable) -> tuple[NetcdfFile, str, str]:
        name = variable.cice_name
        return self._file, name, self._file.unit_of(name, variable.unit, variable.unit)

    def _read(self, variable: Variable, rows: slice) -> Masked:
        return self._stored(variable.cice_name, rows)

    def _stored(self, name: str, rows: slice, is_fixed: bool = False) -> Masked:
        index, _ = self._grid.index(self._file, name, self._time, rows, is_fixed=is_fixed)
        return self._file.read(name, index)


def count_times(file: NetcdfFile) -> int:
    """The number of times in a file.

    Raises:
        DataError: it has none, or more than `MOST_TIMES`.
    """
    count = file.num_times
    if not count:
        raise DataError(f"{file.path}: time: has size 0; there are no fields")
    if count > MOST_TIMES:
        raise DataError(f"{file.path}: time: has size {count}; must be at most {MOST_TIMES}")
    return count
