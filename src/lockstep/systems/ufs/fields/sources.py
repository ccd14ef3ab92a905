"""The scenes of a config's files, all on one grid, in a fixed order."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError, DataError
from lockstep.systems.ufs.fields.formats import HistoryScene, PairScene, count_times
from lockstep.systems.ufs.fields.grids import check_same, check_shapes
from lockstep.systems.ufs.fields.scenes import Moment, Scene, check_differ, closed_on_error


@dataclass(frozen=True)
class Source:
    """A scene that can be opened.

    Attributes:
        paths: path of a history file, or of the atmosphere's and the ocean's file.
        time: number of the scene's time in its files, from 0.
        level: number of the model level of upper-air fields, see `PairScene`.
    """

    paths: tuple[Path, ...]
    time: int = 0
    level: int | None = None

    def open(self) -> Scene:
        """Open it.

        Raises:
            DataError: see `HistoryScene` and `PairScene`.
        """
        if len(self.paths) == 1:
            return HistoryScene(self.paths[0], self.time)
        return PairScene(self.paths[0], self.paths[1], self.level, self.time)

    def key(self) -> list[object]:
        """A unique key of the scene, as JSON values.

        A file is identified by its path, inode, size, and both times of its last change: of its
        content, which programs can set, and of anything.
        """
        stats = [(str(path.resolve()), path.stat()) for path in self.paths]
        files = [[name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in stats]
        return [files, self.time, self.level]


def find_sources(
    history: Sequence[str], atmosphere: Sequence[str], ocean: Sequence[str], level: int | None
) -> list[Source]:
    """All scenes of some files, in the order of their names.

    Args:
        history: names or patterns (`*`) of CICE history files.
        atmosphere: names or patterns of the atmosphere's files of CF pairs.
        ocean: names or patterns of the ocean's files, one for each of the atmosphere's.
        level: number of the model level of upper-air fields, see `PairScene`.

    Raises:
        ConfigError: both formats are given, or half of a pair.
        DataError: a file is missing or invalid.
    """
    if history and (atmosphere or ocean):
        raise ConfigError("history, atmosphere: give history files or CF pairs, not both")
    if history:
        files: list[tuple[Path, ...]] = [(path,) for path in _expand("history", history)]
        return [Source(one, time) for one in files for time in range(count_times(*one))]
    airs, seas = _expand("atmosphere", atmosphere), _expand("ocean", ocean)
    if len(airs) != len(seas):
        raise ConfigError(
            f"atmosphere, ocean: {len(airs)} and {len(seas)} files; each atmosphere file needs its "
            "ocean file"
        )
    pairs = zip(airs, seas, strict=True)
    return [Source(pair, time, level) for pair in pairs for time in range(count_times(*pair))]


def check_sources(sources: Sequence[Source], names: Sequence[str]) -> Scene:
    """Check that all scenes have the variables, on one grid, and that no time occurs twice.

    Args:
        sources: the scenes, at least one.
        names: short names of the variables.

    Returns:
        The first scene, open.

    Raises:
        DataError: one does not.
    """
    first = sources[0].open()
    times: list[tuple[Path, int, Moment]] = []
    with closed_on_error(first):
        for source in {source.paths: source for source in sources}.values():
            with closing(source.open()) as scene:
                of_file = enumerate(scene.all_moments())
                times += [(source.paths[-1], number, moment) for number, moment in of_file]
                scene.check(names)
                check_shapes(first.paths[0], first.shape, scene.paths[0], scene.shape)
        check_differ(times)
        _check_contents([path for path, _, moment in times if moment.key is None])
    return first


def check_one_grid(first: Source, other: Source) -> None:
    """Check that two scenes are on the same grid.

    Raises:
        DataError: they are not.
    """
    with closing(first.open()) as one, closing(other.open()) as two:
        check_shapes(one.paths[-1], one.shape, two.paths[-1], two.shape)
        for rows in one.bands():
            both = one.coordinates(rows), two.coordinates(rows)
            check_same(one.paths[-1], both[0], two.paths[-1], both[1])


def moments_of(sources: Sequence[Source]) -> list[Moment]:
    """The time of each scene, in order."""
    by_paths: dict[object, list[Moment]] = {}
    for source in sources:
        if source.paths not in by_paths:
            with closing(source.open()) as scene:
                by_paths[source.paths] = scene.all_moments()
    return [by_paths[source.paths][source.time] for source in sources]


def at_cells(
    source: Source, names: Sequence[str], cells: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Variables of a scene at cells, [N, names]; NaN on land and where they are missing.

    Args:
        source: scene to read.
        names: short names of the variables.
        cells: numbers of N cells in the grid, [N], int64.

    Raises:
        DataError: the file is damaged, or has implausible values.
    """
    found = np.full((len(cells), len(names)), np.nan)
    with closing(source.open()) as scene:
        scene.check(names)
        width = scene.shape[1]
        for rows in scene.bands():
            first, last = rows.start * width, rows.stop * width
            in_band = np.flatnonzero((cells >= first) & (cells < last))
            if not len(in_band):
                continue
            in_band = in_band[scene.ocean(rows).reshape(-1)[cells[in_band] - first]]
            for column, name in enumerate(names):
                field = scene.field(name, rows, cells[in_band] - first)
                found[in_band, column] = np.where(field.there, field.values, np.nan)
    return found


def _check_contents(paths: Sequence[Path]) -> None:
    """Check that files without times are not copies of one another.

    Raises:
        DataError: two are.
    """
    by_size: dict[int, list[Path]] = {}
    for path in dict.fromkeys(paths):
        by_size.setdefault(path.stat().st_size, []).append(path)
    for alike in by_size.values():
        seen: dict[str, Path] = {}
        for path in alike if len(alike) > 1 else ():
            other = seen.setdefault(_sha256(path), path)
            if other != path:
                raise DataError(f"{path}: has the same content as {other}; give it once")


def _sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()


def _expand(key: str, patterns: Sequence[str]) -> list[Path]:
    """The files that match names and patterns."""
    paths = []
    for pattern in patterns:
        name = os.path.expanduser(pattern)
        matches = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        if not matches:
            raise DataError(f"{key}={pattern}: no file has such a name")
        paths += [Path(path) for path in matches]
    seen: dict[tuple[int, int], Path] = {}
    for path in filter(Path.exists, paths):
        status = path.stat()
        other = seen.setdefault((status.st_dev, status.st_ino), path)
        if other is not path:
            raise DataError(f"{key}: {other} and {path} are one file; give it once")
    return paths
