"""Interpreters for tests whose subject is not the start of one.

Importing torch takes most of the time of a short training. A server (`server.py`) has imported it
once; an interpreter that tests start (`site/sitecustomize.py`) hands its arguments, environment
and open files over to a process forked from it, and stands for that process, as ranks do that the
command starts (`lockstep.launching.warm`). Launchers, ranks and what they say to each other are
real.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.launching.host.parent_watch import bound_to_parent
from lockstep.launching.warm.server import listener

SERVER = "LOCKSTEP_TEST_WARM"
_FOLDER = Path(__file__).parent


@contextlib.contextmanager
def warm_server() -> Iterator[dict[str, str]]:
    """Runs the server; the environment variables that have interpreters use it."""
    name = f"lockstep-tests-{os.urandom(8).hex()}"
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    with listener(name) as line:
        server = subprocess.Popen(
            bound_to_parent([sys.executable, str(_FOLDER / "server.py"), str(line.fileno()), name]),
            env=os.environ | threads,
            pass_fds=(line.fileno(),),
        )
    try:
        yield {SERVER: name, "PYTHONPATH": str(_FOLDER / "site")}
        assert server.poll() is None, "the warm server has died: tests took longer"
    finally:
        server.kill()
        server.wait(30)
