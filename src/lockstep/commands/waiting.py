"""A spinner on a terminal while a command has nothing to show yet."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lockstep.errors import LaunchError
from lockstep.launchers.job.preflight import address_space, temporary_folder
from lockstep.launchers.rank.early import ending_at_interrupt, is_rank

if TYPE_CHECKING:
    from rich.console import Console

_CLEAR_LINE_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"


@contextmanager
def importing(quiet: bool = False) -> Iterator[None]:
    """Ctrl-C ends the process at once, and a spinner shows that it works: for slow imports.

    The spinner is on a terminal only. Ranks have none, for they may share one terminal.

    Args:
        quiet: whether to show no spinner.

    Raises:
        LaunchError: they need what this system does not have.
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
    """Say in one message what torch, or what it imports, needs and does not find."""
    if obstacle := address_space():
        raise LaunchError(str(obstacle))
    try:
        yield
    except OSError:
        if obstacle := temporary_folder():
            raise LaunchError(str(obstacle)) from None
        raise


def shown_status(console: Console, what: str, quiet: bool) -> AbstractContextManager[Any]:
    """A context in which `what` goes on, with a spinner on a terminal unless `quiet`."""
    return nullcontext() if quiet else console.status(what, spinner=_spinner_name(console))


def _spinner_name(console: Console) -> str:
    """A spinner that the console can encode; as `observe.terminal`, which takes long to import."""
    return "dots" if console.encoding.startswith("utf") else "line"


def _give_terminal_back() -> None:
    """Remove the spinner in a process that ends at once; from a signal handler."""
    os.write(sys.__stdout__.fileno() if sys.__stdout__ else 1, _CLEAR_LINE_SHOW_CURSOR)
