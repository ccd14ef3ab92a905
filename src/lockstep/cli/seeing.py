"""Subcommands that read runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.commands.waiting import importing
from lockstep.launchers.rank.early import ending_at_interrupt


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="One run, or several.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write; report.html in the run.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown, with its pictures beside it.")
    ] = False,
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Pictures as SVG and PNG too.")
    ] = None,
) -> None:
    """Write one page about a run, or about how several differ."""
    with importing():
        from lockstep.commands import report as command
    print("\n".join(command.report(runs, output, markdown, figures)))


def diagnose(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each cause.")] = False,
) -> None:
    """Say why a run is slow, or has ended: what costs most first, and what to do."""
    with ending_at_interrupt():
        from lockstep.commands import diagnose as command
    for line in command.diagnose(run_dir, as_json):
        print(line)
