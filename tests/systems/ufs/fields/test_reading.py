"""Reading both formats: what is read is what was written, and nothing wrong is believed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
from tests.systems.ufs.conftest import NUM_LATITUDES, NUM_LONGITUDES, NUM_TIMES
from tests.systems.ufs.hostile_files import good

from lockstep.errors import ConfigError, DataError
from lockstep.systems.ufs import synthetic as write
from lockstep.systems.ufs.fields import DEFAULT_INPUTS, bands, formats, scenes
from lockstep.systems.ufs.fields.bands import Band, Selection, keep_bands
from lockstep.systems.ufs.fields.rows import Rows, gather
from lockstep.systems.ufs.fields.scenes import Scene
from lockstep.systems.ufs.fields.sources import Source, check_sources, find_sources
from lockstep.systems.ufs.synthetic import fields, grid, land

ALL = (*DEFAULT_INPUTS, "aice")
IN_PAIRS = tuple(name for name in ALL if name not in ("flwdn", "fswdn"))


def history(folder: Path) -> list[Source]:
    return find_sources([f"{folder}/iceh.*.nc"], [], [], None)


def pairs(folder: Path, level: int | None = None) -> list[Source]:
    return find_sources([], [f"{folder}/atm.*.nc"], [f"{folder}/ocn.*.nc"], level)


def rows(sources: list[Source], selection: Selection, cache: Path) -> Rows:
    return gather(keep_bands(sources, selection, cache), 10**9)


@pytest.fixture
def changed(files: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies of the first time's files, one of them changed; the folder they are in."""

    def make(name: str, change: Callable[[Any], None]) -> Path:
        folder = tmp_path / "changed"
        folder.mkdir()
        for path in files.glob("*.000.nc"):
            shutil.copy(path, folder)
        with netCDF4.Dataset(folder / name, "a") as data:
            change(data)
        return folder

    return make


@pytest.mark.parametrize("kind", ["history", "pairs"])
def test_rows_hold_what_was_written(kind: str, files: Path, cache: Path) -> None:
    names = ALL if kind == "history" else IN_PAIRS
    sources = history(files) if kind == "history" else pairs(files)
    found = rows(sources, Selection(names, "both"), cache)
    latitude, longitude = grid(NUM_LATITUDES, NUM_LONGITUDES)
    ocean = ~land(latitude, longitude, 0).reshape(-1)
    assert len(found) == NUM_TIMES * ocean.sum()
    for time in range(NUM_TIMES):
        here = found.take(found.time == time)
        assert np.array_equal(here.cell, np.flatnonzero(ocean))
        written = fields(latitude, longitude, time, 0)
        for column, name in zip(here.values.T, names, strict=True):
            # Kelvin and back costs a rounding.
            assert np.allclose(column, written[name].reshape(-1)[ocean], atol=3e-5), name
    row, column = np.divmod(found.cell, NUM_LONGITUDES)
    assert np.allclose(found.place[:, 0], latitude[row])
    assert np.allclose(found.place[:, 1], longitude[column])


@pytest.mark.parametrize("find", [history, pairs])
def test_land_is_what_is_not_ocean(find: Callable[[Path], list[Source]], files: Path) -> None:
    latitude, longitude = grid(NUM_LATITUDES, NUM_LONGITUDES)
    row, column = np.nonzero(land(latitude, longitude, 0))
    expected = np.stack([latitude[row], longitude[column]], axis=1)
    scene = find(files)[0].open()
    assert np.allclose(scene.land(), expected)
    some = scene.land(most=NUM_LATITUDES * NUM_LONGITUDES // 9)
    scene.close()
    assert 0 < len(some) < len(expected) / 4
    assert {*map(tuple, some.round(3))} <= {*map(tuple, expected.astype(np.float32).round(3))}


class Turned(Scene):
    """A regular grid whose poles have been turned to the equator, places missing here and there."""

    def __init__(self, missing: int) -> None:
        self.shape = (90, 180)
        latitude, longitude = np.meshgrid(*map(np.radians, grid(90, 180)), indexing="ij")
        self.cosine = np.cos(latitude)
        x, y, z = self.cosine * np.cos(longitude), self.cosine * np.sin(longitude), np.sin(latitude)
        mask = np.arange(x.size).reshape(x.shape) < missing
        self._places = [
            np.ma.masked_array(np.degrees(a), mask) for a in (np.arcsin(y), np.arctan2(x, z))
        ]

    def coordinates(self, rows: slice) -> Any:
        return tuple(a[rows] for a in self._places)

    check = ocean = close = all_moments = _place = _read = None


@pytest.mark.parametrize("missing", [0, 7])
def test_areas_on_a_curvilinear_grid(missing: int) -> None:
    scene = Turned(missing)
    area = scene.areas().reshape(scene.shape)
    whole = np.s_[3:-1, 1:-1]  # at its ends, a grid has one neighbour only
    ratio = area[whole] / scene.cosine[whole]
    assert np.ptp(ratio) < 1e-6 * ratio.mean()
    assert np.isfinite(area[1:]).all()


def test_formats_give_the_same_rows(files: Path, cache: Path) -> None:
    one = rows(history(files), Selection(IN_PAIRS), cache)
    other = rows(pairs(files), Selection(IN_PAIRS), cache)
    assert np.array_equal(one.cell, other.cell)
    assert np.allclose(one.values, other.values, atol=3e-5)


def test_the_lowest_level_is_taken_unless_another_is_asked_for(files: Path, cache: Path) -> None:
    selection = Selection(("uatm", "tsfc", "aice"))
    default, low, high = (rows(pairs(files, n), selection, cache) for n in (None, 3, 1))
    assert np.array_equal(default.values, low.values)
    assert not np.allclose(low.values[:, 0], high.values[:, 0])
    assert np.array_equal(low.values[:, 1], high.values[:, 1])  # the surface has no levels
    with pytest.raises(DataError, match=r"atm.000.nc: model_levels: has no level=9; it has 1 to 3"):
        rows(pairs(files, 9), selection, cache)


def test_modes_share_the_ocean_between_them(files: Path, cache: Path) -> None:
    count = {
        mode: len(rows(history(files), Selection(ALL, mode), cache))
        for mode in ("sea_ice", "ocean", "both")
    }
    assert count["sea_ice"] > 100
    assert count["ocean"] > 100
    assert count["sea_ice"] + count["ocean"] == count["both"]


@pytest.mark.parametrize(
    "cells", [pytest.param(NUM_LONGITUDES, marks=pytest.mark.slow), 5 * NUM_LONGITUDES]
)
def test_bands_do_not_matter(
    cells: int, files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows(history(files), Selection(ALL), cache)
    for module in (bands, scenes):
        monkeypatch.setattr(module, "BAND_CELLS", cells)
    monkeypatch.setattr(scenes, "_MOST_CHUNKED", 0)
    cut = rows(history(files), Selection(ALL), cache)
    assert all(np.array_equal(getattr(whole, n), getattr(cut, n)) for n in vars(whole))
    assert len(list(cache.glob("rows-*/band-*"))) > 2 * NUM_TIMES


def test_thinning_keeps_a_part_of_every_region(files: Path, cache: Path) -> None:
    whole = rows(history(files), Selection(ALL, "both"), cache)
    thin = rows(history(files), Selection(ALL, "both", thin_fraction=0.25), cache)
    assert len(thin) == pytest.approx(len(whole) / 4, rel=0.1)
    for south, north in ((-90, -50), (-50, 50), (50, 90)):
        part = [((r.place[:, 0] > south) & (r.place[:, 0] < north)).sum() for r in (thin, whole)]
        assert part[0] == pytest.approx(part[1] / 4, rel=0.25)


def test_at_most_so_many_rows_are_drawn_from_everywhere(files: Path, cache: Path) -> None:
    source, selection = history(files), Selection(ALL, "both")
    some = gather(keep_bands(source, selection, cache), 500)
    assert len(some) == 500
    assert set(some.time) == set(range(NUM_TIMES))
    assert (some.place[:, 0] > 66).any()
    assert (some.place[:, 0] < -60).any()
    assert np.array_equal(np.lexsort((some.cell, some.time)), np.arange(500))


def test_each_band_is_read_once(files: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = bands.read_band

    def counting(scene: Any, number: int, *rest: Any) -> Band:
        read.append(number)
        return original(scene, number, *rest)

    monkeypatch.setattr(bands, "read_band", counting)
    for _ in range(2):
        rows(history(files), Selection(ALL), cache)
    assert read == list(range(NUM_TIMES))
    (files / "iceh.000.nc").touch()  # another file, for all that is known
    rows(history(files), Selection(ALL), cache)
    assert read == list(range(NUM_TIMES)) * 2


def test_points_that_lack_a_value_are_left_out(changed: Callable[..., Path], cache: Path) -> None:
    latitude, longitude = grid(NUM_LATITUDES, NUM_LONGITUDES)
    ocean = ~land(latitude, longitude, 0)

    def change(data: Any) -> None:
        values = data["sea_water_salinity"][:]
        values[:, :10] = np.ma.masked
        data["sea_water_salinity"][:] = values

    found = rows(pairs(changed("ocn.000.nc", change)), Selection(IN_PAIRS, "both"), cache)
    assert len(found) == ocean[:, 10:].sum()
    assert found.values.min() > -1000


def test_a_missing_value_of_another_precision_is_missing(
    changed: Callable[..., Path], cache: Path
) -> None:
    def change(data: Any) -> None:
        for variable in data.variables.values():
            if "missing_value" in variable.ncattrs():
                variable.missing_value = np.float64(-3.33477e38)

    with pytest.warns(UserWarning, match="cannot be safely cast"):
        folder = changed("ocn.000.nc", change)
    with netCDF4.Dataset(folder / "ocn.000.nc") as data:
        assert data["sea_water_salinity"].missing_value.dtype == np.float64
    found = rows(pairs(folder), Selection(IN_PAIRS, "both"), cache)
    assert len(found) == (~land(*grid(NUM_LATITUDES, NUM_LONGITUDES), 0)).sum()


def test_a_file_without_times(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "none.nc", "w") as data:
        data.createDimension("time", None)
    with pytest.raises(DataError, match=r"none.nc: time: has size 0"):
        find_sources([str(tmp_path / "none.nc")], [], [], None)


def poke(name: str, value: float, where: Any = ...) -> Callable[[Any], None]:
    """Sets values of a variable."""

    def change(data: Any) -> None:
        data[name][where] = value

    return change


def rename(old: str, new: str) -> Callable[[Any], None]:
    return lambda data: data.renameVariable(old, new)


def attribute(name: str, key: str, value: Any) -> Callable[[Any], None]:
    return lambda data: data[name].setncattr(key, value)


def kelvin(name: str) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        data[name][:] = data[name][:] + 273.15

    return change


def radians(*names: str) -> Callable[[Any], None]:
    """Has places in radians, and does not say so."""

    def change(data: Any) -> None:
        for name in names:
            data[name][:] = np.radians(data[name][:])
            data[name].delncattr("units")

    return change


def turn(name: str) -> Callable[[Any], None]:
    """Replaces a variable by one with turned dims."""

    def change(data: Any) -> None:
        data.renameVariable(name, "old")
        data.createVariable(name, "f4", data["old"].dimensions[::-1])

    return change


MISTAKES = {
    "missing": (
        "iceh.000.nc", rename("sst_h", "sst_hh"),
        r"iceh.000.nc: has no variable sst_h; the nearest is sst_hh \(it has .*sss_h",
    ),
    "missing in a pair": (
        "ocn.000.nc", rename("sea_ice_salinity", "salinity_of_ice"),
        r"ocn.000.nc: has no variable sea_ice_salinity; the nearest is",
    ),
    "dims": (
        "iceh.000.nc", turn("hi_h"),
        r"hi_h: has dims \(ni=48, nj=36, time=1\); must be \(time, nj, ni\)",
    ),
    "dims of a pair": (
        "atm.000.nc", turn("eastward_wind"),
        r"eastward_wind: has dims \(levels=3, .*\); must be \(latitude, longitude, levels or",
    ),
    "kelvin by value": (
        "iceh.000.nc", kelvin("sst_h"), r"sst_h: \d+\.\d+ degC is outside .*to be in K",
    ),
    "kelvin by unit": (
        "iceh.000.nc", attribute("sst_h", "units", "K"), 
        r"sst_h: -27\d.* degC is outside .* it seems to be in degC: say so",
    ),
    "unknown unit": (
        "iceh.000.nc", attribute("hs_h", "units", "kg m-2"),
        r"hs_h: units='kg m-2': must be m or cm or mm; convert the variable, or mend",
    ),
    "range": (
        "iceh.000.nc", poke("aice_h", 95.0),
        r"aice_h: 95 is outside 0 to 1, in \d+ ocean cells, first in row 0, column 0 "
        r"\(87.50°S, 3.75°E\); it seems to be in %",
    ),
    "all land": ("iceh.000.nc", poke("umask", 0), r"all points are masked .*look at umask"),
    "all missing": (
        "iceh.000.nc", poke("sss_h", 1e30), r"all points are masked .*the missing values",
    ),
    "no ice": ("iceh.000.nc", poke("aice_h", 0), r"all points are masked .*mask_mode=sea_ice"),
    "NaN": ("iceh.000.nc", poke("hs_h", np.nan), r"hs_h: NaN or infinite in \d+ ocean cells"),
    "grids": (
        "ocn.000.nc", poke("longitude", 7.0, 3), r"on different grids: longitude differs by up",
    ),
    "radians by unit": (
        "iceh.000.nc", attribute("ULAT", "units", "radians"),
        r"ULAT: units='radians': must be degrees_north",
    ),
    "radians by value": (
        "iceh.000.nc", radians("ULAT", "ULON"), r"latitude: all places are .* in radians; must be",
    ),
    "radians in a pair": (
        "ocn.000.nc", attribute("latitude", "units", "radian"), r"latitude: units='radian': must",
    ),
    "no such latitude": (
        "iceh.000.nc", poke("ULAT", 95.0, 3), r"latitude: 95 is outside -90 to 90 degrees",
    ),
    "NaN in an axis": (
        "ocn.000.nc", poke("latitude", np.nan, 3), r"latitude: has missing values; must be degrees",
    ),
    "times": ("ocn.000.nc", poke("time", 6.0), r"different times: 0 hours .* and 6 hours"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_files_are_named(
    mistake: str, changed: Callable[..., Path], cache: Path
) -> None:
    name, change, message = MISTAKES[mistake]
    folder = changed(name, change)
    sources, names = (history, ALL) if name.startswith("iceh") else (pairs, IN_PAIRS)
    with pytest.raises(DataError, match=message) as caught:
        rows(sources(folder), Selection(names), cache)
    assert str(folder) in str(caught.value)
    assert not list(cache.glob("rows-*/.*"))  # nothing half-written


def test_nan_on_land_does_not_matter(changed: Callable[..., Path], cache: Path) -> None:
    def change(data: Any) -> None:
        data["sst_h"][:] = np.where(data["umask"][:] == 1, data["sst_h"][:].filled(0), np.nan)

    assert len(rows(history(changed("iceh.000.nc", change)), Selection(ALL), cache)) > 100


def test_pairs_of_different_sizes(files: Path, tmp_path: Path, cache: Path) -> None:
    write.write_synthetic(tmp_path, 6, 8, 1)
    sources = find_sources([], [f"{files}/atm.000.nc"], [f"{tmp_path}/ocn.000.nc"], None)
    with pytest.raises(DataError, match="on different grids: 36x48 and 6x8"):
        rows(sources, Selection(IN_PAIRS), cache)
    sources = find_sources([f"{files}/iceh.000.nc", f"{tmp_path}/iceh.000.nc"], [], [], None)
    with pytest.raises(DataError, match="on different grids: 36x48 and 6x8"):
        rows(sources, Selection(ALL), cache)


@pytest.mark.parametrize("kind", ["history", "pairs"])
def test_latitudes_that_run_the_other_way(
    kind: str, files: Path, tmp_path: Path, cache: Path
) -> None:
    for path in files.glob("*.00[01].nc"):
        shutil.copy(path, tmp_path)
        if ".001." in path.name:
            with netCDF4.Dataset(tmp_path / path.name, "a") as data:
                for variable in data.variables.values():
                    for dim in {"nj", "latitude"} & {*variable.dimensions}:
                        variable.set_auto_mask(False)
                        axis = variable.dimensions.index(dim)
                        variable[:] = np.flip(variable[:], axis)
    sources, names = (history, ALL) if kind == "history" else (pairs, IN_PAIRS)
    message = r"000.nc and .*001.nc: are on different grids: latitude .* runs the other way"
    with pytest.raises(DataError, match=message):
        rows(sources(tmp_path), Selection(names), cache)


def test_longitudes_may_be_counted_otherwise(
    changed: Callable[..., Path], files: Path, cache: Path
) -> None:
    def change(data: Any) -> None:
        data["ULON"][:] = (data["ULON"][:] + 180) % 360 - 180

    folder = changed("iceh.000.nc", change)
    sources = find_sources([f"{files}/iceh.001.nc", f"{folder}/iceh.000.nc"], [], [], None)
    assert len(rows(sources, Selection(ALL), cache)) > 100


def test_other_content_of_the_same_size_and_time(changed: Callable[..., Path], cache: Path) -> None:
    path = changed("iceh.000.nc", lambda _: None) / "iceh.000.nc"
    status = path.stat()
    before = rows(history(path.parent), Selection(ALL), cache)
    with netCDF4.Dataset(path, "a") as data:
        data["sss_h"][:] = data["sss_h"][:] + 1
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = rows(history(path.parent), Selection(ALL), cache)
    assert np.allclose(after.values[:, 1], before.values[:, 1] + 1)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_band_that_is_damaged(place: float, files: Path, cache: Path) -> None:
    rows(history(files), Selection(ALL), cache)
    band = next(cache.glob("rows-*/band-00001.safetensors"))
    content = bytearray(band.read_bytes())
    content[int(place * len(content))] ^= 1
    band.write_bytes(content)
    with pytest.raises(DataError, match=r"band-00001.safetensors: is damaged .*; remove it"):
        rows(history(files), Selection(ALL), cache)


@pytest.mark.parametrize("content", ["truncated", "text", "empty"])
def test_what_is_not_whole_netcdf(content: str, files: Path, tmp_path: Path, cache: Path) -> None:
    whole = (files / "iceh.000.nc").read_bytes()
    found = {"truncated": whole[: len(whole) // 2], "text": b"sst,sss\n1,2\n", "empty": b""}
    path = tmp_path / "iceh.nc"
    path.write_bytes(found[content])
    with pytest.raises(DataError, match=r"iceh.nc: is not NetCDF, or is truncated or damaged"):
        rows(find_sources([str(path)], [], [], None), Selection(ALL), cache)


def test_files_that_are_not_there(files: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.nc: there is no such file"):
        find_sources([f"{tmp_path}/none.nc"], [], [], None)
    with pytest.raises(DataError, match=r"history=.*/\*.nc: no file has such a name"):
        find_sources([f"{tmp_path}/*.nc"], [], [], None)
    with pytest.raises(ConfigError, match="3 and 1 files; each atmosphere file needs its ocean"):
        find_sources([], [f"{files}/atm.*"], [f"{files}/ocn.000.nc"], None)
    with pytest.raises(ConfigError, match="give history files or CF pairs, not both"):
        find_sources([f"{files}/iceh.*"], [f"{files}/atm.*"], [], None)


def test_a_variable_that_pairs_do_not_have(files: Path, cache: Path) -> None:
    with pytest.raises(DataError, match=r"CF pairs have no flwdn .*leave it out"):
        rows(pairs(files), Selection(ALL), cache)


def test_files_follow_the_formats(files: Path) -> None:
    with netCDF4.Dataset(files / "atm.001.nc") as data:
        assert data.Conventions == "CF-1"
        assert set(data.dimensions) == {
            "latitude", "longitude", "levels", "dummy_surface_levels",
        }  # fmt: skip
        assert data["latitude"].units == "degrees_north"
        assert data["air_temperature"].dimensions == ("latitude", "longitude", "levels")
        assert data["air_temperature"].units == "K"
        assert data["skin_temperature_at_surface"].dimensions[-1] == "dummy_surface_levels"
        assert data["air_temperature"].missing_value == pytest.approx(-3.33477e38)
        assert data["model_levels"].dtype == np.int32
    with netCDF4.Dataset(files / "ocn.001.nc") as data:
        thickness = data["sea_water_cell_thickness"][:]
        assert ((thickness == 0) == np.ma.getmaskarray(data["sea_water_salinity"][:])).all()
    with netCDF4.Dataset(files / "iceh.001.nc") as data:
        assert data["frzmlt_h"].dimensions == ("time", "nj", "ni")
        assert data["ULON"].shape == (NUM_LATITUDES, NUM_LONGITUDES)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("NetCDF: HDF error")  # what the library says then

    monkeypatch.setattr(formats, "_put", fail)
    with pytest.raises(DataError, match=r"out: cannot be written: .*NetCDF: HDF error"):
        write.write_synthetic(tmp_path / "out", 6, 8, 1)
    assert not list((tmp_path / "out").iterdir())


def test_the_command_writes_them(here: Any, tmp_path: Path) -> None:
    done = here("data", "ufs-synthetic", "out", "--latitudes", "6", "--longitudes", "8")
    assert done.returncode == 0
    assert done.stdout.count("wrote out/") == 12
    assert len(list((tmp_path / "out").iterdir())) == 12


def test_the_command_refuses_what_it_cannot_do(here: Any, tmp_path: Path) -> None:
    done = here("data", "ufs-synthetic", "out", "--times", "0")
    assert (done.returncode, done.stderr) == (2, "error: number of times 0: must be at least 1\n")
    assert not (tmp_path / "out").exists()
    done = here("data", "ufs-synthetic", "out", "--seed", "-1")
    assert (done.returncode, done.stderr) == (2, "error: seed -1: must be at least 0\n")
    (tmp_path / "out").touch()
    done = here("data", "ufs-synthetic", "out")
    assert (done.returncode, done.stderr) == (2, "error: out: cannot be written: File exists\n")


def test_times_without_a_known_unit_differ_in_any_digit(tmp_path: Path) -> None:
    path = tmp_path / "times.nc"
    good(path, "grid")
    source = find_sources([str(path)], [], [], None)
    for times, is_fine in (([20240101.0625, 20240101.06251], True), ([20240101.0625] * 2, False)):
        with netCDF4.Dataset(path, "a") as data:
            data["time"].units = "day as %Y%m%d.%f"
            data["time"][:] = times
        if is_fine:
            check_sources(source, ["aice"]).close()
        else:
            with pytest.raises(DataError, match=r"20240101\.06 day .* give each time once"):
                check_sources(source, ["aice"])
