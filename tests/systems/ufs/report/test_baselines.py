"""Skill against persistence and climatology, on other years, regions and grids."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest

from lockstep.systems.ufs.fields.rows import Rows
from lockstep.systems.ufs.fields.sources import Source, find_sources, moments_of
from lockstep.systems.ufs.report.skill import (
    Period,
    bars,
    by_region_and_season,
    climatology,
    lines,
    persistence,
    skill,
)
from lockstep.systems.ufs.synthetic import write_history

SHAPE = (6, 5)
CELLS = np.arange(30)
DAYS = {0: 14.0, 1: 45.0, 2: 20.0, 3: 379.0}
"""When each file's field is of: January, February, January again, and January of the next year."""


def field(number: int) -> np.ndarray[Any, Any]:
    """What a file holds: concentrations that tell its number."""
    return 0.1 * (number + 1) + 0.001 * CELLS.reshape(SHAPE)


def made(path: Path, number: int, days: float | None) -> Path:
    with netCDF4.Dataset(path, "w") as data:
        for name, size in (("time", None), ("nj", SHAPE[0]), ("ni", SHAPE[1])):
            data.createDimension(name, size)
        for name, first, last, axis in (("ULAT", -60, 80, 0), ("ULON", 0, 300, 1)):
            values = np.linspace(first, last, SHAPE[axis])
            made = data.createVariable(name, "f8", ("nj", "ni"))
            made[:] = values[:, None] if axis == 0 else values[None]
        mask = np.ones(SHAPE)
        mask[0, 0] = number != 0  # land at one time only
        data.createVariable("umask", "f4", ("nj", "ni"))[:] = mask
        made = data.createVariable("aice_h", "f8", ("time", "nj", "ni"), fill_value=-1.0)
        made[0] = np.ma.masked_where(CELLS.reshape(SHAPE) == 7 + number, field(number))
        if days is not None:
            time = data.createVariable("time", "f8", ("time",))
            time.units = "days since 2025-01-01"
            time[:] = days
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    folder = tmp_path_factory.mktemp("months")
    paths = [made(folder / f"{n}.nc", n, days) for n, days in DAYS.items()]
    return find_sources([*map(str, paths)], [], [], None)


def rows(times: list[int], cells: Any = CELLS) -> Rows:
    count = len(times) * len(cells)
    time = np.repeat(times, len(cells)).astype(np.int32)
    place = np.zeros((count, 2), np.float32)
    return Rows(np.zeros((count, 1), np.float32), np.tile(cells, len(times)), time, place)


def period(sources: list[Source]) -> Period:
    return Period(sources, moments_of(sources))


def test_persistence_is_the_field_before(sources: list[Source]) -> None:
    found = persistence(rows([0, 1, 2, 3]), ["aice"], period(sources))
    values = found.values.reshape(4, 30)
    assert np.isnan(values[0]).all()  # the first in time, not in order of the files
    for time, before in ((2, 0), (1, 2), (3, 1)):
        wanted = field(before).reshape(-1).astype(np.float32)
        gone = 7 + before == CELLS
        gone |= (CELLS == 0) & (before == 0)
        assert np.isnan(values[time][gone]).all()
        assert np.array_equal(values[time][~gone], wanted[~gone])
    assert found.remark.startswith("34 of 120 rows have none: no earlier time")


def test_climatology_is_the_mean_of_the_month_without_the_time_itself(
    sources: list[Source],
) -> None:
    whole = period(sources)
    found = climatology(rows([0, 1, 2, 3]), ["aice"], whole, whole).values.reshape(4, 30)
    januaries = {0: field(0), 2: field(2), 3: field(3)}
    assert np.isnan(found[1]).all()  # the only February is the one that is predicted
    for time in januaries:
        others = [n for n in januaries if n != time]
        for cell in CELLS:
            known = [
                field(n).reshape(-1)[cell]
                for n in others
                if cell != 7 + n and not (cell == 0 and n == 0)
            ]
            assert found[time][cell] == pytest.approx(np.mean(known), rel=1e-6)
    before = Period(whole.sources[:1], whole.moments[:1])
    other = climatology(rows([3]), ["aice"], whole, before)
    assert np.isnan(other.values).reshape(-1).nonzero()[0].tolist() == [0, 7]
    assert (
        other.remark == "2 of 30 rows have none: no other field of the training is of their month"
    )


def test_what_cannot_be_is_said(sources: list[Source], tmp_path: Path) -> None:
    write_history(tmp_path / "fine.nc", 8, 9, 0)
    fine = period(find_sources([str(tmp_path / "fine.nc")], [], [], None))
    found = climatology(rows([0]), ["aice"], period(sources), fine)
    assert np.isnan(found.values).all()
    assert "none is on this grid" in found.remark
    assert "6x5 and 8x9" in found.remark
    assert climatology(rows([0]), ["aice"], fine, "gone").remark == "gone"
    timeless = [str(made(tmp_path / f"{n}.nc", n, None)) for n in range(2)]
    unknown = period(find_sources(timeless, [], [], None))
    for baseline in (
        persistence(rows([0, 1]), ["aice"], unknown),
        climatology(rows([0, 1]), ["aice"], unknown, unknown),
    ):
        assert np.isnan(baseline.values).all()
        assert "60 of 60 rows have none" in baseline.remark


def test_the_month_of_a_mean_is_that_of_its_middle(tmp_path: Path) -> None:
    path = made(tmp_path / "mean.nc", 0, 31.0)
    moment = period(find_sources([str(path)], [], [], None)).moments[0]
    assert moment.month == 2
    assert moment.shown == "2025-02-01 00:00"
    with netCDF4.Dataset(path, "a") as data:
        data.createDimension("d2", 2)
        data.createVariable("time_bounds", "f8", ("time", "d2"))[:] = [[0.0, 31.0]]
        data["time"].bounds = "time_bounds"
    moment = period(find_sources([str(path)], [], [], None)).moments[0]
    assert (moment.date, moment.month) == ((2025, 2, 1, 0, 0, 0), 1)


def test_skill_is_of_the_rows_that_the_baseline_has() -> None:
    true = np.array([0.0, 0.0, 0.0, 5.0])
    predicted = np.array([1.0, 1.0, 9.0, 5.0])
    baseline = np.array([2.0, 2.0, np.nan, np.nan])
    found = skill(predicted, baseline, true)
    assert found == {"count": 2, "rmse": 2.0, "rmse_emulator": 1.0, "skill": 0.5}
    assert skill(predicted, np.full(4, np.nan), true) is None
    latitude, month = np.array([60.0, 60, -60, 0]), np.array([1, 7, 7, 0])
    table = by_region_and_season(latitude, month, true, predicted, {"persistence": baseline})
    assert {region: list(entry) for region, entry in table.items()} == {
        "global": ["all", "DJF", "JJA"], "arctic": ["all", "DJF", "JJA"],
        "antarctic": ["all", "JJA"],
    }  # fmt: skip
    assert table["arctic"]["DJF"]["persistence"]["skill"] == 0.5
    assert table["antarctic"]["JJA"]["persistence"] is None
    nan = pytest.approx(math.nan, nan_ok=True)
    assert bars(table["antarctic"], ["persistence"]) == {
        "emulator": [9.0, 9.0],
        "persistence": [nan, nan],
        "emulator, rows of persistence": [nan, nan],
    }
    arctic = bars(table["arctic"], ["persistence"])
    assert arctic["emulator, rows of persistence"] == [1.0, 1.0, 1.0]
    said = [*lines("aice", table, ["persistence"])]
    assert said[0].startswith("aice global all: 4 points")
    assert said[0].endswith("skill 0.500 against persistence (2 points)")


SMALL = ("hidden=[8]", "steps=40", "eval_every=10", "log_every=10", "lr=0.02", "batch_size=500")
WHOLE = ("--split", "train", "val_fraction=0", "test_fraction=0")


@pytest.mark.slow
def test_other_years_regions_and_grids(here: Any, tmp_path: Path) -> None:
    for year in (2025, 2026):
        for number in range(2):
            path = tmp_path / f"{year}.{number}.nc"
            write_history(path, 30, 40, number + 7 * (year - 2025))
            with netCDF4.Dataset(path, "a") as data:
                data["time"][:] = 24 * (14 + 181 * number + 365 * (year - 2025))
    write_history(tmp_path / "fine.nc", 40, 50, 0)
    given = "history=2025.*.nc"
    assert here("train", "ufs", given, *SMALL, "--run-dir", "run").returncode == 0
    done = here("eval", "run", "--report", "next", *WHOLE, "history=2026.*.nc")
    assert done.returncode == 0, done.stderr
    assert "aice antarctic JJA: " in done.stdout
    table = json.loads((tmp_path / "next" / "report.json").read_text())["skill"]["aice"]
    january = table["arctic"]["DJF"]
    assert january["persistence"] is None  # nothing is earlier
    assert january["climatology"]["count"] == january["count"]
    assert table["arctic"]["JJA"]["persistence"]["skill"] < 1
    assert (tmp_path / "next" / "skill_aice.png").is_file()
    fine = ("history=fine.nc", "region=arctic")
    done = here("eval", "run", "--report", "fine", *WHOLE, *fine)
    assert done.returncode == 0, done.stderr
    assert "climatology: none is on this grid" in done.stdout
    assert "aice antarctic" not in done.stdout
    done = here("export", "run", "out", "mask_mode=both", *fine)
    assert done.returncode == 0, done.stderr
    with netCDF4.Dataset(tmp_path / "out" / "predicted.nc") as data:
        assert data["aice_true"].shape == (1, 40, 50)
        there = ~np.ma.getmaskarray(data["aice_predicted"][0])
        assert (data["latitude"][:][there] >= 50).all()
        with netCDF4.Dataset(tmp_path / "fine.nc") as source:
            stored = source["aice_h"][0]
        assert np.array_equal(stored[there], data["aice_true"][0][there])
        assert np.abs(data["aice_predicted"][0] - data["aice_true"][0]).mean() < 0.3
    for keys, message in {
        ("history=none.nc",): "none.nc: there is no such file",
        ("inputs=[sst]", *fine): "inputs=['sst']: the model was trained with inputs=",
    }.items():
        done = here("export", "run", "bad", *keys)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert not (tmp_path / "bad").exists()
    done = here("export", "run", "model.ts", given)
    assert done.returncode == 2
    assert "model.ts: a file is exported without data; leave the key out" in done.stderr
