"""From scenes to rows: bands of the grid are read, masked, thinned out and kept as files.

A band is some rows of one scene's grid. What is in it depends on the files and on what is asked for
only, so each band is read by one process, whichever, and all processes use what it wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from lockstep.data.sharing import share_out
from lockstep.errors import DataError
from lockstep.recipes.ufs.scenes import Scene
from lockstep.recipes.ufs.sources import Source, check_sources

BAND_CELLS = 1 << 17
"""About how many cells of the grid are read at a time."""

_FORMAT = 1
_COUNTS = ("cells", "ocean", "complete", "chosen", "kept")
_MOST_CHUNKED = 4
"""Bands grow up to so many times to match the chunks that files are stored in."""


@dataclass(frozen=True)
class Selection:
    """What is read, and which cells of it.

    Attributes:
        names: of the variables, short names.
        mask_mode: `sea_ice` (more ice than `min_concentration`), `ocean` (not more) or `both`.
        min_concentration: of ice.
        thin_fraction: part of the cells that are kept, drawn by their place and time.
    """

    names: tuple[str, ...]
    mask_mode: Literal["sea_ice", "ocean", "both"] = "sea_ice"
    min_concentration: float = 0.01
    thin_fraction: float = 1.0


@dataclass(frozen=True)
class Band:
    """The chosen cells of some rows of one scene, N of them.

    Attributes:
        values: [N, len(names)], float32, in the variables' units.
        cell: [N], int64: the number of each cell in the grid, row by row.
        time: [N], int32: the number of its scene.
        place: [N, 2], float32: latitude and longitude in degrees.
        counts: [5], int64: cells, those in the ocean, of these with all values, of these chosen by
            the ice in them, of these kept in thinning out.
    """

    values: npt.NDArray[np.float32]
    cell: npt.NDArray[np.int64]
    time: npt.NDArray[np.int32]
    place: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int64]


def read_band(scene: Scene, number: int, rows: slice, selection: Selection) -> Band:
    """Read one band.

    Args:
        scene: an open scene.
        number: of the scene.
        rows: of its grid.
        selection: what to read.

    Raises:
        DataError: the file is damaged, or has values that cannot be right.
    """
    columns = scene.shape[1]
    ocean = scene.ocean(rows)
    complete = ocean.copy()
    names = dict.fromkeys([*selection.names, "aice"])
    if selection.mask_mode == "both" and "aice" not in selection.names:
        del names["aice"]
    fields = {}
    for name in names:
        found = scene.field(name, rows, ocean)
        complete &= ~np.ma.getmaskarray(found)
        fields[name] = np.asarray(found.data)
    chosen = complete.copy()
    if selection.mask_mode != "both":
        icy = fields["aice"] > selection.min_concentration
        chosen &= icy if selection.mask_mode == "sea_ice" else ~icy
    place = [np.asarray(np.ma.filled(c, np.nan), np.float32) for c in scene.coordinates(rows)]
    cell = np.flatnonzero(chosen)
    kept = draw(cell + rows.start * columns, number) < selection.thin_fraction
    cell = cell[kept]
    counts = [complete.size, ocean.sum(), complete.sum(), chosen.sum(), len(cell)]
    return Band(
        values=np.stack([fields[name].reshape(-1)[cell] for name in selection.names], axis=1),
        cell=cell + rows.start * columns,
        time=np.full(len(cell), number, np.int32),
        place=np.stack([axis.reshape(-1)[cell] for axis in place], axis=1),
        counts=np.array(counts, np.int64),
    )


def draw(cell: npt.NDArray[np.int64], time: npt.NDArray[np.int32] | int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each cell and time, as if random (splitmix64, as in `data.random`)."""
    with np.errstate(over="ignore"):
        state = np.zeros(len(cell), np.uint64)
        for word in (cell, time):
            state += np.asarray(word).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    found: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def bands_of(sources: Sequence[Source], selection: Selection, cache: Path) -> Iterator[Band]:
    """All bands of all scenes, in order; read now if no process has before.

    Args:
        sources: the scenes, at least one.
        selection: what to read.
        cache: a folder, best one that all processes share.

    Raises:
        DataError: a file is not what it should be, or no cell is left.
    """
    first = check_sources(sources, selection.names)
    ranges = list(_ranges(first))
    first.close()
    todo = [(number, rows) for number in range(len(sources)) for rows in ranges]
    key = [_FORMAT, BAND_CELLS, [source.key() for source in sources], asdict(selection)]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    names = [f"band-{number:05}.safetensors" for number in range(len(todo))]
    with _Opened(sources) as opened:
        make = partial(_keep, opened, todo, selection)
        paths = share_out(cache / f"rows-{digest}", names, make)
    counts = np.zeros(len(_COUNTS), np.int64)
    for path in paths:
        band = _load(path)
        counts += band.counts
        yield band
    if not counts[-1]:
        shown = ", ".join(f"{n} {name}" for n, name in zip(counts, _COUNTS, strict=True))
        raise DataError(
            f"{sources[0].paths[0]}{' and others' if len(sources) > 1 else ''}: all points are "
            f"masked ({shown}); look at {_hint(counts, selection)}"
        )


class _Opened:
    """The scene that was asked for last stays open: bands are asked for in order."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._number = -1
        self._scene: Scene | None = None

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        if self._scene is not None:
            self._scene.close()

    def scene(self, number: int) -> Scene:
        if number != self._number:
            self.__exit__()
            self._scene, self._number = self._sources[number].open(), number
        assert self._scene is not None
        return self._scene


def _keep(
    opened: _Opened, todo: list[tuple[int, slice]], selection: Selection, number: int, path: Path
) -> None:
    """Read a band and write it to a file."""
    time, rows = todo[number]
    band = read_band(opened.scene(time), time, rows, selection)
    save_file(dict(vars(band)), os.fspath(path))


def _load(path: Path) -> Band:
    """A band from its file; what is not used of it is not read."""
    with safe_open(path, framework="numpy") as file:
        return Band(**{name: file.get_tensor(name) for name in Band.__dataclass_fields__})


def _ranges(scene: Scene) -> Iterator[slice]:
    """The rows of each band."""
    rows, columns = scene.shape
    size = max(1, BAND_CELLS // columns)
    chunks = -(-size // scene.chunk_rows) * scene.chunk_rows
    size = chunks if chunks <= _MOST_CHUNKED * size else size
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _hint(counts: npt.NDArray[np.int64], selection: Selection) -> str:
    """Where to look, by the count that is the first to be 0."""
    hints = (
        "the grid, which has no cells",
        "umask or sea_water_cell_thickness, which say that all is land",
        "the missing values of the inputs: no cell has them all",
        f"mask_mode={selection.mask_mode} and min_ice_concentration={selection.min_concentration}",
        f"thin_fraction={selection.thin_fraction}",
    )
    return hints[int(np.argmin(counts > 0))]
