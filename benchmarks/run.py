r"""Runs the benchmarks side by side and writes `docs/benchmarks/core.md` and `core.json`.

A quick or partial run is printed instead, unless `--output` names a folder for it, or `--page` the
page of some cases, as that of the ranks of one host:

    python benchmarks/run.py --page host --only latency --only one_rank --only mlp \
        --only transformer --only busy --only exchange
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from cases import CASES
from comparing import Effort
from lockstep.launchers.host.cores import usable_cores
from lockstep.launchers.job.commands import find_mpirun, mpi_version
from page import command, page, write
from processes import HERE

PACKAGES = ("lockstep-train", "torch", "numpy", "mpi4py", "lightning", "accelerate")
DOCS = HERE.parent / "docs" / "benchmarks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--only", choices=CASES, action="append", help="may be repeated")
    parser.add_argument("--page", default="core", help="name of the page of some cases")
    parser.add_argument("--output", type=Path, help="folder for the page and its raw numbers")
    args = parser.parse_args()
    whole = not args.quick and (args.only is None or args.page != "core")
    started = time.perf_counter()
    facts = machine()
    sections = []
    for name in args.only or CASES:
        print(f"{name} ({time.perf_counter() - started:.0f} s)", file=sys.stderr)
        sections += CASES[name](Effort(args.quick))
    facts["took"] = f"{time.perf_counter() - started:.0f} s"
    facts["command"] = command("run")
    if args.quick:
        facts["quick"] = "yes: these numbers mean nothing"
    title = "Benchmarks of the core" if args.page == "core" else f"Benchmarks: {args.page}"
    text = page(title, args.page, facts, sections)
    folder = args.output or (DOCS if whole else None)
    if folder is None:
        print(text)
        return
    write(folder, args.page, text, facts, sections)
    print(f"written to {folder}", file=sys.stderr)


def machine(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "date": f"{datetime.now():%Y-%m-%d}",
        "CPU": f"{cpu_model()}, {usable_cores()} cores",
        "load before": f"{os.getloadavg()[0]:.1f} processes (1 minute's mean)",
        "system": platform.platform(),
        "Python": platform.python_version(),
        **{name: version(name) for name in packages},
        "MPI": mpi_version(find_mpirun()),
    }


def cpu_model() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
