"""Named checks that a script runs on all ranks, one after the other, and reports as JSON."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

from mpi4py import MPI

PREFIX = "check_"


def run(script: dict[str, Any]) -> None:
    """Run what is named `check_...` in a script's globals, in order.

    Prints on rank 0 one JSON line of name to errors (empty if none).
    """
    comm = MPI.COMM_WORLD
    outcome: dict[str, str] = {}
    for name in [name for name in script if name.startswith(PREFIX)]:
        try:
            script[name]()
            error = ""
        except Exception:
            error = f"rank {comm.rank}: {traceback.format_exc()}"
        outcome[name] = "\n".join(e for e in comm.allgather(error) if e)
    if comm.rank == 0:
        print(json.dumps(outcome), flush=True)


def shared_folder() -> Path:
    """A new folder, the same on all ranks."""
    comm = MPI.COMM_WORLD
    made = tempfile.mkdtemp(prefix=f"lockstep-{os.getpid()}-") if comm.rank == 0 else None
    return Path(comm.bcast(made))
