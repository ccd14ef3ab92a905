"""Which files there are: the scenes of a config, all on one grid, in a fixed order."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError, DataError
from lockstep.systems.ufs.fields.formats import HistoryScene, PairScene
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
        """A key that no other scene has, as JSON values.

        Files are known by path, inode, size, and the times of the last change of their content
        and, since programs can set that one, of anything.
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
        DataError: a file is not there, or is not what it should be.
    """
    if history and (atmosphere or ocean):
        raise ConfigError("history, atmosphere: give history files or CF pairs, not both")
    if history:
        return [
            Source((path,), time)
            for path in _expand("history", history)
            for time in range(HistoryScene.count_times(path))
        ]
    airs, seas = _expand("atmosphere", atmosphere), _expand("ocean", ocean)
    if len(airs) != len(seas):
        raise ConfigError(
            f"atmosphere, ocean: {len(airs)} and {len(seas)} files; each atmosphere file needs its "
            "ocean file"
        )
    return [
        Source(pair, time, level)
        for pair in zip(airs, seas, strict=True)
        for time in range(PairScene.count_times(*pair))
    ]


def check_sources(sources: Sequence[Source], names: Sequence[str]) -> Scene:
    """Check that all scenes have the variables, on one grid, each at a time of its own.

    Args:
        sources: the scenes, at least one.
        names: short names of the variables.

    Returns:
        The first scene, open.

    Raises:
        DataError: a scene has not.
    """
    first = sources[0].open()
    times: list[tuple[Path, int, Moment]] = []
    with closed_on_error(first):
        for source in {source.paths: source for source in sources}.values():
            with closing(source.open()) as scene:
                of_file = enumerate(scene.all_moments())
                times += [(source.paths[-1], number, moment) for number, moment in of_file]
                scene.check(names)
                if scene.shape != first.shape:
                    shown = " and ".join(f"{a}x{b}" for a, b in (first.shape, scene.shape))
                    raise DataError(
                        f"{first.paths[0]} and {scene.paths[0]}: are on different grids: {shown}"
                    )
        check_differ(times)
        _check_contents([path for path, _, moment in times if moment.key is None])
    return first


def _check_contents(paths: Sequence[Path]) -> None:
    """Check that files that say no time are not copies of one another.

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
    """The files that names and patterns stand for."""
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
