"""Subcommands that prove that ranks, launchers and faults do not change the result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import Overrides, QuietVerdict, Replace, Target, importing, leave
from lockstep.errors import LaunchError
from lockstep.launching.warm import foresee_ranks


def verify(
    target: Target,
    overrides: Overrides = None,
    ranks: Annotated[str, typer.Option("--ranks", help="Numbers of ranks.")] = "1,2,3,4",
    meshes: Annotated[
        str,
        typer.Option(
            "--meshes",
            help="Meshes instead, data x depth x features: 1x1x1,2x2x1+optimizer.",
        ),
    ] = "",
    launchers: Annotated[str, typer.Option("--launchers", help="Launchers to try.")] = "python,mpi",
    resumes: Annotated[
        int, typer.Option("--resumes", help="Runs to stop half way and resume on other ranks.")
    ] = 1,
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep all runs here.")] = None,
    quiet: QuietVerdict = False,
) -> None:
    """Train the same config on each number of ranks; compare final SHA-256s and evaluations."""
    with importing(quiet):
        from rich.console import Console

        from lockstep.cli.prove import verify as command
    variants = command.Variants(ranks, launchers, meshes, resumes)
    leave(command.verify(target, overrides or [], variants, keep, Console(), quiet))


def chaos(
    target: Target,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", help="Number of ranks to start: 4; on each host: 1."),
    ] = None,
    faults: Annotated[int, typer.Option("--faults", help="How many things go wrong.")] = 20,
    seed: Annotated[int, typer.Option("--seed", help="Which ones.")] = 0,
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep the runs here.")] = None,
    launcher: Annotated[
        str | None, typer.Option("--launcher", help="mpi or local; mpi if left out.")
    ] = None,
    replace: Replace = 0,
    hosts: Annotated[
        int,
        typer.Option(
            "--hosts", help="Strike so many agents (`lockstep agent`) on this machine instead."
        ),
    ] = 0,
    quiet: QuietVerdict = False,
) -> None:
    """Train with random faults (killed, stopped, slow ranks, …); compare SHA-256s, evaluations."""
    if hosts and launcher is not None:
        raise LaunchError(
            f"--launcher {launcher}: leave it out: with --hosts it is `lockstep agent`"
        )
    foresee_ranks(overrides or [])
    with importing(quiet):
        from rich.console import Console

        from lockstep.cli.prove import chaos as command
    number = (1 if hosts else 4) if ranks is None else ranks
    victims = command.Ranks(number, launcher or "mpi", replace, hosts)
    console = Console(file=sys.stdout)  # this one: what ranks print has a reader of its own
    leave(command.chaos(target, overrides or [], victims, faults, seed, keep, console, quiet))
