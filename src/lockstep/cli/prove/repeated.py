"""Trainings that are repeated on other ranks and launchers, and the first difference of two."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

from torch import Tensor

from lockstep.config.train_config import Sharding
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.digests import tensor_digest
from lockstep.engine.tables.files import read_rows
from lockstep.errors import ConfigError, LaunchError
from lockstep.launching.api import Session
from lockstep.launching.job.ending import Ended
from lockstep.launching.start import LAUNCHERS, rank_command, start
from lockstep.launching.targets import absolute, configured, is_script
from lockstep.observe import read_events, read_result

_KINDS = get_args(Sharding)[1:]
"""What may follow a mesh: the sharding of each column."""


class Axes(NamedTuple):
    """How a mesh splits a replica, and what its columns shard."""

    pp: int
    """Stages."""
    tp: int
    """Ranks that share the shards of each stage."""
    sharding: str | None
    """What is sharded; None leaves it to the config."""


class Launch(NamedTuple):
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
        """The `key=value` items that it adds to the config."""
        if self.axes is None:
            return []
        pp, tp, sharding = self.axes
        more = [] if sharding is None else [f"sharding={sharding}", "optimizer.sharded=false"]
        return [f"mesh.pp={pp}", f"mesh.tp={tp}", *more]


def numbers_of(ranks: str) -> list[tuple[int, Axes | None]]:
    """Numbers of ranks; the config chooses their meshes."""
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


def launches_of(launchers: str, numbers: Sequence[tuple[int, Axes | None]]) -> Iterator[Launch]:
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
        yield Launch("python", *(alone or (1, None)))
    for name in names:
        if name != "python":
            yield from (Launch(name, *number) for number in numbers)


def pairs_of(launches: Sequence[Launch], number: int) -> Iterator[tuple[Launch, Launch]]:
    """Where runs start and where they resume: the first and the last launch, and so on inwards."""
    for place, first in enumerate(launches[:number]):
        cut = len(launches) - place
        backwards = [*reversed(launches[:cut]), *launches[cut:]]
        yield first, next((each for each in backwards if each[1:] != first[1:]), backwards[0])


Row = Mapping[str, Any]
"""A row of `events.jsonl`."""


class Place(NamedTuple):
    """Which evaluation of a run it is."""

    step: int
    split: str
    model_step: int
    """The step whose parameters were evaluated."""

    def __str__(self) -> str:
        """A name for people."""
        of = "" if self.model_step == self.step else f" (state of step {self.model_step})"
        return f"the evaluation of {self.split} after step {self.step}{of}"


def evaluated(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of a run that are of evaluations, repeated ones included."""
    return tuple(row for row in rows if row["event"] == "Evaluated")


def num_evaluations(rows: Iterable[Row]) -> int:
    """The number of different evaluations in these rows; a repeated one counts once."""
    return len(_by_place(rows))


def first_different_evaluation(
    names: tuple[str, str], runs: tuple[Iterable[Row], Iterable[Row]]
) -> str:
    """Where the evaluations of two runs first differ; empty if they do not.

    An evaluation that was repeated, after a loss or a resume, must be equal each time.

    Args:
        names: of the runs, for people.
        runs: rows of their evaluations.
    """
    pair = [_by_place(rows) for rows in runs]
    for place in sorted(pair[0].keys() | pair[1].keys()):
        named = list(zip(names, (there.get(place, []) for there in pair), strict=True))
        missing = next((name for name, made in named if not made), None)
        if missing is not None:
            return f"{place} is not in {missing}"
        (first, one), *more = [(name, values) for name, made in named for values in made]
        for last, other in more:
            for metric in {**one, **other}:
                here, there = one.get(metric, "missing"), other.get(metric, "missing")
                if here != there:
                    return f"{place}: {metric} is {here} in {first}, {there} in {last}"
    return ""


def _by_place(rows: Iterable[Row]) -> dict[Place, list[dict[str, str]]]:
    """By place, the values of each time that the evaluation was made."""
    found: dict[Place, list[dict[str, str]]] = {}
    for row in rows:
        model_step = row.get("model_step")
        place = Place(row["step"], row["split"], row["step"] if model_step is None else model_step)
        # As text, -0.0 differs from 0.0, and NaN equals NaN.
        values = {n: json.dumps(v) for n, v in {**row["metrics"], **row.get("arrays", {})}.items()}
        found.setdefault(place, []).append(values)
    return found


_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)


@dataclass(frozen=True)
class Run:
    """One training of the config.

    Attributes:
        launches: launcher and number of ranks of each session, in order.
        sha256: SHA-256 of the final parameters in hexadecimal; empty if the run failed.
        step: number of committed optimizer steps.
        wall_s: wall time of training in seconds.
        error: message of the error that ended it; empty if there was none.
        carry_sha256: SHA-256 of the final carry of all microbatches; empty without a carry.
        tables_sha256: SHA-256 of the final rows of tables; empty without tables.
        evaluations: rows of its evaluations, as the run has written them.
    """

    launches: tuple[Launch, ...]
    sha256: str = ""
    step: int = 0
    wall_s: float = 0.0
    error: str = ""
    carry_sha256: str = ""
    tables_sha256: str = ""
    evaluations: tuple[Row, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests that must be equal: of parameters, of the carry, and of tables."""
        return self.sha256, self.carry_sha256, self.tables_sha256

    def difference(self, other: Run) -> str:
        """Where the evaluations of two runs first differ; empty if they are equal."""
        names, rows = (self.name, other.name), (self.evaluations, other.evaluations)
        return first_different_evaluation(names, rows)

    def is_like(self, other: Run) -> bool:
        """Whether digests and evaluations of two runs are equal."""
        return self.digests == other.digests and not self.difference(other)

    @property
    def half(self) -> int:
        """The step after which it is stopped if it is to be resumed."""
        return self.step // 2

    @property
    def name(self) -> str:
        """A name for people, made of its launches."""
        return ", resumed: ".join(launch.name for launch in self.launches)


@dataclass(frozen=True)
class Training:
    """The training that is repeated on other ranks."""

    target: str
    overrides: Sequence[str]
    folder: Path

    def run(self, launches: tuple[Launch, ...], stop: int = 0, more: Sequence[str] = ()) -> Run:
        """Train to the end; with a second launch, stop after step `stop` and resume there."""
        path = self.path(launches, more)
        wall_s = 0.0
        for number, launch in enumerate(launches, 1):
            until = [f"stop_at_step={stop}"] if number < len(launches) else []
            overrides = [*self.overrides, *launch.overrides, *more, *until]
            ended = self._start(launch, path, overrides, resume=number > 1)
            if ended.exit_code in _STOPPED:
                raise SystemExit(
                    ended.exit_code
                )  # a signal must end the command, not just this run
            if ended.exit_code:
                return Run(launches, error=ended.message or f"exit code {ended.exit_code}")
            result = read_result(path / "result.json")
            wall_s += float(result["wall_s"])
        return Run(
            launches,
            result["params_sha256"],
            result["step"],
            wall_s,
            carry_sha256=result.get("carry_sha256", ""),
            tables_sha256=result.get("tables_sha256", ""),
            evaluations=evaluated(read_events(path / "events.jsonl")),
        )

    def path(self, launches: tuple[Launch, ...], more: Sequence[str] = ()) -> Path:
        """The run directory."""
        name = "-".join(
            "-".join(filter(None, [launch.launcher, str(launch.num_ranks), launch.mesh]))
            for launch in launches
        )
        return self.folder / (f"steps-{name}" if more else name)

    def _start(self, launch: Launch, path: Path, overrides: Sequence[str], resume: bool) -> Ended:
        where = absolute(self.target)
        script = is_script(self.target)
        session = Session(str(path), resume, tuple(overrides) if script else (), False, where)
        threads = 1 if script else configured(self.target, overrides)[1].threads
        command = rank_command(launch.launcher, launch.num_ranks, where, overrides)
        return start(command, session, threads, on_row=lambda _: None, on_line=lambda _: None)


def first_difference(training: Training, runs: tuple[Run, Run]) -> str:
    """Where two runs first differ: both train again, with a checkpoint at each step to compare."""
    every = ["checkpoint.every=1", f"checkpoint.keep={max(r.step for r in runs)}"]
    roots = []
    for run in runs:
        again = training.run(run.launches, runs[0].half, every)
        if again.error:
            return f"could not be traced: {again.error}"
        roots.append(training.path(run.launches, every) / "checkpoints")
    names = " and ".join(r.name for r in runs)
    for step in range(1, runs[0].step + 1):
        read = [checkpoint.read(r / listing.folder_name(step)) for r in roots]
        first, second = (_tensors(snapshot) for snapshot in read)
        for name, tensor in first.items():
            other = second[name]
            if tensor_digest(name, tensor) != tensor_digest(name, other):
                gap = (tensor.double() - other.double()).abs().max().item()
                return f"{names} first differ after step {step}, in {name} (by up to {gap:.3g})"
    return f"{names} agreed when they were run again: the difference comes and goes"


def _tensors(snapshot: checkpoint.Snapshot) -> dict[str, Tensor]:
    """What must be equal in two runs, by a name for people."""
    carried = {f"the carry of microbatch {name}": t for name, t in snapshot.carry.items()}
    rows = {
        f"{key} of {name} from row {first} on": tensor
        for name, first, key, tensor in read_rows(snapshot)
    }
    return dict(snapshot.model) | snapshot.buffers | carried | rows
