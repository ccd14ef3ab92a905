"""Subcommands that show, diagnose and watch runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import importing, leave
from lockstep.launching.rank.early import ending_at_interrupt


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
        from lockstep.cli.look import report as command
    print("\n".join(command.report(runs, output, markdown, figures)))


def diagnose(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each cause.")] = False,
    flight: Annotated[
        Path | None,
        typer.Option(
            "--flight",
            metavar="DIR",
            help="Write the newest calls of ranks, of a hang or loss, for torch's flight recorder.",
        ),
    ] = None,
) -> None:
    """Say why a run is slow, or has ended: what costs most first, and what to do."""
    with ending_at_interrupt():
        from lockstep.cli.look import report as command
    for line in command.diagnose(run_dir, as_json, flight):
        print(line)


def monitor(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="Run directories, or folders with runs; runs."),
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve a page for browsers.")] = False,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address to listen at; this machine only if left out."),
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port of the page.")] = None,
    token: Annotated[str | None, typer.Option("--token", help="What the page asks for.")] = None,
    prometheus: Annotated[
        int | None, typer.Option("--prometheus", metavar="PORT", help="Listen for Prometheus.")
    ] = None,
    alerts: Annotated[
        Path | None, typer.Option("--alerts", metavar="FILE", help="Rules of alerts, in YAML.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say only what the rules would watch.")
    ] = False,
    grafana: Annotated[
        Path | None,
        typer.Option("--grafana", metavar="FILE", help="Write a dashboard for Grafana only."),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print what is known, and end; with --alerts, 1 if one is on."),
    ] = False,
) -> None:
    """Watch runs while they go on: on the terminal, in a browser, by Prometheus, by alerts.

    It reads run directories, so it costs the ranks nothing. Where there is no terminal it prints
    a line for each event.
    """
    with ending_at_interrupt():
        from lockstep.cli.look.monitor import Options
        from lockstep.cli.look.monitor import monitor as command
    options = Options(
        folders=folders or (),
        web=web,
        host=host,
        port=port,
        token=token,
        prometheus=prometheus,
        alerts=alerts,
        check=check,
        grafana=grafana,
        interval_s=interval,
        once=once,
    )
    leave(command(options))
