"""`python -m lockstep` is the `lockstep` command."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from lockstep.comm.host import collect_seldom, forget_empty_window
from lockstep.launching.rank.early import ending_at_interrupt


def main() -> NoReturn:
    """Run the command; Ctrl-C ends it at once while it is imported."""
    if os.environ.pop("PYTHONINSPECT", ""):
        # With it, the interpreter shows exit codes as tracebacks; it has read it at its start.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    collect_seldom()
    forget_empty_window()
    with ending_at_interrupt():
        from lockstep.cli.main import main as command
        from lockstep.launching.warm import Forked
    try:
        command()
    except Forked as forked:
        rank = forked.with_traceback(None)  # this process is another one from here on
    from lockstep.launching.warm.rank import run

    run(rank)
    sys.exit(0)


if __name__ == "__main__":
    main()
