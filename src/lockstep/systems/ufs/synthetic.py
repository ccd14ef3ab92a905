"""Synthetic oceans, atmospheres and sea ice with a known law, in both file formats.

Ice forms where the sea is colder than an edge temperature, which falls with salinity as the
freezing point does: aice = s(-(sst - edge(sss)) / WIDTH), s the logistic function.

Everything is a pure function of (grid, time, seed). Variables that the law does not depend on have
noise of their own, so that the law's derivatives can be learned from the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.data.workers import share_out
from lockstep.errors import DataError, file_errors
from lockstep.systems.ufs.fields import (
    DEFAULT_INPUTS,
    KELVIN,
    OCEAN_MASKS,
    THICKNESS,
    VARIABLES,
    Variable,
)
from lockstep.systems.ufs.netcdf_file import new_netcdf

Floats = npt.NDArray[np.floating[Any]]
Fields = dict[str, npt.NDArray[np.float32]]

WIDTH = 0.25
"""Width of the transition from open water to ice, in °C."""

EDGE = -0.9
"""Temperature at which half of the sea is covered at salinity `SALINITY`, in °C."""

SALINITY = 34.0
"""Salinity, in psu, at which the edge temperature is `EDGE`."""

SALT_SLOPE = -0.0543
"""Change of the edge temperature with salinity, in °C/psu: that of the freezing point."""


MISSING = np.float32(-3.33477e38)
"""The number in CF files that stands for a missing value."""

NUM_LEVELS = 3
"""Levels of the atmosphere in synthetic CF files; the last is the lowest."""

_STEFAN_BOLTZMANN = 5.670374e-8
_PRESSURE_HPA = 1013.25
_NUM_WAVES = 16
_EMBEDDED_GRID = (90, 180)
_EMBEDDED_TIMES = 4
_HOURS_BETWEEN = 24
_TIME_UNIT = "hours since 2025-01-01 00:00:00"


def concentration(sst: Floats, sss: Floats) -> Floats:
    """Aice in [0, 1] from temperature in °C and salinity in psu, of any shape."""
    edge = EDGE + SALT_SLOPE * (sss - SALINITY)
    # As tanh, which does not overflow.
    return np.asarray(0.5 - 0.5 * np.tanh((sst - edge) / (2 * WIDTH)))


def true_jacobian(
    sst: Floats, sss: Floats, inputs: tuple[str, ...] = DEFAULT_INPUTS
) -> npt.NDArray[np.float64]:
    """∂aice/∂input of the law, in physical units.

    Args:
        sst: sea surface temperature in °C, [N].
        sss: sea surface salinity in psu, [N].
        inputs: short names of the inputs.

    Returns:
        Derivatives [N, len(inputs)], float64; 0 for all inputs but sst and sss.
    """
    aice = concentration(sst.astype(np.float64), sss.astype(np.float64))
    slope = -aice * (1 - aice) / WIDTH
    jacobian = np.zeros((len(aice), len(inputs)))
    if "sst" in inputs:
        jacobian[:, inputs.index("sst")] = slope
    if "sss" in inputs:
        jacobian[:, inputs.index("sss")] = -slope * SALT_SLOPE
    return jacobian


def grid(num_latitudes: int, num_longitudes: int) -> tuple[Floats, Floats]:
    """Cell centres of a regular grid.

    Args:
        num_latitudes: number of rows.
        num_longitudes: number of columns.

    Returns:
        Latitudes [num_latitudes] from south to north and longitudes [num_longitudes] from 0, both
        in degrees, float64.
    """
    latitude = -90 + (np.arange(num_latitudes) + 0.5) * 180 / num_latitudes
    longitude = (np.arange(num_longitudes) + 0.5) * 360 / num_longitudes
    return latitude, longitude


def land(latitude: Floats, longitude: Floats, seed: int) -> npt.NDArray[np.bool_]:
    """Which cells are land: the same at all times.

    Args:
        latitude: latitudes in degrees, [num_latitudes].
        longitude: longitudes in degrees, [num_longitudes].
        seed: seed of the continents' shapes.

    Returns:
        Bool [num_latitudes, num_longitudes].
    """
    return _waves(latitude, longitude, _generator(seed, "land", 0)) > 0.6


def fields(latitude: Floats, longitude: Floats, time: int, seed: int) -> Fields:
    """All variables by short name, in their units (temperatures in °C).

    Args:
        latitude: latitudes in degrees, [num_latitudes].
        longitude: longitudes in degrees, [num_longitudes].
        time: number of the time, from 0; neighbouring times share their large-scale patterns.
        seed: seed of all noise.

    Returns:
        For each variable, [num_latitudes, num_longitudes], float32.
    """

    def smooth(name: str) -> Floats:
        lasting = _waves(latitude, longitude, _generator(seed, name, 0))
        passing = _waves(latitude, longitude, _generator(seed, name, time + 1))
        return 0.8 * lasting + 0.6 * passing

    def rough(name: str) -> Floats:
        shape = (len(latitude), len(longitude))
        return _generator(seed, f"rough {name}", time + 1).uniform(-1, 1, shape)

    cosine = np.cos(np.radians(latitude))[:, None]
    by_name: dict[str, Floats] = {}
    sst = 28 * cosine**2 - 2 + 1.2 * smooth("sst") + 0.1 * rough("sst")
    by_name["sst"] = np.maximum(sst, -1.8)
    by_name["sss"] = 34 + 0.8 * np.clip(0.5 * smooth("sss") + 0.5 * rough("sss"), -1, 1)
    # The law must hold for the float32 values of the file, to the last bit.
    stored = {name: by_name[name].astype(np.float32).astype(np.float64) for name in ("sst", "sss")}
    aice = concentration(stored["sst"], stored["sss"])
    by_name["aice"] = aice
    by_name["hi"] = aice * (1.5 + 0.5 * rough("hi"))
    by_name["hs"] = by_name["hi"] * (0.2 + 0.08 * rough("hs"))
    by_name["sice"] = aice * (5 + 2 * rough("sice"))
    by_name["tair"] = by_name["sst"] - 15 * aice + 2 * smooth("tair") + 3 * rough("tair")
    by_name["tsfc"] = by_name["tair"] + 2 * rough("tsfc")
    by_name["qref"] = (0.8 + 0.1 * rough("qref")) * _saturation(by_name["tair"])
    by_name["flwdn"] = 0.8 * _STEFAN_BOLTZMANN * (by_name["tair"] + 273.15) ** 4 + 20 * rough(
        "flwdn"
    )
    by_name["fswdn"] = 450 * cosine * (0.7 + 0.3 * rough("fswdn"))
    by_name["frzmlt"] = 20 * smooth("frzmlt") - 10 * by_name["sst"].clip(max=5)
    for name, scale in (("atm", 6.0), ("ocn", 0.15)):
        for axis in "uv":
            by_name[f"{axis}{name}"] = scale * (smooth(axis + name) + 0.5 * rough(axis + name))
    for axis, wind, water in (("x", "uatm", "uocn"), ("y", "vatm", "vocn")):
        by_name[f"strair{axis}"] = 2e-3 * by_name[wind] * np.abs(by_name[wind])
        by_name[f"strocn{axis}"] = -5.0 * by_name[water] * np.abs(by_name[water])
    return {name: np.asarray(field, np.float32) for name, field in by_name.items()}


def _saturation(celsius: Floats) -> Floats:
    """Saturated mass of vapour by that of moist air, in kg/kg; Magnus's formula over water."""
    vapour = 6.112 * np.exp(17.62 * celsius / (243.12 + celsius))
    return np.asarray(0.622 * vapour / (_PRESSURE_HPA - 0.378 * vapour))


def _waves(latitude: Floats, longitude: Floats, generator: np.random.Generator) -> Floats:
    """Smooth noise of mean 0 and deviation about 1: a few long waves, periodic in longitude."""
    amplitude = generator.normal(size=_NUM_WAVES)
    zonal, meridional = generator.integers(0, 7, (2, _NUM_WAVES))
    phases = generator.uniform(0, 2 * np.pi, (2, _NUM_WAVES))
    east = np.cos(zonal[:, None] * np.radians(longitude) + phases[0][:, None])
    north = np.cos(meridional[:, None] * np.radians(latitude) + phases[1][:, None])
    total: Floats = np.einsum("k,ki,kj->ij", amplitude, north, east)
    total *= 2 / np.sqrt(_NUM_WAVES)
    return total


def _generator(seed: int, name: str, number: int) -> np.random.Generator:
    """Philox keyed by all three, so that no field depends on another's draws."""
    entropy = [seed, number, *name.encode()]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


class Snapshot(NamedTuple):
    """The fields of one time.

    Attributes:
        latitude: latitudes in degrees, [num_latitudes].
        longitude: longitudes in degrees, [num_longitudes].
        on_land: mask of land, [num_latitudes, num_longitudes].
        by_name: fields by short name, see `fields`.
        time: number of the time, from 0.
    """

    latitude: Floats
    longitude: Floats
    on_land: npt.NDArray[np.bool_]
    by_name: Fields
    time: int


def snapshot(num_latitudes: int, num_longitudes: int, time: int, seed: int) -> Snapshot:
    """The fields of one time, see `write_synthetic`."""
    axes = grid(num_latitudes, num_longitudes)
    return Snapshot(*axes, land(*axes, seed), fields(*axes, time, seed), time)


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
    written = []
    with file_errors(DataError, folder):
        folder.mkdir(parents=True, exist_ok=True)
        for time in range(num_times):
            content = snapshot(num_latitudes, num_longitudes, time, seed)
            written.append(folder / f"iceh.{time:03}.nc")
            _history(written[-1], content)
            for kind, stem in (("atmosphere", "atm"), ("ocean", "ocn")):
                written.append(folder / f"{stem}.{time:03}.nc")
                _cf_file(written[-1], kind, content)
    return written


def embedded_files(cache: Path) -> list[Path]:
    """The history files of the default data, below a folder; missing ones are written.

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
    _history(path, snapshot(num_latitudes, num_longitudes, time, seed))


def _history(path: Path, content: Snapshot) -> None:
    latitude, longitude, on_land, by_name, time = content
    with new_netcdf(path) as data:
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


def _cf_file(path: Path, kind: str, content: Snapshot) -> None:
    """Write the atmosphere's or the ocean's file of a CF pair."""
    latitude, longitude, on_land, by_name, time = content
    upper = NUM_LEVELS if kind == "atmosphere" else 1
    with new_netcdf(path) as data:
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


def _time(data: Any, time: int, dims: tuple[str, ...]) -> None:
    made = data.createVariable("time", np.float64, dims)
    made.units = _TIME_UNIT
    made[...] = np.full((1,) * len(dims), float(time * _HOURS_BETWEEN))
