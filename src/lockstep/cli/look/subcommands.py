"""Subcommands that list, show, diagnose and watch runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lockstep.cli.options import importing, leave
from lockstep.errors import RunDirectoryError
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


class _ListsByDefault(TyperGroup):
    """What is no subcommand's name is a folder to list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = args and (args[0] in self.commands or args[0] in ("-h", "--help"))
        return super().parse_args(ctx, args if known else ["list", *args])


app = typer.Typer(cls=_ListsByDefault)

Folders = Annotated[
    list[Path] | None, typer.Argument(metavar="[DIR]...", help="Folders with runs; runs.")
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where", metavar="CONDITION", help="Such as state=failed, val/loss<0.3, lr>=0.01."
    ),
]


@app.command("list")
def list_runs(
    folders: Folders = None,
    where: Where = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="KEY", help="Ascending; -KEY: descending.")
    ] = "",
    columns: Annotated[
        str | None,
        typer.Option("--columns", help="Keys such as name,state,val/loss,lr instead of the usual."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
) -> None:
    """List runs: newest last.

    A key is a field (name, task, state, step, ranks, seconds, tags, sha256, …), a metric such as
    val/loss, or a key of the config.
    """
    from lockstep.cli.look.report import as_rows, print_table
    from lockstep.launching.remote import local_runs
    from lockstep.launching.remote_directory import url_of
    from lockstep.observe.reading.listing import chosen, find_runs, summarise

    searched = folders or [Path("runs") if Path("runs").is_dir() else Path()]
    where_to_look = ", ".join(url_of(folder) or str(folder) for folder in searched)
    searched = [local_runs(folder) for folder in searched]
    found = find_runs(searched)
    runs = chosen(map(summarise, found), where or [], sort)
    if as_json:
        sys.stdout.writelines(as_rows(runs, columns))
    else:
        print_table(runs, searched, columns, len(found), where_to_look)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
) -> None:
    """Say how runs differ: config, result, and the first step and tensor at which two part.

    Exits with 1 if two runs of one config part.
    """
    from lockstep.cli.look.report import compared
    from lockstep.launching.remote import local_copy
    from lockstep.observe.text import printable

    if len(runs) < 2:
        raise RunDirectoryError("compare needs two run directories at least")
    lines, differ = compared([local_copy(run) for run in runs])
    print("\n".join(map(printable, lines)))
    if differ:
        raise typer.Exit(1)


@app.command()
def tag(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="Words.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="TAG", help="Take this one off.")
    ] = None,
) -> None:
    """Put words on a run, to find it by; without any, print those that it has."""
    from lockstep.observe.reading.listing import change_tags, is_run, read_tags
    from lockstep.observe.text import printable

    _check_local(run)
    if not is_run(run):
        raise RunDirectoryError(f"{run}: is no run directory")
    changes = tags or remove
    tags_now = change_tags(run, tags or [], remove or []) if changes else read_tags(run)
    print(*map(printable, tags_now))


@app.command()
def remove(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove runs: their checkpoints, events and results, and nothing else that is there."""
    from lockstep.observe.reading.listing import is_run, remove_run
    from lockstep.observe.text import printable

    for run in runs:
        _check_local(run)
        if not is_run(run):
            raise RunDirectoryError(f"{run}: is no run directory; nothing was removed")
    if not yes:
        typer.confirm(f"Remove {', '.join(map(str, runs))}?", abort=True)
    for run in runs:
        left = remove_run(run)
        kept = f"; kept what Lockstep has not written: {', '.join(left)}" if left else ""
        print(printable(f"removed {run}{kept}"))


def _check_local(run: Path) -> None:
    """Refuse a run in object storage, which this process has no lock on."""
    from lockstep.launching.remote_directory import url_of

    if (url := url_of(run)) is not None:
        raise RunDirectoryError(
            f"{url}: runs in object storage cannot be tagged or removed here; use the tools of the "
            "storage"
        )
