"""A launcher of its own process: `launcher.py KIND RANKS RUN_DIR COMMAND...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lockstep.launching.job.commands import (
    local_command,
    mpirun_command,
    python_command,
    rank_environment,
    torchrun_command,
)
from lockstep.launching.job.run import run_ranks


def main(kind: str, ranks: int, run_dir: Path, argv: list[str]) -> None:
    if kind == "mpi":
        command = mpirun_command(ranks, argv, cores=1)
    elif kind == "local":
        command = local_command(ranks, argv)
    else:
        command = python_command(argv) if kind == "python" else torchrun_command(ranks, argv)
    run_ranks(
        command,
        rank_environment(1),
        run_dir=run_dir,
        on_row=lambda row: print(json.dumps(row), flush=True),
        on_notice=lambda notice: print("notice:", notice, flush=True),
    )


main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
