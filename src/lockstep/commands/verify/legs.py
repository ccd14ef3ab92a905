"""Where a training is repeated: ranks under launchers, on meshes, and pairs of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from lockstep.config.train_config import Sharding
from lockstep.errors import ConfigError, LaunchError
from lockstep.launching.start import LAUNCHERS

_KINDS = get_args(Sharding)[1:]
"""What may stand behind a mesh: what each column keeps in slices."""


class Axes(NamedTuple):
    """What a replica is on a mesh, and what its columns share out."""

    pp: int
    """Stages."""
    tp: int
    """Ranks that share out the shards of each stage."""
    sharding: str | None
    """What is in slices; None leaves it to the config."""


class Leg(NamedTuple):
    """Some ranks under one launcher."""

    launcher: str
    num_ranks: int
    axes: Axes | None = None
    """The mesh; None leaves it to the config."""

    @property
    def name(self) -> str:
        """A name for people."""
        mesh = "" if self.axes is None else f" ({self.mesh})"
        return f"{self.launcher} × {self.num_ranks}{mesh}"

    @property
    def mesh(self) -> str:
        """Sizes of the axes of data, depth and features, as they are given to `verify`."""
        if self.axes is None:
            return ""
        pp, tp, sharding = self.axes
        of = f"+{sharding}" if sharding in _KINDS else ""
        return f"{self.num_ranks // (pp * tp)}x{pp}x{tp}{of}"

    @property
    def overrides(self) -> list[str]:
        """What it adds to the config."""
        if self.axes is None:
            return []
        pp, tp, sharding = self.axes
        more = [] if sharding is None else [f"sharding={sharding}", "optimizer.sharded=false"]
        return [f"mesh.pp={pp}", f"mesh.tp={tp}", *more]


def numbers_of(ranks: str) -> list[tuple[int, Axes | None]]:
    """Numbers of ranks, on meshes that the config says."""
    numbers = [int(n) if n.isdigit() else 0 for n in ranks.split(",")]
    if min(numbers) < 1:
        raise ConfigError(f"--ranks {ranks}: must be positive numbers, separated by commas")
    return [(number, None) for number in numbers]


def meshes_of(meshes: str) -> list[tuple[int, Axes | None]]:
    """Number of ranks and axes of each mesh."""
    found: list[tuple[int, Axes | None]] = []
    for mesh in meshes.split(","):
        numbers, _, sharding = mesh.partition("+")
        sizes = [int(n) if n.isdigit() else 0 for n in numbers.split("x")]
        is_known = sharding in _KINDS or "+" not in mesh
        if len(sizes) != 3 or min(sizes) < 1 or not is_known:
            kinds = ", ".join(f"+{kind}" for kind in _KINDS)
            raise ConfigError(
                f"--meshes {mesh}: must be three positive numbers: replicas x stages x ranks that "
                f"share layers, such as 2x1x2; behind them may stand what is in slices: {kinds}"
            )
        dp, pp, tp = sizes
        found.append((dp * pp * tp, Axes(pp, tp, (sharding or "none") if "+" in meshes else None)))
    return found


def legs_of(launchers: str, numbers: Sequence[tuple[int, Axes | None]]) -> Iterator[Leg]:
    """All launchers and numbers of ranks; plain python runs one rank only."""
    names = launchers.split(",")
    for name in names:
        if name not in LAUNCHERS:
            raise LaunchError(f"--launchers {name}: must be of {', '.join(LAUNCHERS)}")
    alone = next((n for n in numbers if n[0] == 1), None)
    if names == ["python"] and alone is None:
        given = ",".join(str(number) for number, _ in numbers)
        raise ConfigError(f"--ranks {given}: plain python runs one rank; add mpi to --launchers")
    if "python" in names:
        yield Leg("python", *(alone or (1, None)))
    for name in names:
        if name != "python":
            yield from (Leg(name, *number) for number in numbers)


def pairs_of(legs: Sequence[Leg], number: int) -> Iterator[tuple[Leg, Leg]]:
    """Where runs start and where they are resumed: the first and the last, and so on inwards."""
    for place, first in enumerate(legs[:number]):
        backwards = [*reversed(legs[: len(legs) - place]), *legs[len(legs) - place :]]
        yield first, next((leg for leg in backwards if leg[1:] != first[1:]), backwards[0])
