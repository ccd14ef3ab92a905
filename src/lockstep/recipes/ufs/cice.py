"""CICE history files: dims (time, nj, ni), temperatures in °C, a mask that is 1 on the ocean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.errors import DataError
from lockstep.recipes.ufs.netcdf import NetcdfFile
from lockstep.recipes.ufs.scenes import Bools, Masked, Scene, check_unit, wrong_dims
from lockstep.recipes.ufs.variables import OCEAN_MASK, VARIABLES, Variable


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
            raise DataError(wrong_dims(self._file, OCEAN_MASK, "(nj, ni)"))
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
                    wrong_dims(self._file, variable.cice_name, f"({', '.join(wanted)})")
                )
            check_unit(self._file, variable.cice_name, variable.unit)

    def ocean(self, rows: slice) -> Bools:
        """Where umask is 1."""
        mask: Bools = np.ma.filled(self._file.read(OCEAN_MASK, (rows,)) == 1, False)
        return mask

    def coordinates(self, rows: slice) -> tuple[Masked, Masked]:
        """ULAT and ULON."""
        for name in ("ULAT", "ULON"):
            if tuple(self._file.dims(name)) != self._dims:
                raise DataError(wrong_dims(self._file, name, f"({', '.join(self._dims)})"))
        return self._file.read("ULAT", (rows,)), self._file.read("ULON", (rows,))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _place(self, variable: Variable) -> tuple[NetcdfFile, str, str]:
        return self._file, variable.cice_name, variable.unit

    def _read(self, variable: Variable, rows: slice) -> Masked:
        return self._file.read(variable.cice_name, (self._time, rows))
