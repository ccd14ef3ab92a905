"""CF pairs: an atmosphere and an ocean file, dims (latitude, longitude, levels), air in K."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.errors import DataError
from lockstep.recipes.ufs.fields.decode import Masked
from lockstep.recipes.ufs.fields.netcdf import NetcdfFile
from lockstep.recipes.ufs.fields.places import Places, check_same
from lockstep.recipes.ufs.fields.scenes import (
    Bools,
    Scene,
    check_shape,
    check_unit,
    closed_on_error,
    wrong_dims,
)
from lockstep.recipes.ufs.fields.variables import THICKNESS, VARIABLES, Variable

MOST_THICKNESS = 500.0
"""A cell thicker than this, in m, is not a surface cell of the ocean."""

_AXES = ("latitude", "longitude")


class PairScene(Scene):
    """An atmosphere and an ocean file with CF names: dims (latitude, longitude, levels)."""

    def __init__(self, atmosphere: Path, ocean: Path, level: int | None) -> None:
        """Open both.

        Args:
            atmosphere: file with the fields of the atmosphere.
            ocean: file with the fields of ocean and ice.
            level: number of the model level of upper-air fields; None is the greatest one, which is
                the lowest in height.

        Raises:
            DataError: a file is damaged, has no such level, or they are on different grids or of
                different times.
        """
        self.paths = (atmosphere, ocean)
        self._level = level
        self._files: dict[str, NetcdfFile] = {}
        with closed_on_error(self):
            for kind, path in (("atmosphere", atmosphere), ("ocean", ocean)):
                self._files[kind] = NetcdfFile(path)
            self._examine()

    def _examine(self) -> None:
        files, (atmosphere, ocean) = self._files, self.paths
        axes = {kind: _axes(file) for kind, file in files.items()}
        self.says_degrees = all(f.unit(n) is not None for f in files.values() for n in _AXES)
        sizes = {kind: tuple(len(axis) for axis in pair) for kind, pair in axes.items()}
        if sizes["atmosphere"] != sizes["ocean"]:
            shown = " and ".join(f"{a}x{b}" for a, b in sizes.values())
            raise DataError(f"{atmosphere} and {ocean}: are on different grids: {shown}")
        check_same(atmosphere, axes["atmosphere"], ocean, axes["ocean"])
        self._latitude, self._longitude = axes["ocean"]
        shape = sizes["ocean"][0], sizes["ocean"][1]
        self.shape = check_shape(files["ocean"], "latitude, longitude", shape)
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
        for file in self._files.values():
            for axis, degrees in zip(_AXES, ("degrees_north", "degrees_east"), strict=True):
                check_unit(file, axis, degrees)
        for name in names:
            variable = VARIABLES[name]
            if not variable.cf_file:
                raise DataError(
                    f"{self.paths[0]}: CF pairs have no {name} ({variable.cf_name}); leave it out "
                    "of inputs and outputs"
                )
            file, stored_name, unit = self._place(variable)
            self._index(file, stored_name)
            check_unit(file, stored_name, unit)
        self._index(self._files["ocean"], THICKNESS)

    def ocean(self, rows: slice) -> Bools:
        """Which cells are ocean: those whose uppermost layer is above 0 and at most 500 m thick."""
        file = self._files["ocean"]
        thickness = file.read(THICKNESS, (rows, slice(None), self._index(file, THICKNESS)))
        is_ocean: Bools = np.ma.filled((thickness > 0) & (thickness <= MOST_THICKNESS), False)
        return is_ocean

    def coordinates(self, rows: slice) -> Places:
        """Latitude and longitude: the axes, expanded to all cells."""
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
            raise DataError(wrong_dims(file, name, wanted))
        if last == ("dummy_surface_levels",) or dims["levels"] == 1 or file is self._files["ocean"]:
            return 0
        if tuple(file.dims("model_levels")) != ("levels",):
            raise DataError(wrong_dims(file, "model_levels", "(levels)"))
        levels = file.read("model_levels", (slice(None),))
        if np.ma.is_masked(levels) or not np.isfinite(levels.data).all():
            raise DataError(f"{file.path}: model_levels: has missing values; must be numbers")
        numbers = [int(n) for n in levels]
        if self._level is None:
            return int(np.argmax(numbers))
        if self._level not in numbers:
            raise DataError(
                f"{file.path}: model_levels: has no level={self._level}; it has {min(numbers)} to "
                f"{max(numbers)}"
            )
        return numbers.index(self._level)


def _axes(file: NetcdfFile) -> Places:
    """Latitude and longitude of a CF file."""
    for name in _AXES:
        if tuple(file.dims(name)) != (name,):
            raise DataError(wrong_dims(file, name, f"({name})"))
    latitude, longitude = (file.read(name, (slice(None),)) for name in _AXES)
    for name, axis in zip(_AXES, (latitude, longitude), strict=True):
        if np.ma.is_masked(axis) or not np.isfinite(axis.data).all():
            raise DataError(f"{file.path}: {name}: has missing values; must be degrees")
    return latitude, longitude
