"""Files as they are in the wild are read as the plain file is, or refused for what they are."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.systems.ufs.fields.layouts import NAMES, SHAPE, Layout, places, plain, write

from lockstep.errors import DataError
from lockstep.systems.ufs.fields.bands import Selection, clipped, keep_bands
from lockstep.systems.ufs.fields.rows import gather
from lockstep.systems.ufs.fields.sources import find_sources

PACKED = {"sst": ("i2", 0.001, -2.0), "aice": ("i2", 1e-4, 0.0)}
KELVIN = {"sst": (1.0, 273.15), "tair": (1.0, 273.15)}
CELL = r"in 1 ocean cells, first in row 1, column 2 \(46.00°S, 97.86°E\); "

LAYOUTS = {
    "plain": Layout(),
    "no time dim": Layout(time="none"),
    "scalar time": Layout(time="scalar"),
    "Time": Layout(time="Time"),
    "several times": Layout(times=3),
    "T grid": Layout(grid="T"),
    "both grids": Layout(grid="TU"),
    "T grid and a mask of the other": Layout(grid="Tu"),
    "T mask without T places": Layout(grid="t", refused="has no variable TLAT"),
    "no mask": Layout(grid="-", refused="has no variable umask"),
    "places of rows and columns": Layout(regular=True),
    "latitudes run south": Layout(turned=True),
    "longitudes from -180": Layout(west=True),
    "both turned": Layout(turned=True, west=True, grid="T"),
    "missing place": Layout(placeless=True),
    "float64": Layout(dtype="f8"),
    "big-endian NetCDF-4": Layout(endian="big"),
    "big-endian float64": Layout(endian="big", dtype="f8"),
    "little-endian": Layout(endian="little"),
    "classic": Layout(form="NETCDF3_CLASSIC"),
    "64-bit offset": Layout(form="NETCDF3_64BIT_OFFSET", times=2),
    "64-bit data": Layout(form="NETCDF3_64BIT_DATA", time="scalar"),
    "classic model in HDF5": Layout(form="NETCDF4_CLASSIC"),
    "packed in int16": Layout(packing=PACKED, atol=1e-3),
    "packed in int16, big-endian": Layout(packing=PACKED, endian="big", atol=1e-3),
    "packed in int32": Layout(packing={"sst": ("i4", 1e-6, -2.0)}, atol=1e-5),
    "packed in bytes": Layout(packing={"sst": ("u1", 0.01, -1.5)}, atol=1e-2),
    "packed as unsigned": Layout(packing={"sst": ("i2", 1e-4, -2.0)}, unsigned=True, atol=1e-3),
    "packed as unsigned, big-endian": Layout(
        packing={"sst": ("i2", 1e-4, -2.0)}, unsigned=True, endian="big", atol=1e-3
    ),
    "packed in K": Layout(
        packing={"sst": ("i2", 1e-3, 273.15)}, stored=KELVIN,
        units={"sst": "K", "tair": "K"}, atol=1e-3,
    ),
    "_FillValue": Layout(missing="_FillValue"),
    "missing_value": Layout(missing="missing_value"),
    "_FillValue and missing_value": Layout(missing="both"),
    "NaN as _FillValue": Layout(missing="NaN"),
    "NaN without an attribute": Layout(
        missing="unmarked NaN",
        refused=r"sst_h: NaN or infinite in 1 ocean cells, first in row 0, column 0 "
        r"\(78.00°S, 5.00°E\); mark missing values",
    ),
    "degrees with a sign": Layout(units={"sst": "°C", "tair": "° C"}),
    "degrees in words": Layout(units={"sst": "degrees C", "tair": "Degrees_Celsius"}),
    "deg_C and Celsius": Layout(units={"sst": "deg_C", "tair": "Celsius"}),
    "signs in powers": Layout(units={"uatm": "m s⁻¹", "fswdn": "W m−2", "qref": "kg·kg-1"}),
    "dots, stars and blanks": Layout(units={"uatm": " M.S**-1 ", "fswdn": "W/m²"}),
    "no units": Layout(units=dict.fromkeys(NAMES)),
    "K": Layout(stored=KELVIN, units={"sst": "K", "tair": "Kelvin"}),
    "K without units": Layout(
        stored=KELVIN, units={"sst": None},
        refused=r"sst_h: 27\d\.\d+ degC is outside -5 to 45, .* it seems to be in K: say so",
    ),
    "%": Layout(stored={"aice": (100.0, 0.0)}, units={"aice": "%"}),
    "% in words": Layout(stored={"aice": (100.0, 0.0)}, units={"aice": "Percent"}),
    "% without units": Layout(
        stored={"aice": (100.0, 0.0)}, units={"aice": None},
        refused=r"aice_h: \S+ is outside 0 to 1, .* it seems to be in %: say so",
    ),
    "cm": Layout(stored={"hs": (100.0, 0.0), "hi": (1000.0, 0.0)}, units={"hs": "cm", "hi": "mm"}),
    "cm/s and g/kg": Layout(
        stored={"uatm": (100.0, 0.0), "qref": (1e3, 0.0)}, units={"uatm": "cm s-1", "qref": "g/kg"}
    ),
    "mass of snow": Layout(
        units={"hs": "kg/m²"}, refused=r"hs_h: units='kg/m²': must be m or cm or mm; convert"
    ),
    "Fahrenheit": Layout(units={"tair": "degF"}, refused="Tair_h: units='degF': must be degC or K"),
    "other quantity": Layout(units={"aice": "m"}, refused="aice_h: units='m': must be 1 or %"),
    "night": Layout(poked={"fswdn": -0.02}, clipped={"fswdn": 1}),
    "dark": Layout(
        poked={"fswdn": -20.0},
        refused=rf"fswdn_h: -20 W/m\^2 is outside 0 to 1500, {CELL}the unit or the missing",
    ),
    "a little less than no ice": Layout(poked={"aice": -2e-5}, clipped={"aice": 1}),
    "a little more than all ice": Layout(
        stored={"aice": (100.0, 0.0)}, units={"aice": "%"}, poked={"aice": 100.004},
        clipped={"aice": 1},
    ),
    "less than no ice": Layout(poked={"aice": -0.2}, refused=rf"aice_h: -0.2 is outside .*{CELL}"),
    "infinite": Layout(poked={"hi": np.inf}, refused=rf"hi_h: NaN or infinite {CELL}"),
    "the same path twice": Layout(twice="path", refused="are one file; give it once"),
    "a name and a pattern": Layout(twice="pattern", refused="are one file; give it once"),
    "a link": Layout(twice="symlink", refused="are one file; give it once"),
    "a hard link": Layout(twice="hard link", refused="are one file; give it once"),
    "a copy": Layout(twice="content", refused=r"time: 14 days since .* is that of .*iceh é.nc too"),
    "a copy without times": Layout(
        twice="content", time="none", refused="other.nc: has the same content as .*iceh é.nc; give"
    ),
    "another file of the time": Layout(twice="time", refused="other.nc: time: 14 days .*; give"),
    "a time twice in a file": Layout(
        times=2, twice="time in file", refused=r"time 1 of the file\) is that of time 0 of "
    ),
    "pair": Layout(kind="pair"),
    "pair without levels": Layout(kind="pair", levels=""),
    "pair with one level": Layout(kind="pair", levels="levels"),
    "pair with scalar time": Layout(kind="pair", time="scalar"),
    "pair without time": Layout(kind="pair", time="none"),
    "pair of several times": Layout(kind="pair", times=3),
    "pair with places of cells": Layout(kind="pair", curved=True, times=2),
    "pair, turned": Layout(kind="pair", turned=True, west=True),
    "pair in °C": Layout(kind="pair", stored={"tair": (1.0, 0.0)}, units={"tair": "°C"}),
    "pair, classic, packed": Layout(
        kind="pair", form="NETCDF3_64BIT_OFFSET", packing=PACKED, atol=1e-3
    ),
    "pair in % and cm": Layout(
        kind="pair", stored={"aice": (100.0, 0.0), "hs": (100.0, 0.0)},
        units={"aice": "%", "hs": "cm"},
    ),
    "pair, other unit": Layout(
        kind="pair", units={"tair": "degF"}, refused="air_temperature: units='degF': must be degC"
    ),
    "pair, other level dim": Layout(
        kind="pair", levels="levels_of_mine",
        refused=r"has dims \(.*\); must be \(time, latitude, longitude, levels or dummy",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, tmp_path: Path, cache: Path) -> None:
    layout = LAYOUTS[name]
    keys = write(layout, tmp_path)
    names = (*NAMES, "fswdn") if layout.kind == "history" else NAMES

    def read() -> list[Path]:
        given = (keys.get(key, []) for key in ("history", "atmosphere", "ocean"))
        return keep_bands(find_sources(*given, None), Selection(names, "both"), cache)

    if layout.refused:
        with pytest.raises(DataError, match=layout.refused) as caught:
            read()
        assert str(tmp_path) in str(caught.value)
        return
    bands = read()
    assert clipped(bands, names) == layout.clipped
    rows = gather(bands, 10**9)
    gone = {"_FillValue": 1, "missing_value": 1, "NaN": 1, "both": 2}.get(layout.missing, 0)
    assert len(rows) == layout.times * (np.prod(SHAPE) - 1 - gone - layout.placeless)
    latitude, longitude = places()
    row = np.abs(rows.place[:, :1] - latitude).argmin(1)
    column = np.abs(rows.place[:, 1:] % 360 - longitude).argmin(1)
    assert np.allclose(rows.place[:, 0], latitude[row])
    assert np.allclose(rows.place[:, 1] % 360, longitude[column])
    for number, short in enumerate(names):
        wanted = np.stack([plain(short, time) for time in range(layout.times)])
        if short in layout.poked:
            limit = 1 if layout.poked[short] > 1 else 0
            wanted[:, 1, 2] = limit
        found = rows.values[:, number]
        span = np.abs(wanted).max()
        gap = np.abs(found - wanted[rows.time, row, column]).max()
        in_kelvin = short in layout.stored or layout.kind == "pair"
        rounding = 4e-5 if short in ("sst", "tair") and in_kelvin else 0  # of float32 about 273
        assert gap <= layout.atol * span + rounding, short


def test_there_are_enough_of_them() -> None:
    assert len(LAYOUTS) >= 40
    assert sum(bool(layout.refused) for layout in LAYOUTS.values()) >= 15
    assert all(re.compile(layout.refused) for layout in LAYOUTS.values())
