"""Interpreters for tests whose subject is not the start of one.

Importing torch takes most of the time of a short training. A server (`server.py`) has imported it
once; an interpreter that tests start (`site/sitecustomize.py`) hands its arguments, environment
and open files over to a process forked from it, and stands for that process: signals go through
it, and both end alike. Launchers, ranks and what they say to each other are real.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOCKET = "LOCKSTEP_TEST_WARM"
_SITE = Path(__file__).parent / "site"


@contextlib.contextmanager
def warm_server() -> Iterator[dict[str, str]]:
    """Runs the server; the environment variables that have interpreters use it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        server = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "server.py", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | threads,
        )
        assert server.stdin
        assert server.stdout
        try:
            assert server.stdout.readline() == b"ready\n"
            yield {SOCKET: str(path), "PYTHONPATH": str(_SITE)}
            assert server.poll() is None, "the warm server has died: tests took longer"
        finally:
            server.stdin.close()  # its sign to end
            server.wait(30)
            server.stdout.close()
