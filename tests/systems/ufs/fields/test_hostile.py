"""Files that are wrong are refused with one message, quickly, with little memory."""

from __future__ import annotations

import resource
import threading
import time
import warnings
from pathlib import Path

import netCDF4
import numpy as np
import pytest
from tests.systems.ufs.hostile_files import (
    FORMATS,
    HOSTILE,
    NAMES,
    NUM_COLUMNS,
    NUM_ROWS,
    good,
    values,
)

from lockstep.errors import DataError
from lockstep.systems.ufs import netcdf_file
from lockstep.systems.ufs.decoding import Damaged, check_whole
from lockstep.systems.ufs.fields.bands import Selection, keep_bands
from lockstep.systems.ufs.fields.rows import Rows, gather
from lockstep.systems.ufs.fields.sources import find_sources

SELECTION = Selection((*NAMES, "aice"), "both")


def read(path: Path, cache: Path) -> Rows:
    return gather(keep_bands(find_sources([str(path)], [], [], None), SELECTION, cache), 10**9)


def test_a_good_file_is_read(tmp_path: Path, cache: Path) -> None:
    good(tmp_path / "good.nc", "grid")
    found = read(tmp_path / "good.nc", cache)
    for name, column in zip(SELECTION.names, found.values.T, strict=True):
        assert np.array_equal(column, values(name, "grid").reshape(-1))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(kind: str, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "мёд ❄ hostile.nc"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        HOSTILE[kind](path, "grid")
    start, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError) as caught:
        read(path, cache)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert len(message) < 2000
    assert message.isprintable()
    assert time.monotonic() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000  # KiB


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("first", ["sst", "aice"])
def test_no_cut_of_a_classic_file_is_read(
    version: int, first: str, tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "cut.nc"
    good(path, "grid", FORMATS[version], first)
    whole = path.read_bytes()
    assert len(read(path, cache)) == 2 * NUM_ROWS * NUM_COLUMNS
    for size in [*range(0, len(whole), 41), *range(len(whole) - 30, len(whole))]:
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"cut.nc: is not NetCDF, or is truncated or damaged"):
            read(path, cache)


def test_the_padding_at_the_end_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "short.nc"
    with netCDF4.Dataset(path, "w", format=FORMATS[2]) as data:
        data.createDimension("time", None)
        data.createDimension("x", 3)
        # A single record variable has no padding between its records.
        data.createVariable("bytes", "i1", ("time", "x"))[:] = np.arange(1, 10).reshape(3, 3)
    check_whole(path)
    values = path.read_bytes().rstrip(b"\0")
    assert values.endswith(bytes(range(1, 10)))
    path.write_bytes(values)
    check_whole(path)
    path.write_bytes(values[:-1])
    with pytest.raises(Damaged, match="bytes alone needs the first"):
        check_whole(path)


def test_a_library_that_never_comes_back_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netcdf_file, "MOST_CPU_S", 0.05)
    monkeypatch.setattr(netcdf_file, "_POLL_S", 0.02)
    over = threading.Event()

    def circle() -> None:
        while not over.is_set():
            pass

    try:
        with pytest.raises(netcdf_file.Endless):
            netcdf_file.with_cpu_limit(circle)
    finally:
        over.set()
    assert netcdf_file.with_cpu_limit(lambda: time.sleep(0.2) or 7) == 7  # waiting is no computing
    with pytest.raises(KeyError):
        netcdf_file.with_cpu_limit(lambda: {}["a"])


def test_the_librarys_first_questions_are_asked_beforehand(tmp_path: Path) -> None:
    good(tmp_path / "good.nc", "grid")
    assert netcdf_file._library() is not None
    netcdf_file.check_opens(str(tmp_path / "good.nc"))
    netcdf_file.check_opens(str(tmp_path / "missing.nc"))
