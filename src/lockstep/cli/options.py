"""Options that several subcommands take, and how they end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str, typer.Argument(help="A recipe's name, file.py, or file.py:Task.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value]...", help="Config keys and values.")
]
Ranks = Annotated[int | None, typer.Option("-n", "--ranks", help="Number of ranks to start.")]
LauncherOption = Annotated[
    str | None,
    typer.Option("--launcher", help="python, mpi, local or torchrun; chosen if left out."),
]
Replace = Annotated[
    int,
    typer.Option(
        "--replace", min=0, help="Start this many new processes at most for killed ranks."
    ),
]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Show warnings, errors and the last line only.")
]
QuietVerdict = Annotated[
    bool, typer.Option("-q", "--quiet", help="Show failures and the verdict only.")
]
PerRank = Annotated[
    bool, typer.Option("--per-rank", help="Show what each rank does with its time.")
]
Profile = Annotated[
    bool, typer.Option("--profile", help="Each rank records some steps with torch's profiler.")
]
ProfileSteps = Annotated[
    str | None,
    typer.Option("--profile-steps", metavar="FIRST:LAST", help="Which steps it records; 10:13."),
]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="best, latest, or a step's number.")]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="Where the run's files go.")]


def leave(code: int) -> None:
    """End the command, unless all went well."""
    if code:
        raise typer.Exit(code)
