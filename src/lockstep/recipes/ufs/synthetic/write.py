"""Writing synthetic files in the two formats: CICE history, and the CF pair."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.data.sharing import share_out
from lockstep.errors import DataError
from lockstep.recipes.ufs.fields.netcdf.file import netcdf4
from lockstep.recipes.ufs.fields.units import KELVIN
from lockstep.recipes.ufs.fields.variables import OCEAN_MASKS, THICKNESS, VARIABLES, Variable
from lockstep.recipes.ufs.synthetic.fields import Fields, fields, grid, land

MISSING = np.float32(-3.33477e38)
"""The number in CF files that stands for a missing value."""

NUM_LEVELS = 3
"""Levels of the atmosphere in synthetic CF files; the last is the lowest."""

_EMBEDDED_GRID = (90, 180)
_EMBEDDED_TIMES = 4
_HOURS_BETWEEN = 24
_TIME_UNIT = "hours since 2025-01-01 00:00:00"


def write_synthetic(
    folder: Path,
    num_latitudes: int,
    num_longitudes: int,
    num_times: int,
    seed: int = 0,
) -> list[Path]:
    """Write files of all times in both formats, `iceh.000.nc`, `atm.000.nc`, `ocn.000.nc`, ….

    Args:
        folder: folder to write to; created if it is not there.
        num_latitudes: number of the grid's rows, at least 1.
        num_longitudes: number of the grid's columns, at least 1.
        num_times: number of times, at least 1; each has a history file and a CF pair.
        seed: seed of the noise, at least 0.

    Returns:
        The paths that were written.

    Raises:
        DataError: a number is too small, or the folder cannot be written.
        ConfigError: the netCDF4 package is not installed.
    """
    for name, value in {
        "latitudes": num_latitudes, "longitudes": num_longitudes, "times": num_times,
    }.items():  # fmt: skip
        if value < 1:
            raise DataError(f"number of {name} {value}: must be at least 1")
    if seed < 0:
        raise DataError(f"seed {seed}: must be at least 0")
    latitude, longitude = grid(num_latitudes, num_longitudes)
    on_land = land(latitude, longitude, seed)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for time in range(num_times):
            by_name = fields(latitude, longitude, time, seed)
            written.append(folder / f"iceh.{time:03}.nc")
            _history(written[-1], latitude, longitude, on_land, by_name, time)
            for kind, stem in (("atmosphere", "atm"), ("ocean", "ocn")):
                written.append(folder / f"{stem}.{time:03}.nc")
                _cf_file(written[-1], kind, latitude, longitude, on_land, by_name, time)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return written


def embedded_files(cache: Path) -> list[Path]:
    """The history files of the default data, below a folder; written if they are not there.

    Raises:
        DataError: the folder cannot be written.
        ConfigError: the netCDF4 package is not installed.
    """

    def make(time: int, path: Path) -> None:
        write_history(path, *_EMBEDDED_GRID, time)

    names = [f"iceh.{time:03}.nc" for time in range(_EMBEDDED_TIMES)]
    return share_out(cache / "synthetic-1", names, make)


def write_history(
    path: Path, num_latitudes: int, num_longitudes: int, time: int, seed: int = 0
) -> None:
    """Write a CICE history file of one time; see `write_synthetic`.

    Raises:
        OSError: it cannot be written.
        ConfigError: the netCDF4 package is not installed.
    """
    latitude, longitude = grid(num_latitudes, num_longitudes)
    by_name = fields(latitude, longitude, time, seed)
    _history(path, latitude, longitude, land(latitude, longitude, seed), by_name, time)


def _history(
    path: Path,
    latitude: npt.NDArray[Any],
    longitude: npt.NDArray[Any],
    on_land: npt.NDArray[np.bool_],
    by_name: Fields,
    time: int,
) -> None:
    """A CICE history file of one time."""
    with _new(path) as data:
        for name, size in (("time", None), ("nj", len(latitude)), ("ni", len(longitude))):
            data.createDimension(name, size)
        _time(data, time, ("time",))
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


def _cf_file(
    path: Path,
    kind: str,
    latitude: npt.NDArray[Any],
    longitude: npt.NDArray[Any],
    on_land: npt.NDArray[np.bool_],
    by_name: Fields,
    time: int,
) -> None:
    """The atmosphere's or the ocean's file of a CF pair."""
    upper = NUM_LEVELS if kind == "atmosphere" else 1
    with _new(path) as data:
        data.Conventions = "CF-1"
        sizes = {"latitude": len(latitude), "longitude": len(longitude), "levels": upper}
        for name, size in {**sizes, "dummy_surface_levels": 1}.items():
            data.createDimension(name, size)
        _time(data, time, ())
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
    on_land: npt.NDArray[np.bool_],
) -> None:
    unit = variable.stored_unit(kind)
    stored = values + np.float32(KELVIN if unit == "K" else 0)
    if kind == "ocean":
        stored = np.where(on_land, MISSING, stored)
    last = "dummy_surface_levels"
    field = stored[..., None]
    if kind == "atmosphere" and variable.name != "tsfc":
        last = "levels"
        # Aloft, the same field thinned out: only the lowest level is what the law is about.
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


def _time(data: Any, time: int, dims: tuple[str, ...]) -> None:
    made = data.createVariable("time", np.float64, dims)
    made.units = _TIME_UNIT
    made[...] = np.full((1,) * len(dims), float(time * _HOURS_BETWEEN))


@contextmanager
def _new(path: Path) -> Iterator[Any]:
    """A NetCDF file that takes its name once it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        data = netcdf4().Dataset(temporary, "w", format="NETCDF4")
        try:
            yield data
        finally:
            data.close()
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, RuntimeError):  # what the library makes of a full disk
            raise OSError(f"{path}: {error}") from error
        raise
