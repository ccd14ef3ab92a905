"""`lockstep verify`: prove that the result does not depend on the number of ranks, nor on stops."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from rich.console import Console
from rich.table import Table
from torch import Tensor

from lockstep.commands.waiting import shown_status
from lockstep.config.train_config import Sharding
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.digests import tensor_digest
from lockstep.engine.tables.files import read_rows
from lockstep.errors import ConfigError, LaunchError
from lockstep.front import Sitting
from lockstep.launching.start import LAUNCHERS, Ended, rank_command, start
from lockstep.observe import read_result
from lockstep.observe.text import count
from lockstep.targets import absolute, configured, is_script

_DIGITS = 16
"""Digits of a SHA-256 in the table, which so fits 80 columns."""


_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


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


@dataclass(frozen=True)
class Run:
    """One training of the config.

    Attributes:
        legs: launcher and number of ranks of each sitting, in order.
        sha256: SHA-256 of the final parameters in hexadecimal; empty if the run failed.
        step: number of committed optimizer steps.
        wall_s: wall time of training in seconds.
        error: message of the error that ended it; empty if there was none.
        carry_sha256: SHA-256 of what microbatches carry in the end; empty if they carry nothing.
        tables_sha256: SHA-256 of the rows of tables in the end; empty without tables.
    """

    legs: tuple[Leg, ...]
    sha256: str = ""
    step: int = 0
    wall_s: float = 0.0
    error: str = ""
    carry_sha256: str = ""
    tables_sha256: str = ""

    @property
    def digests(self) -> tuple[str, ...]:
        """What must be equal: of parameters, of what microbatches carry, and of tables."""
        return self.sha256, self.carry_sha256, self.tables_sha256

    @property
    def name(self) -> str:
        """A name for people, made of its legs."""
        return ", resumed: ".join(leg.name for leg in self.legs)


def verify(
    target: str,
    overrides: Sequence[str],
    ranks: str,
    launchers: str,
    keep: Path | None,
    console: Console,
    quiet: bool = False,
    meshes: str = "",
    resumes: int = 1,
) -> int:
    """Train on each number of ranks under each launcher, and print a table of SHA-256s.

    If all are equal, other runs are stopped half way and resumed on other ranks.

    Args:
        target: recipe, file or script to train.
        overrides: `key=value` items for the config.
        ranks: numbers of ranks, separated by commas.
        launchers: names of launchers, separated by commas.
        keep: folder for the run directories; None deletes them.
        console: console to print on.
        quiet: whether to print only what has failed, and the verdict.
        meshes: meshes, such as `2x1x2` or `2x1x2+optimizer`, separated by commas; tried instead of
            `ranks` if given.
        resumes: number of runs that are stopped and resumed, each on other ranks than those before,
            as long as there are others.

    Returns:
        0 if all are equal, 1 if not.

    Raises:
        LockstepError: something given does not work.
        SystemExit: a signal came; with the exit code that says so.
    """
    if resumes < 0:
        raise ConfigError(f"--resumes {resumes}: must not be negative")
    legs = list(_legs(launchers, _meshes(meshes) if meshes else _numbers(ranks)))
    if not is_script(target):
        configured(target, overrides)
    with ExitStack() as stack:
        if keep is None:
            folder = tempfile.mkdtemp(prefix="lockstep-verify-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            keep = Path(folder)
        training = _Training(target, overrides, keep)
        runs = []
        for leg in legs:
            what = f"{target}: {count(leg.num_ranks, 'rank')} under {leg.launcher}"
            with shown_status(console, what, quiet):
                runs.append(training.run((leg,)))
        half = runs[0].step // 2
        if half and len({run.digests for run in runs}) == 1:
            for pair in _pairs(legs, resumes):
                what = f"{target}: stopped after step {half} and resumed, {pair[1].name}"
                with shown_status(console, what, quiet):
                    runs.append(training.run(pair, half))
        if not quiet:
            console.print(_table(runs))
        for run in runs:
            if run.error:
                console.print(f"{run.name} failed: {run.error}", markup=False, soft_wrap=True)
        if any(run.error for run in runs):
            return 1
        odd = [run for run in runs if run.digests != runs[0].digests]
        if not odd:
            console.print(f"equal: {len(runs)} runs, one SHA-256", style="green")
            console.print(runs[0].sha256, soft_wrap=True)
            if runs[0].carry_sha256:
                console.print(f"{runs[0].carry_sha256} of the carry", soft_wrap=True)
            if runs[0].tables_sha256:
                console.print(f"{runs[0].tables_sha256} of the rows of tables", soft_wrap=True)
            return 0
        console.print(f"different: {len(odd)} of {len(runs)} runs", style="red")
        for run in (runs[0], odd[0]):
            shown = "\n".join(filter(None, run.digests))
            console.print(f"{run.name}:\n{shown}", markup=False, soft_wrap=True)
        console.print(_first_difference(training, (runs[0], odd[0]), half), markup=False)
        return 1


def _numbers(ranks: str) -> list[tuple[int, Axes | None]]:
    """Numbers of ranks, on meshes that the config says."""
    numbers = [int(n) if n.isdigit() else 0 for n in ranks.split(",")]
    if min(numbers) < 1:
        raise ConfigError(f"--ranks {ranks}: must be positive numbers, separated by commas")
    return [(number, None) for number in numbers]


def _meshes(meshes: str) -> list[tuple[int, Axes | None]]:
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


def _legs(launchers: str, numbers: Sequence[tuple[int, Axes | None]]) -> Iterator[Leg]:
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


def _pairs(legs: Sequence[Leg], number: int) -> Iterator[tuple[Leg, Leg]]:
    """Where runs start and where they are resumed: the first and the last, and so on inwards."""
    for place, first in enumerate(legs[:number]):
        backwards = [*reversed(legs[: len(legs) - place]), *legs[len(legs) - place :]]
        yield first, next((leg for leg in backwards if leg[1:] != first[1:]), backwards[0])


@dataclass(frozen=True)
class _Training:
    """The training that is repeated on other ranks."""

    target: str
    overrides: Sequence[str]
    folder: Path

    def run(self, legs: tuple[Leg, ...], stop: int = 0, more: Sequence[str] = ()) -> Run:
        """Train to the end; if there is a second leg, stop after a step and go on with it."""
        path = self.path(legs, more)
        wall_s = 0.0
        for number, leg in enumerate(legs, 1):
            until = [f"stop_at_step={stop}"] if number < len(legs) else []
            overrides = [*self.overrides, *leg.overrides, *more, *until]
            ended = self._start(leg, path, overrides, resume=number > 1)
            if ended.exit_code in _STOPPED:
                raise SystemExit(ended.exit_code)  # else a signal would end this one run only
            if ended.exit_code:
                return Run(legs, error=ended.message or f"exit code {ended.exit_code}")
            result = read_result(path / "result.json")
            wall_s += float(result["wall_s"])
        return Run(
            legs,
            result["params_sha256"],
            result["step"],
            wall_s,
            carry_sha256=result.get("carry_sha256", ""),
            tables_sha256=result.get("tables_sha256", ""),
        )

    def path(self, legs: tuple[Leg, ...], more: Sequence[str] = ()) -> Path:
        """The run directory."""
        name = "-".join(
            "-".join(filter(None, [leg.launcher, str(leg.num_ranks), leg.mesh])) for leg in legs
        )
        return self.folder / (f"steps-{name}" if more else name)

    def _start(self, leg: Leg, path: Path, overrides: Sequence[str], resume: bool) -> Ended:
        where = absolute(self.target)
        script = is_script(self.target)
        sitting = Sitting(str(path), resume, tuple(overrides) if script else (), False, where)
        threads = 1 if script else configured(self.target, overrides)[1].threads
        command = rank_command(leg.launcher, leg.num_ranks, where, overrides)
        return start(command, sitting, threads, on_row=_ignore, on_line=_ignore)


def _first_difference(training: _Training, runs: tuple[Run, Run], half: int) -> str:
    """Train both again with a checkpoint at each step, and compare these."""
    every = ["checkpoint.every=1", f"checkpoint.keep={max(r.step for r in runs)}"]
    roots = []
    for run in runs:
        again = training.run(run.legs, half, every)
        if again.error:
            return f"could not be traced: {again.error}"
        roots.append(training.path(run.legs, every) / "checkpoints")
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
    return snapshot.model | snapshot.buffers | carried | rows


def _table(runs: Sequence[Run]) -> Table:
    table = Table()
    table.add_column("launcher")
    with_meshes = any(leg.mesh for run in runs for leg in run.legs)
    for name in ("mesh" if with_meshes else "ranks", "steps", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("SHA-256 of the parameters", no_wrap=True)
    for run in runs:
        equal = run.sha256 and run.digests == runs[0].digests
        table.add_row(
            ", then ".join(leg.launcher for leg in run.legs),
            ", then ".join(leg.mesh or str(leg.num_ranks) for leg in run.legs),
            str(run.step),
            f"{run.wall_s:.2f}",
            f"{run.sha256[:_DIGITS]}…" if run.sha256 else "failed",
            style="green" if equal else "red",
        )
    return table


def _ignore(_: object) -> None:
    """Runs being compared are not shown."""
