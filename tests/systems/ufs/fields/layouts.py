"""NetCDF files as they are in the wild, and what is to become of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import netCDF4
import numpy as np

from lockstep.systems.ufs.fields import VARIABLES

NAMES = ("sst", "sss", "tair", "hi", "hs", "qref", "uatm", "aice")
"""Variables of all files. History files have `fswdn` too."""

SHAPE = (6, 8)
_LAND = (2, 3)
_MIDDLE = {
    "sst": (-1, 2), "sss": (33, 2), "tair": (-12, 8), "hi": (0.4, 0.9), "hs": (0.1, 0.2),
    "qref": (1e-3, 1e-3), "uatm": (-4, 9), "aice": (0.1, 0.8), "fswdn": (20, 90),
}  # fmt: skip


def plain(name: str, time: int) -> np.ndarray[Any, Any]:
    """What all files mean by a variable at a time, in its unit, south first: all values differ."""
    low, span = _MIDDLE[name]
    cells = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    steps = (cells * 7 + 13 * list(_MIDDLE).index(name)) % cells.size + time / 3
    return (low + span * steps / (cells.size + 2)).astype(np.float32)


def places() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Latitudes of rows and longitudes of columns, in degrees."""
    return np.linspace(-78.0, 82.0, SHAPE[0]), np.linspace(5.0, 330.0, SHAPE[1])


@dataclass(frozen=True)
class Layout:
    """How files differ from plain ones, which this is by default.

    Attributes:
        refused: pattern of the message, empty if the values are those of `plain`.
        kind: history file or CF pair.
        form: as the netCDF library names it.
        endian: of NetCDF-4 variables.
        times: number of times, in one file.
        time: where the time is: a dim, its name, one number without a dim, or nowhere.
        grid: of which history names there are.
        regular: whether history places are of rows and columns.
        curved: whether a pair's places are of cells.
        turned: whether latitudes run south.
        west: whether longitudes are from -180 to 180.
        dtype: type of all fields.
        units: `units` attributes by short name; None for none.
        stored: factor and shift from the unit of `plain` to the stored one, by short name.
        packing: type, scale_factor, add_offset by short name.
        unsigned: whether packed ones say `_Unsigned`.
        missing: how missing values are marked, at the first cell of sst.
        poked: value of sst_h or another variable at cell (1, 2), by short name, in its stored unit.
        placeless: whether the place of cell (0, 0) is missing.
        attributes: further attributes by stored name.
        twice: what there is twice: the same path, a link, the content, a time.
        levels: names of the last dim of a pair's fields; empty for none.
        clipped: how many values are clipped, by short name.
        atol: greatest difference from `plain`, relative to the span of values.
    """

    refused: str = ""
    kind: Literal["history", "pair"] = "history"
    form: str = "NETCDF4"
    endian: Literal["native", "big", "little"] = "native"
    times: int = 1
    time: str = "time"
    grid: str = "U"
    regular: bool = False
    curved: bool = False
    turned: bool = False
    west: bool = False
    dtype: str = "f4"
    units: Mapping[str, str | None] = field(default_factory=dict)
    stored: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    packing: Mapping[str, tuple[str, float, float]] = field(default_factory=dict)
    unsigned: bool = False
    missing: str = ""
    poked: Mapping[str, float] = field(default_factory=dict)
    placeless: bool = False
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    twice: str = ""
    levels: str = "dummy_surface_levels"
    clipped: Mapping[str, int] = field(default_factory=dict)
    atol: float = 1e-6


def write(layout: Layout, folder: Path) -> dict[str, list[str]]:
    """Write a layout's files; the config keys that name them."""
    if layout.kind == "pair":
        kinds = {"atmosphere": folder / "atm.nc", "ocean": folder / "ocn.nc"}
        for kind, path in kinds.items():
            _pair_file(layout, kind, path)
        return {kind: [str(path)] for kind, path in kinds.items()}
    path, other = folder / "iceh é.nc", folder / "other.nc"
    _history_file(layout, path)
    paths = [str(path)]
    if layout.twice == "path":
        paths.append(str(path))
    elif layout.twice in ("symlink", "hard link"):
        getattr(other, "symlink_to" if layout.twice == "symlink" else "hardlink_to")(path)
        paths.append(str(other))
    elif layout.twice == "content":
        other.write_bytes(path.read_bytes())
        paths.append(str(other))
    elif layout.twice == "time":
        _history_file(replace(layout, poked={"sst": 0.5}), other)
        paths.append(str(other))
    elif layout.twice == "pattern":
        paths.append(f"{folder}/iceh*.nc")
    return {"history": paths}


def _history_file(layout: Layout, path: Path) -> None:
    with netCDF4.Dataset(path, "w", format=layout.form) as data:
        lead = _times(layout, data)
        data.createDimension("nj", SHAPE[0])
        data.createDimension("ni", SHAPE[1])
        for letter in layout.grid.replace("-", ""):
            _history_grid(layout, data, letter.upper(), letter.isupper())
        for name in (*NAMES, "fswdn"):
            _field(layout, data, name, VARIABLES[name].cice_name, (*lead, "nj", "ni"), "")


def _history_grid(layout: Layout, data: Any, letter: str, has_places: bool) -> None:
    mask = np.ones(SHAPE)
    mask[_LAND] = 0
    data.createVariable(f"{letter.lower()}mask", "f4", ("nj", "ni"))[:] = _turned(layout, mask)
    latitude, longitude = _axes(layout)
    names = (f"{letter}LAT", f"{letter}LON") if has_places else ()
    dims: Any = (("nj",), ("ni",)) if layout.regular else (("nj", "ni"),) * 2
    values: Any = latitude, longitude
    if not layout.regular:
        values = np.meshgrid(latitude, longitude, indexing="ij")
    for name, of, value, unit in zip(names, dims, values, ("north", "east"), strict=False):
        made = data.createVariable(name, "f8", of, fill_value=1e30 if layout.placeless else None)
        made.units = f"degrees_{unit}"
        made[:] = value
        if layout.placeless:
            made[0, 0] = np.ma.masked


def _pair_file(layout: Layout, kind: str, path: Path) -> None:
    dims = ("nj", "ni") if layout.curved else ("latitude", "longitude")
    with netCDF4.Dataset(path, "w", format=layout.form) as data:
        lead = _times(layout, data)
        for dim, size in zip(dims, SHAPE, strict=True):
            data.createDimension(dim, size)
        data.createDimension("dummy_surface_levels", 1)
        for dim in {"levels", layout.levels} - {"", "dummy_surface_levels"}:
            data.createDimension(dim, 1)
        data.createVariable("model_levels", "i4", ("levels",))[:] = 1
        axes = _axes(layout)
        values = np.meshgrid(*axes, indexing="ij") if layout.curved else axes
        for number, name in enumerate(("latitude", "longitude")):
            made = data.createVariable(name, "f8", dims if layout.curved else dims[number])
            made.units = ("degrees_north", "degrees_east")[number]
            made[:] = values[number]
        last = (layout.levels,) if layout.levels else ()
        for name in NAMES:
            if VARIABLES[name].cf_file == kind:
                stored = "K" if name == "tair" else ""
                _field(layout, data, name, VARIABLES[name].cf_name, (*lead, *dims, *last), stored)
        if kind == "ocean":
            made = data.createVariable("sea_water_cell_thickness", "f4", (*dims, *last))
            thickness = np.full(SHAPE, 10.0)
            thickness[_LAND] = 0
            made[:] = _turned(layout, thickness).reshape(made.shape)


def _times(layout: Layout, data: Any) -> tuple[str, ...]:
    """Makes time's dim and variable; the first dims of fields."""
    days, unit = 31.0 * np.arange(layout.times) + 14, "days since 2025-01-01"
    if layout.time == "none":
        return ()
    if layout.time == "scalar":
        made = data.createVariable("time", "f8", ())
    else:
        data.createDimension(layout.time, None)
        made = data.createVariable(layout.time, "f8", (layout.time,))
    made.units = unit
    made[...] = np.zeros(layout.times) if layout.twice == "time in file" else days
    return () if layout.time == "scalar" else (layout.time,)


def _axes(layout: Layout) -> tuple[Any, Any]:
    latitude, longitude = places()
    if layout.west:
        longitude = (longitude + 180) % 360 - 180
    return latitude[:: -1 if layout.turned else 1], longitude


def _turned(layout: Layout, values: Any) -> Any:
    return values[..., ::-1, :] if layout.turned else values


def _field(
    layout: Layout, data: Any, name: str, stored_name: str, dims: tuple[str, ...], kelvin: str
) -> None:
    kind, scale, offset = layout.packing.get(name, (layout.dtype, 1.0, 0.0))
    fill = {"_FillValue": -30.0, "both": -30.0, "NaN": np.nan, "packed": -30.0}.get(layout.missing)
    if name != "sst":
        fill = None
    stored_kind = np.dtype(kind).newbyteorder({"big": ">", "little": "<"}.get(layout.endian, "="))
    made = data.createVariable(
        stored_name, stored_kind, dims, fill_value=fill, endian=layout.endian
    )
    made.set_auto_maskandscale(False)
    if layout.missing in ("missing_value", "both") and name == "sst":
        value = -31.0 if layout.missing == "both" else -30.0
        made.missing_value = np.array(value, kind)
    unit = layout.units.get(name, "K" if kelvin else VARIABLES[name].unit)
    if unit is not None:
        made.setncattr("units", unit)
    if name in layout.packing:
        made.scale_factor, made.add_offset = scale, offset
        if layout.unsigned:
            made.setncattr("_Unsigned", "true")
    for key, value in layout.attributes.get(stored_name, {}).items():
        made.setncattr(key, value)
    factor, shift = layout.stored.get(name, (1.0, 273.15 if kelvin else 0.0))
    values = np.stack([plain(name, time) for time in range(layout.times)])
    values = values.astype(np.float64) * factor + shift
    if name in layout.poked:
        values[:, 1, 2] = layout.poked[name]
    numbers = (values - offset) / scale
    if np.dtype(kind).kind in "iu":
        numbers = np.rint(numbers)
    if layout.missing and name == "sst":
        numbers[:, 0, 0] = np.nan if layout.missing in ("NaN", "unmarked NaN") else -30.0
        if layout.missing == "both":
            numbers[:, 0, 1] = -31.0
    numbers = _turned(layout, numbers)
    if layout.unsigned and name in layout.packing:
        numbers = numbers.astype("u" + kind[1:]).view(kind)
    made[...] = numbers.astype(kind).reshape(made.shape)
