"""What subcommands share: options, exit codes, spinners, and the subcommands that systems add."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from lockstep import __version__
from lockstep.config.files import create_beside
from lockstep.config.parsing import shown
from lockstep.errors import DataError, LaunchError, file_errors
from lockstep.launching.job.preflight import (
    address_space,
    processor_time,
    temporary_folder,
    threads,
)
from lockstep.launching.rank.early import ending_at_interrupt, is_rank
from lockstep.launching.systems import CommandGroup

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.launching.systems import HasCommands


def check_writable(path: Path | None) -> None:
    """Check that a file can be written, before a long measurement; None stands for no file.

    Raises:
        DataError: it cannot.
    """
    if path is None:
        return
    with file_errors(DataError, path):
        if path.is_dir():
            raise IsADirectoryError(0, "is a folder")
        temporary, descriptor = create_beside(path)
        os.close(descriptor)
        temporary.unlink()


@contextmanager
def folder_for(keep: Path | None, command: str) -> Iterator[Path]:
    """The folder for the runs of a command: `keep`, or a temporary one that is removed at the end.

    Args:
        keep: folder of the user's choice, if there is one.
        command: name of the command.
    """
    if keep is not None:
        yield keep
        return
    prefix = f"lockstep-{command}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


_CLEAR_LINE_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"


@contextmanager
def importing(quiet: bool = False) -> Iterator[None]:
    """The context of slow imports: Ctrl-C ends the process at once, and a spinner shows activity.

    The spinner is shown on a terminal only, and by no rank: ranks may share a terminal.

    Args:
        quiet: whether to show no spinner.

    Raises:
        LaunchError: this system lacks something that they need.
    """
    capable = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    if quiet or is_rank() or not (sys.stdout.isatty() and capable):
        with ending_at_interrupt(), _importable():
            yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    console = Console()
    live = Live(
        Spinner(_spinner_name(console), text="importing torch"),
        console=console,
        transient=True,
        redirect_stderr=sys.stderr.isatty(),
    )
    with _importable(), ending_at_interrupt(_give_terminal_back), live:
        yield


@contextmanager
def _importable() -> Iterator[None]:
    """Turn the failed import of torch into one message, where a limit of the system explains it."""
    if obstacle := address_space() or processor_time() or threads():
        raise LaunchError(str(obstacle))
    try:
        yield
    except OSError:
        if obstacle := temporary_folder():
            raise LaunchError(str(obstacle)) from None
        raise
    except ValueError as error:
        value = os.environ.get("TORCH_LOGS", "")
        if "torch" in sys.modules or not value:
            raise
        remedy = "name logs that torch knows (TORCH_LOGS=help lists them), or unset the variable"
        found = error if value.strip("+") == "help" else f"torch cannot be imported; {remedy}"
        raise LaunchError(f"TORCH_LOGS={shown(value)}: {found}") from None


def shown_status(console: Console, text: str, quiet: bool) -> AbstractContextManager[Any]:
    """A context that shows `text` beside a spinner on a terminal, unless `quiet`."""
    return nullcontext() if quiet else console.status(text, spinner=_spinner_name(console))


def _spinner_name(console: Console) -> str:
    """A spinner that the console can encode, without the slow import of `observe`'s terminal."""
    return "dots" if console.encoding.startswith("utf") else "line"


def _give_terminal_back() -> None:
    """Remove the spinner; called by a signal handler before the process ends."""
    os.write(sys.__stdout__.fileno() if sys.__stdout__ else 1, _CLEAR_LINE_SHOW_CURSOR)


Target = Annotated[str, typer.Argument(help="A recipe's name, file.py, or file.py:Task.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value]...", help="Config keys and values.")
]
Ranks = Annotated[int | None, typer.Option("-n", "--ranks", help="Number of ranks to start.")]
LauncherOption = Annotated[
    str | None,
    typer.Option("--launcher", help="python, mpi, local or torchrun; chosen if left out."),
]
TrainLauncher = Annotated[
    str | None,
    typer.Option("--launcher", help="python, mpi, local, torchrun or ray; chosen if left out."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address", metavar="HOST:PORT", help="Ray's cluster, or auto: that of this host."
    ),
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
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="Show checkpoints and all evaluations, too."),
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


def show_help(context: typer.Context) -> None:
    """Print a group's help where no subcommand is given, which is no error."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def show_version(is_wanted: bool) -> None:
    """Print the version and leave, for `--version`."""
    if is_wanted:
        print(f"lockstep {__version__}")
        raise typer.Exit


def _app_of(group: CommandGroup) -> typer.Typer:
    """The subcommands of a system, imported now."""
    with ending_at_interrupt():
        return cast("HasCommands", importlib.import_module(group.module)).app


def contributed_command(group: CommandGroup) -> type[TyperCommand]:
    """A command that is a recipe's own; its module is imported when it is parsed or called."""

    class Contributed(TyperCommand):
        @cached_property
        def _imported(self) -> Any:
            return typer.main.get_command(_app_of(group))

        # Click's initialiser assigns these, and they are not known before the import.
        params = property(lambda self: self._imported.params, lambda _self, _value: None)
        callback = property(lambda self: self._imported.callback, lambda _self, _value: None)

    return Contributed


def contributed(group: CommandGroup) -> typer.Typer:
    """A group whose module is imported when one of its subcommands is used."""

    class Contributed(TyperGroup):
        @cached_property
        def _imported(self) -> TyperGroup:
            return typer.main.get_group(_app_of(group))

        def list_commands(self, ctx: Any) -> list[str]:
            return self._imported.list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return self._imported.get_command(ctx, cmd_name)

    return typer.Typer(
        name=group.name,
        help=group.summary,
        cls=Contributed,
        callback=show_help,
        invoke_without_command=True,
    )
