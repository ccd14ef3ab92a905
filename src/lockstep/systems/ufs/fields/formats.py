"""The two file formats, read and written: CF pairs of atmosphere and ocean, CICE history files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.systems.ufs.decoding import Masked
from lockstep.systems.ufs.fields import (
    KELVIN,
    OCEAN_MASKS,
    THICKNESS,
    VARIABLES,
    Variable,
    conversion,
)
from lockstep.systems.ufs.fields.grids import (
    Coordinates,
    Grid,
    Index,
    check_same,
    check_shapes,
    wrong_dims,
)
from lockstep.systems.ufs.fields.scenes import Bools, Moment, Scene, closed_on_error, moments
from lockstep.systems.ufs.netcdf_file import NetcdfFile, new_netcdf

Floats = npt.NDArray[np.floating[Any]]

MOST_THICKNESS = 500.0
"""A cell thicker than this, in m, is not a surface cell of the ocean."""

MOST_TIMES = 100_000
"""Most times in one file: more than ten years of hours."""

_AXES = ("latitude", "longitude")
_LEVELS, _SURFACE = "levels", "dummy_surface_levels"
_ROWS_AT_A_TIME = 256

MISSING = np.float32(-3.33477e38)
"""The number in CF files that are written that stands for a missing value."""

NUM_LEVELS = 3
"""Levels of the atmosphere in CF files that are written; the last is the lowest."""

_TIME_UNIT = "hours since 2025-01-01 00:00:00"


class PairScene(Scene):
    """One time of an atmosphere and an ocean file with CF names."""

    def __init__(self, atmosphere: Path, ocean: Path, level: int | None, time: int = 0) -> None:
        """Open both.

        Args:
            atmosphere: file with the fields of the atmosphere.
            ocean: file with the fields of ocean and ice.
            level: number of the model level of upper-air fields; None is the greatest one, which is
                the lowest in height.
            time: number of the time in both files.

        Raises:
            DataError: a file is damaged, has no such level, or they are on different grids or of
                different times.
        """
        self.paths = (atmosphere, ocean)
        self._level = level
        self._time = time
        self._files: dict[str, NetcdfFile] = {}
        with closed_on_error(self):
            for kind, path in (("atmosphere", atmosphere), ("ocean", ocean)):
                self._files[kind] = NetcdfFile(path)
            self._examine()

    def _examine(self) -> None:
        files, (atmosphere, ocean) = self._files, self.paths
        self._grids = {kind: Grid.find(file, _AXES) for kind, file in files.items()}
        air, sea = self._grids.values()
        self.has_units = air.has_units and sea.has_units
        check_shapes(atmosphere, air.shape, ocean, sea.shape)
        self.shape = sea.shape
        if air.is_regular and sea.is_regular:
            whole = slice(None)
            check_same(atmosphere, air.axes(whole), ocean, sea.axes(whole))
        else:
            for start in range(0, sea.shape[0], _ROWS_AT_A_TIME):
                rows = slice(start, start + _ROWS_AT_A_TIME)
                check_same(atmosphere, air.coordinates(rows), ocean, sea.coordinates(rows))
        times = [moments(file, self._time, 1)[0] for file in files.values()]
        if times[0].key and times[1].key and times[0].key != times[1].key:
            raise DataError(
                f"{atmosphere} and {ocean}: are of different times: {times[0].text} and "
                f"{times[1].text}"
            )
        self.moment = times[0] if times[0].key else times[1]
        self.chunk_rows = max(file.chunk_rows for file in files.values())

    def check(self, names: Sequence[str]) -> None:
        """See `Scene.check`."""
        for grid in self._grids.values():
            grid.check_units()
        for name in names:
            variable = VARIABLES[name]
            if not variable.cf_file:
                raise DataError(
                    f"{self.paths[0]}: CF pairs have no {name} ({variable.cf_name}); leave it out "
                    "of inputs and outputs"
                )
            self._index(variable.cf_file, variable.cf_name, slice(None))
            self._place(variable)
        self._index("ocean", THICKNESS, slice(None))
        self._files["ocean"].unit_of(THICKNESS, "m", "m")

    def all_moments(self) -> list[Moment]:
        """See `Scene.all_moments`."""
        count = self._grids["ocean"].file.num_times
        one, other = (moments(file, 0, count) for file in self._files.values())
        return [a if a.key else b for a, b in zip(one, other, strict=True)]

    def ocean(self, rows: slice) -> Bools:
        """Which cells are ocean: those whose uppermost layer is above 0 and at most 500 m thick."""
        file = self._files["ocean"]
        thickness = file.read(THICKNESS, self._index("ocean", THICKNESS, rows))
        factor = conversion("m", file.unit_of(THICKNESS, "m", "m")).factor
        most = MOST_THICKNESS / factor
        return np.asarray(np.ma.filled((thickness > 0) & (thickness <= most), False))

    def coordinates(self, rows: slice) -> Coordinates:
        """Latitude and longitude of the ocean's file."""
        return self._grids["ocean"].coordinates(rows)

    def close(self) -> None:
        """Close both files."""
        for file in self._files.values():
            file.close()

    def _place(self, variable: Variable) -> tuple[NetcdfFile, str, str]:
        kind, name = variable.cf_file, variable.cf_name
        file = self._files[kind]
        return file, name, file.unit_of(name, variable.unit, variable.stored_unit(kind))

    def _read(self, variable: Variable, rows: slice) -> Masked:
        kind, name = variable.cf_file, variable.cf_name
        return self._files[kind].read(name, self._index(kind, name, rows))

    def _index(self, kind: str, name: str, rows: slice) -> Index:
        """The index of a field's rows in its variable."""
        file, grid = self._files[kind], self._grids[kind]
        is_fixed = name == THICKNESS
        index, last = grid.index(file, name, self._time, rows, (_LEVELS, _SURFACE), is_fixed)
        return (*index, self._level_of(file, name, last)) if last else index

    def _level_of(self, file: NetcdfFile, name: str, last: str) -> int:
        """The index of a field's level in its last dim."""
        if last == _SURFACE or file.dims(name)[last] == 1 or file is self._files["ocean"]:
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
            self._mask, *axes = self._names()
            self._grid = Grid.find(self._file, (axes[0], axes[1]))
            self.shape = self._grid.shape
            self.has_units = self._grid.has_units
            self.moment = moments(self._file, time, 1)[0]
            self.chunk_rows = self._file.chunk_rows

    def _names(self) -> tuple[str, str, str]:
        """The names of mask, latitude and longitude: of the U grid, if all are there."""
        for names in OCEAN_MASKS:
            if all(map(self._file.has, names)):
                return names
        masks = [names for names in OCEAN_MASKS if self._file.has(names[0])]
        names = masks[0] if masks else OCEAN_MASKS[0]
        for name in names:
            self._file.dims(name)  # raises for the one that is missing
        return names

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
        return moments(self._file, 0, self._file.num_times)

    def ocean(self, rows: slice) -> Bools:
        """Which cells of some rows are ocean: those where umask or tmask is 1."""
        return np.asarray(np.ma.filled(self._stored(self._mask, rows, True) == 1, False))

    def coordinates(self, rows: slice) -> Coordinates:
        """Latitude and longitude: ULAT and ULON, or TLAT and TLON."""
        return self._grid.coordinates(rows)

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


def count_times(*paths: Path) -> int:
    """The number of times in a history file, or in both files of a pair.

    Raises:
        DataError: a file is damaged, has no times or more than `MOST_TIMES`; or their numbers
            differ.
    """
    counts = []
    for path in paths:
        with closing(NetcdfFile(path)) as file:
            count = file.num_times
        if not count:
            raise DataError(f"{path}: time: has size 0; there are no fields")
        if count > MOST_TIMES:
            raise DataError(f"{path}: time: has size {count}; must be at most {MOST_TIMES}")
        counts.append(count)
    if counts[0] != counts[-1]:
        raise DataError(
            f"{paths[0]} and {paths[-1]}: have {counts[0]} and {counts[-1]} times; must have the "
            "same ones"
        )
    return counts[0]


class Snapshot(NamedTuple):
    """The fields of one time, to be written.

    Attributes:
        latitude: latitudes in degrees, [num_latitudes].
        longitude: longitudes in degrees, [num_longitudes].
        on_land: mask of land, [num_latitudes, num_longitudes].
        by_name: fields by short name, in their units (temperatures in °C).
        hours: the time, since the start of 2025.
    """

    latitude: Floats
    longitude: Floats
    on_land: Bools
    by_name: Mapping[str, npt.NDArray[np.float32]]
    hours: float


def write_history_file(path: Path, content: Snapshot) -> None:
    """Write a CICE history file of one time.

    Raises:
        OSError: it cannot be written.
        ConfigError: the netCDF4 package is not installed.
    """
    latitude, longitude, on_land, by_name, hours = content
    with new_netcdf(path) as data:
        for name, size in (("time", None), ("nj", len(latitude)), ("ni", len(longitude))):
            data.createDimension(name, size)
        _time(data, hours, ("time",))
        rows, columns = np.meshgrid(latitude, longitude, indexing="ij")
        mask, latitudes, longitudes = OCEAN_MASKS[0]
        for name, values, unit in (
            (latitudes, rows, "degrees_north"),
            (longitudes, columns, "degrees_east"),
            (mask, 1.0 - on_land, "1"),
        ):
            _put(data, name, ("nj", "ni"), values.astype(np.float32), {"units": unit})
        for variable in VARIABLES.values():
            values = np.where(on_land, np.float32(1e30), by_name[variable.name])[None]
            _put(
                data, variable.cice_name, ("time", "nj", "ni"), values,
                {"units": variable.unit, "missing_value": np.float32(1e30)}, fill=1e30,
            )  # fmt: skip


def write_cf_file(path: Path, kind: str, content: Snapshot) -> None:
    """Write the file of a CF pair that `kind` names, `atmosphere` or `ocean`; errors as above."""
    latitude, longitude, on_land, by_name, hours = content
    upper = NUM_LEVELS if kind == "atmosphere" else 1
    with new_netcdf(path) as data:
        data.Conventions = "CF-1"
        sizes = {"latitude": len(latitude), "longitude": len(longitude), "levels": upper}
        for name, size in {**sizes, "dummy_surface_levels": 1}.items():
            data.createDimension(name, size)
        _time(data, hours, ())
        _put(data, "latitude", ("latitude",), latitude, {"units": "degrees_north"})
        _put(data, "longitude", ("longitude",), longitude, {"units": "degrees_east"})
        _put(data, "model_levels", ("levels",), np.arange(1, upper + 1, dtype=np.int32), {})
        for variable in VARIABLES.values():
            if variable.cf_file == kind:
                _put_field(data, variable, kind, by_name[variable.name], on_land)
        if kind == "ocean":
            values = np.where(on_land, 0, 10).astype(np.float32)[..., None]
            dims = ("latitude", "longitude", "dummy_surface_levels")
            _put(data, THICKNESS, dims, values, {"units": "m", "missing_value": MISSING})


def _put_field(
    data: Any,
    variable: Variable,
    kind: str,
    values: npt.NDArray[np.float32],
    on_land: Bools,
) -> None:
    unit = variable.stored_unit(kind)
    stored = values + np.float32(KELVIN if unit == "K" else 0)
    if kind == "ocean":
        stored = np.where(on_land, MISSING, stored)
    last = "dummy_surface_levels"
    field = stored[..., None]
    if kind == "atmosphere" and variable.name != "tsfc":
        last = "levels"
        # Higher levels have a weaker field, since the law is about the lowest level only.
        field = np.stack([stored * (0.5 + 0.5 * k / NUM_LEVELS) for k in range(NUM_LEVELS)], -1)
        field[..., -1] = stored
    attributes = {"units": unit, "missing_value": MISSING}
    _put(data, variable.cf_name, ("latitude", "longitude", last), field, attributes)


def _put(
    data: Any,
    name: str,
    dims: tuple[str, ...],
    values: npt.NDArray[Any],
    attributes: Mapping[str, Any],
    fill: float | None = None,
) -> None:
    made = data.createVariable(name, values.dtype, dims, fill_value=fill)
    made.setncatts(attributes)
    made[...] = values


def _time(data: Any, hours: float, dims: tuple[str, ...]) -> None:
    made = data.createVariable("time", np.float64, dims)
    made.units = _TIME_UNIT
    made[...] = np.full((1,) * len(dims), hours)
