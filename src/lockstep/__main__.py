"""`python -m lockstep` is the `lockstep` command."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command; Ctrl-C ends it at once while it is imported."""
    if os.environ.pop("PYTHONINSPECT", ""):
        # With it, the interpreter shows exit codes as tracebacks; it has read it at its start.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    folder = ""
    if "LOCKSTEP_SESSION" in os.environ and sys.orig_argv[1:3] == ["-m", "lockstep"]:
        # Else a rank would import a torch.py or random.py of the working directory.
        folder = "" if getattr(sys.flags, "safe_path", False) else sys.path.pop(0)

    from lockstep.comm.host import collect_seldom, forget_empty_window
    from lockstep.launching.rank.early import ending_at_interrupt

    collect_seldom()
    forget_empty_window()
    with ending_at_interrupt():
        from lockstep.cli.main import main as command
        from lockstep.launching.warm import Forked

        if folder:
            _search_behind_standard_library(folder)
    try:
        command()
    except Forked as forked:
        rank = forked.with_traceback(None)  # this process is another one from here on
    from lockstep.launching.warm.rank import run

    run(rank)
    sys.exit(0)


def _search_behind_standard_library(folder: str) -> None:
    """Have a task's modules found before those that are installed, once torch is imported."""
    import torch  # noqa: F401  # as in ranks that are forked

    library = os.path.dirname(os.__file__)
    compiled = os.path.join(library, "lib-dynload")
    places = [place for place, each in enumerate(sys.path, 1) if each in (library, compiled)]
    sys.path.insert(max(places, default=0), folder)


if __name__ == "__main__":
    main()
