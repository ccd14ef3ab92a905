"""Bands of the grid, which are read, masked, thinned out and cached as files.

A band is some rows of one scene's grid. Its content depends on the files and the selection only, so
any one process reads it, and all processes use the file that this one writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lockstep.data.workers import share_out
from lockstep.errors import DataError
from lockstep.systems.ufs.fields.grids import EVERYWHERE, Box, check_degrees, check_same, inside
from lockstep.systems.ufs.fields.scenes import BAND_CELLS, Scene
from lockstep.systems.ufs.fields.sources import Source, check_sources

_FORMAT = 4
_COUNTS = ("cells", "ocean", "complete", "chosen", "kept")


@dataclass(frozen=True)
class Selection:
    """The variables to read, and the cells to keep.

    Attributes:
        names: short names of the variables.
        mask_mode: which ocean cells: `sea_ice` (more ice than `min_concentration`), `ocean` (not
            more) or `both`.
        min_concentration: concentration of ice, in [0, 1), above which a cell counts as ice for
            `mask_mode`.
        thin_fraction: fraction of cells, in (0, 1], to keep, drawn by their number and time.
        region: box of the cells that are kept, see `inside`.
    """

    names: tuple[str, ...]
    mask_mode: Literal["sea_ice", "ocean", "both"] = "sea_ice"
    min_concentration: float = 0.01
    thin_fraction: float = 1.0
    region: Box = EVERYWHERE

    @property
    def needed(self) -> tuple[str, ...]:
        """The variables that the choice of cells depends on."""
        return () if self.mask_mode == "both" else ("aice",)


@dataclass(frozen=True)
class Band:
    """The chosen cells of some rows of one scene, N of them.

    Attributes:
        values: values in the variables' units, [len(names), N], float32.
        cell: number of each cell in the grid, row by row, [N], int64.
        time: number of each cell's scene, [N], int32.
        place: latitude and longitude in degrees, [2, N], float32.
        counts: number of cells, of those in the ocean, of these with all values, of these chosen by
            their ice and region, and of these kept in thinning out, [5], int64.
        clipped: number of clipped values of each variable, [len(names)], int64.
    """

    values: npt.NDArray[np.float32]
    cell: npt.NDArray[np.int64]
    time: npt.NDArray[np.int32]
    place: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int64]
    clipped: npt.NDArray[np.int64]


def read_band(
    scene: Scene, number: int, rows: slice, selection: Selection, like: Scene | None = None
) -> Band:
    """Read one band.

    Args:
        scene: open scene to read from.
        number: number of the scene.
        rows: rows of the scene's grid that make up the band.
        selection: variables to read and cells to keep.
        like: open scene of another file whose cells must have the same coordinates.

    Raises:
        DataError: the file is damaged, has implausible values, or is on another grid.
    """
    coordinates = scene.coordinates(rows)
    check_degrees(scene.paths[-1], coordinates, scene.has_units, rows.start)
    if like is not None:
        check_same(like.paths[-1], like.coordinates(rows), scene.paths[-1], coordinates)
    ocean = scene.ocean(rows).reshape(-1)
    cells = np.flatnonzero(ocean)
    flat = [_flat(axis) for axis in coordinates]
    # A cell without coordinates is in no region and on no map.
    complete = np.isfinite(flat[0][cells]) & np.isfinite(flat[1][cells])
    fields = {}
    for name in dict.fromkeys([*selection.names, *selection.needed]):
        fields[name] = scene.field(name, rows, cells)
        complete &= fields[name].there
    chosen = complete & inside(flat[0][cells], flat[1][cells], selection.region)
    if selection.mask_mode != "both":
        icy = fields["aice"].values > selection.min_concentration
        chosen &= icy if selection.mask_mode == "sea_ice" else ~icy
    first = rows.start * scene.shape[1]
    taken = chosen
    if selection.thin_fraction < 1:
        taken = chosen & (draw(cells + first, number) < selection.thin_fraction)
    cells = cells[taken]
    counts = [ocean.size, len(taken), complete.sum(), chosen.sum(), len(cells)]
    return Band(
        values=np.stack([fields[name].values[taken] for name in selection.names]),
        cell=cells + first,
        time=np.full(len(cells), number, np.int32),
        place=np.stack([axis[cells] for axis in flat]),
        counts=np.array(counts, np.int64),
        clipped=np.array([fields[name].clipped[taken].sum() for name in selection.names], np.int64),
    )


def draw(cell: npt.NDArray[np.int64], time: npt.NDArray[np.int32] | int) -> npt.NDArray[np.float64]:
    """A pseudorandom number for each cell and time (splitmix64, as in `data.random`).

    Args:
        cell: number of each cell, [N], int64.
        time: number of each cell's scene, [N], int32; or one for all.

    Returns:
        Numbers in [0, 1), [N], float64.
    """
    with np.errstate(over="ignore"):
        state = np.zeros(len(cell), np.uint64)
        for word in (cell, time):
            state += np.asarray(word).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def keep_bands(sources: Sequence[Source], selection: Selection, cache: Path) -> list[Path]:
    """The files of all bands of all scenes, in order; missing ones are written.

    Args:
        sources: the scenes, at least one.
        selection: variables to read and cells to keep.
        cache: folder for the files, preferably shared by all processes.

    Raises:
        DataError: a file is invalid, or no cell is left.
    """
    first = check_sources(sources, [*selection.names, *selection.needed])
    parts = list(first.bands())
    first.close()
    todo = [(number, rows) for number in range(len(sources)) for rows in parts]
    key = [_FORMAT, BAND_CELLS, [source.key() for source in sources], asdict(selection)]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    names = [f"band-{number:05}.safetensors" for number in range(len(todo))]
    with _OpenScenes(sources) as scenes:
        make = partial(_keep, scenes, todo, selection)
        paths = share_out(cache / f"rows-{digest}", names, make)
    counts = np.sum([load(path, "counts")[0] for path in paths], axis=0)
    if not counts[-1]:
        shown = ", ".join(f"{n} {name}" for n, name in zip(counts, _COUNTS, strict=True))
        raise DataError(
            f"{sources[0].paths[0]}{' and others' if len(sources) > 1 else ''}: all points are "
            f"masked ({shown}); look at {_hint(counts, selection)}"
        )
    return paths


def clipped(paths: Sequence[Path], names: Sequence[str]) -> dict[str, int]:
    """The number of clipped values of each variable that has any, by short name.

    Args:
        paths: files of all bands, from `keep_bands`.
        names: short names of the variables, as in the `Selection`.

    Raises:
        DataError: a file is damaged.
    """
    counts = np.sum([load(path, "clipped")[0] for path in paths], axis=0)
    return {name: int(n) for name, n in zip(names, counts, strict=True) if n}


def load(path: Path, *names: str) -> list[npt.NDArray[Any]]:
    """Some of a band's arrays; the others are not read.

    Args:
        path: file of the band.
        names: names of attributes of `Band`.

    Returns:
        The arrays, in the order of the names.

    Raises:
        DataError: the file is damaged: an array has another checksum than when it was written.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            checksums = file.metadata() or {}
            arrays = [file.get_tensor(name) for name in names]
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: is damaged ({error}); remove it") from error
    for name, array in zip(names, arrays, strict=True):
        if checksums.get(name) != checksum(array):
            raise DataError(f"{path}: is damaged ({name} has another checksum); remove it")
    return arrays


def checksum(array: npt.NDArray[Any]) -> str:
    """CRC-32 of an array's type, shape and values."""
    header = zlib.crc32(f"{array.dtype.str}{array.shape}".encode())
    return f"{zlib.crc32(np.ascontiguousarray(array).data, header):08x}"


class _OpenScenes:
    """Keeps the last scene open, since bands are read in order."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._number = -1
        self._scene: Scene | None = None
        self._first: Scene | None = None

    def __enter__(self) -> _OpenScenes:
        return self

    def __exit__(self, *_: object) -> None:
        for scene in (self._scene, self._first):
            if scene is not None:
                scene.close()

    def first(self, number: int) -> Scene | None:
        """The first scene, to compare with a scene of another file."""
        if self._sources[number].paths == self._sources[0].paths:
            return None
        self._first = self._first or self._sources[0].open()
        return self._first

    def scene(self, number: int) -> Scene:
        if number != self._number:
            if self._scene is not None:
                self._scene.close()
            self._scene, self._number = self._sources[number].open(), number
        assert self._scene is not None
        return self._scene


def _keep(
    scenes: _OpenScenes,
    todo: list[tuple[int, slice]],
    selection: Selection,
    number: int,
    path: Path,
) -> None:
    """Read a band and write it to a file."""
    time, rows = todo[number]
    band = read_band(scenes.scene(time), time, rows, selection, scenes.first(time))
    arrays = dict(vars(band))
    checksums = {name: checksum(array) for name, array in arrays.items()}
    save_file(arrays, os.fspath(path), metadata=checksums)


def _flat(axis: np.ma.MaskedArray[Any, Any]) -> npt.NDArray[np.float32]:
    """Coordinates of all cells; NaN where they are missing."""
    return np.asarray(np.ma.filled(axis.astype(np.float32), np.nan).reshape(-1))


def _hint(counts: npt.NDArray[np.int64], selection: Selection) -> str:
    """The setting or variable to look at, by the first count that is 0."""
    hints = (
        "the grid, which has no cells",
        "umask or sea_water_cell_thickness, which say that all is land",
        "the missing values of variables and places: no cell has them all",
        f"mask_mode={selection.mask_mode}, min_ice_concentration={selection.min_concentration} "
        f"and region={list(selection.region)}",
        f"thin_fraction={selection.thin_fraction}",
    )
    return hints[int(np.argmin(counts > 0))]
