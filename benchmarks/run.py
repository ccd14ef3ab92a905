"""Runs the benchmarks side by side and writes `host.md` and `core.md` in `docs/benchmarks/`.

A quick or partial run is printed instead, unless `--output` names a folder for it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cases import CASES
from comparing import Effort
from machine import machine
from page import command, publish
from processes import HERE

DOCS = HERE.parent / "docs" / "benchmarks"

PAGES: Mapping[str, Sequence[str]] = {
    "host": ("latency", "one_rank", "mlp", "transformer", "busy", "exchange"),
    "core": ("scaling", "checkpoint", "memory", "allreduce"),
}
"""The cases of each page; all of them are on one."""
TITLES = {
    "host": "Benchmarks of a step: one rank, and two of one host",
    "core": "Benchmarks of the core: scaling, checkpoints, memory, sums",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--only", choices=CASES, action="append", help="may be repeated")
    parser.add_argument("--page", choices=PAGES, action="append", help="may be repeated")
    parser.add_argument("--output", type=Path, help="folder for the pages and their raw numbers")
    args = parser.parse_args()
    is_whole = not args.quick and args.only is None
    folder = args.output or (DOCS if is_whole else None)
    for name in args.page or PAGES:
        cases = [case for case in PAGES[name] if args.only is None or case in args.only]
        if cases:
            make(name, cases, Effort(args.quick), folder)


def make(name: str, cases: Sequence[str], effort: Effort, folder: Path | None) -> None:
    """Measure some cases of a page; print it, or write it into a folder."""
    started = time.perf_counter()
    facts = machine()
    sections = []
    for case in cases:
        print(f"{case} ({time.perf_counter() - started:.0f} s)", file=sys.stderr)
        sections += CASES[case](effort)
    facts["took"] = f"{time.perf_counter() - started:.0f} s"
    facts["command"] = command("run")
    if effort.quick:
        facts["quick"] = "yes: these numbers mean nothing"
    publish(folder, name, TITLES[name], facts, sections)
    if folder is not None:
        print(f"written to {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
