"""The console that commands and runs print on."""

from __future__ import annotations

import errno
import os
import sys

from rich.console import Console
from rich.text import Text


class _SteadyConsole(Console):
    """A console whose reader may go away (`lockstep train | head`) without ending training."""

    def on_broken_pipe(self) -> None:
        """Print to nowhere from now on, instead of leaving the process as the base class does.

        Raises:
            BrokenPipeError: this once, for `Sinks` to make a warning of.
        """
        # Else what is still buffered would make the interpreter exit with an error.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.file.fileno())
        os.close(devnull)
        raise BrokenPipeError(errno.EPIPE, "whoever read the console's output is gone")


def stdout_console() -> Console:
    """A console on standard output: interactive only where that is a terminal.

    FORCE_COLOR gives colours to a log file too, but no progress bar.
    """
    shown = sys.stdout is not None and sys.stdout.isatty() and _reaches_terminal()
    capable = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    if not shown and not os.environ.get("FORCE_COLOR"):
        return _SteadyConsole(force_terminal=False, force_interactive=False, highlight=False)
    return _SteadyConsole(force_interactive=shown and capable, highlight=False)


def styled(console: Console, line: str, style: str = "") -> Text:
    """Text the console can encode, whatever a path or a metric's name holds."""
    encoding = console.encoding
    return Text(line.encode(encoding, "backslashreplace").decode(encoding), style)


def spinner_name(console: Console) -> str:
    """The name of a spinner of `rich` that the console can encode."""
    return "dots" if console.encoding.startswith("utf") else "line"


def _reaches_terminal() -> bool:
    """Whether a terminal that is this process's standard output is one that people look at.

    Open MPI gives each rank a terminal of its own, and passes on what it shows to wherever its own
    standard output goes, which may be a pipe or a log file.
    """
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return True
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False
