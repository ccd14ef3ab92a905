"""`lockstep verify`: prove that the result does not depend on the number of ranks, nor on stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.cli.options import folder_for, shown_status
from lockstep.cli.prove.repeated import (
    Launch,
    Run,
    Training,
    first_difference,
    launches_of,
    meshes_of,
    num_evaluations,
    numbers_of,
    pairs_of,
)
from lockstep.errors import ConfigError
from lockstep.launching.targets import configured, is_script
from lockstep.observe.text import count

_DIGITS = 16
"""Digits of a SHA-256 in the table, which must fit 80 columns."""


@dataclass(frozen=True)
class Variants:
    """The ways of training a config that must give one result.

    Attributes:
        ranks: numbers of ranks, separated by commas.
        launchers: names of launchers, separated by commas.
        meshes: meshes, such as `2x1x2` or `2x1x2+optimizer`, separated by commas; tried instead of
            `ranks` if given.
        resumes: number of runs that are stopped and resumed, each on other ranks than those before,
            as long as there are others.
    """

    ranks: str
    launchers: str
    meshes: str = ""
    resumes: int = 1

    def launches(self) -> list[Launch]:
        """Those that train from beginning to end.

        Raises:
            LockstepError: a value does not work.
        """
        if self.resumes < 0:
            raise ConfigError(f"--resumes {self.resumes}: must not be negative")
        numbers = meshes_of(self.meshes) if self.meshes else numbers_of(self.ranks)
        return list(launches_of(self.launchers, numbers))


def verify(
    target: str,
    overrides: Sequence[str],
    variants: Variants,
    keep: Path | None,
    console: Console,
    quiet: bool = False,
) -> int:
    """Train on each number of ranks under each launcher, and compare SHA-256s and evaluations.

    If all are equal, other runs are stopped half way and resumed on other ranks.

    Args:
        target: recipe, file or script to train.
        overrides: `key=value` items for the config.
        variants: on what to train.
        keep: folder for the run directories; None deletes them.
        console: console to print on.
        quiet: whether to print only what has failed, and the verdict.

    Returns:
        0 if all are equal, 1 if not.

    Raises:
        LockstepError: something given does not work.
        SystemExit: a signal came; with the exit code that says so.
    """
    launches = variants.launches()
    if not is_script(target):
        configured(target, overrides)
    with folder_for(keep, "verify") as folder:
        training = Training(target, overrides, folder)
        runs = _runs(training, launches, variants.resumes, console, quiet)
        if not quiet:
            console.print(_table(runs))
        return _verdict(training, runs, console)


def _runs(
    training: Training, launches: Sequence[Launch], resumes: int, console: Console, quiet: bool
) -> list[Run]:
    """The runs on each number of ranks, and if these are equal, those that stop and resume."""
    runs, target = [], training.target
    for launch in launches:
        what = f"{target}: {count(launch.num_ranks, 'rank')} under {launch.launcher}"
        with shown_status(console, what, quiet):
            runs.append(training.run((launch,)))
    half = runs[0].half
    if half and all(run.is_like(runs[0]) for run in runs):
        for pair in pairs_of(launches, resumes):
            what = f"{target}: stopped after step {half} and resumed, {pair[1].name}"
            with shown_status(console, what, quiet):
                runs.append(training.run(pair, half))
    return runs


def _verdict(training: Training, runs: Sequence[Run], console: Console) -> int:
    """Print what failed or differs, or the digests that all runs share; the exit code."""
    for run in runs:
        if run.error:
            console.print(f"{run.name} failed: {run.error}", markup=False, soft_wrap=True)
    if any(run.error for run in runs):
        return 1
    odd = [run for run in runs if not run.is_like(runs[0])]
    if not odd:
        number = num_evaluations(runs[0].evaluations)
        also = f", and the same metrics in {count(number, 'evaluation')}" if number else ""
        console.print(f"equal: {len(runs)} runs, one SHA-256{also}", style="green")
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
    if difference := runs[0].difference(odd[0]):
        console.print(difference, markup=False, soft_wrap=True)
    if odd[0].digests != runs[0].digests:
        console.print(first_difference(training, (runs[0], odd[0])), markup=False)
    return 1


def _table(runs: Sequence[Run]) -> Table:
    table = Table()
    table.add_column("launcher")
    with_meshes = any(launch.mesh for run in runs for launch in run.launches)
    for name in ("mesh" if with_meshes else "ranks", "steps", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("SHA-256 of the parameters", no_wrap=True)
    for run in runs:
        equal = run.sha256 and run.is_like(runs[0])
        table.add_row(
            ", then ".join(launch.launcher for launch in run.launches),
            ", then ".join(launch.mesh or str(launch.num_ranks) for launch in run.launches),
            str(run.step),
            f"{run.wall_s:.2f}",
            f"{run.sha256[:_DIGITS]}…" if run.sha256 else "failed",
            style="green" if equal else "red",
        )
    return table
