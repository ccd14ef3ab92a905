r"""Runs the benchmarks side by side and writes `docs/benchmarks/core.md` and `core.json`.

A quick or partial run is printed instead, unless `--output` names a folder for it, or `--page` the
page of some cases, as that of the ranks of one host:

    python benchmarks/run.py --page host --only latency --only one_rank --only mlp \
        --only transformer --only busy --only exchange
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from cases import CASES
from comparing import Effort
from machine import machine
from page import command, page, write
from processes import HERE

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


if __name__ == "__main__":
    main()
