"""Sums of gradients over 4 hosts of 2 ranks, flat and host by host: bytes between hosts and times.

Writes `docs/benchmarks/hosts.md` and `hosts.json`; as root, for it makes network namespaces.
`--quick` sees that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lab.network import Lab
from lab.ranks import start_ranks
from page import Section, command, duration, page, ratio, write
from processes import Spread
from run import DOCS, machine

HOSTS, RANKS = 4, 2
SHAPES = ("100mbit", "1gbit", "20ms")
PARAMETERS = (9_217, 800_000)
MICROBATCHES = (8, 20)
"""Of 8 ranks: aligned ranges, one node each; and ranges that leave several nodes each."""
_SCRIPT = Path(__file__).with_name("host_sums.py")
_TIMEOUT_S = 900.0
Launcher = Literal["mpi", "torchrun"]
_LAUNCHERS: tuple[Launcher, ...] = ("mpi", "torchrun")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    args = parser.parse_args()
    facts = machine(("torch", "mpi4py")) | {"command": command("hosts")}
    shapes = ("lan",) if args.quick else SHAPES
    sections = [section_of(launcher, shapes, args.quick) for launcher in _LAUNCHERS]
    text = page("Hosts of several ranks", "hosts", facts, sections, _METHOD)
    if args.quick:
        print(text)
        return
    write(DOCS, "hosts", text, facts, sections)


def section_of(launcher: Launcher, shapes: Sequence[str], quick: bool) -> Section:
    """Every network and size, over one library."""
    section = Section(
        "MPI" if launcher == "mpi" else "gloo",
        f"{HOSTS} hosts (network namespaces, `benchmarks/lab`) with {RANKS} ranks each.",
        ("network", "parameters", "microbatches", "bytes, flat", "bytes, hierarchical", "of flat",
         "sum, flat", "sum, hierarchical", "faster"),
    )  # fmt: skip
    for shape in shapes:
        found = measured(launcher, shape, quick)
        section.raw[shape] = found
        for case in found:
            flat, by_host = case["flat"], case["hierarchical"]
            part = min(by_host["bytes"]) / min(flat["bytes"])
            section.rows.append(
                (
                    shape,
                    f"{case['parameters']:,}",
                    str(case["microbatches"]),
                    f"{min(flat['bytes']):,.0f}",
                    f"{min(by_host['bytes']):,.0f}",
                    f"{part:.2f}",
                    duration(Spread.of(flat["seconds"])),
                    duration(Spread.of(by_host["seconds"])),
                    ratio(Spread.of_ratios(flat["seconds"], by_host["seconds"])),
                )
            )
            what = (
                f"{shape}, {case['parameters']:,} parameters, {case['microbatches']} microbatches"
            )
            section.at_most(f"bytes over flat ≤ 0.5, {what}", f"{part:.3f}", part <= 0.5)
            same = flat["sum"] == by_host["sum"]
            section.at_most(f"one sum, {what}", "the same" if same else "another one", same)
    return section


def measured(launcher: Launcher, shape: str, quick: bool) -> list[dict[str, Any]]:
    """What `host_sums.py` finds in a network."""
    effort = ("--repeats", "1", "--seconds", "0.1") if quick else ("--repeats", "7")
    sizes = [str(n) for n in PARAMETERS]
    nums = [str(n) for n in (MICROBATCHES[:1] if quick else MICROBATCHES)]
    with tempfile.TemporaryDirectory() as folder, Lab(HOSTS, shape) as lab:
        out = Path(folder) / "found.json"
        ended = start_ranks(
            lab, RANKS,
            [sys.executable, str(_SCRIPT), "--parameters", *sizes, "--microbatches", *nums,
             *effort, "--out", str(out)],
            launcher, timeout_s=_TIMEOUT_S, env=os.environ,
        )  # fmt: skip
        if ended.exit_code:
            sys.exit(f"hosts: {launcher}, {shape}: the ranks ended with {ended.exit_code}")
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return found


_METHOD = (
    "A sum is what a step does with gradients, without computing them: `flat` with messages of "
    "every rank to every other one, `hierarchical` first inside hosts. Both take turns in one run. "
    "A cell shows the median of the repeats, each a mean on the slowest rank, and in brackets the "
    "least and the greatest. Bytes are those that all hosts send in a sum by their interfaces, "
    "with all headers and acknowledgements, the least of the repeats. With one node of the tree "
    "for each host no sum of a gradient of P bytes over H hosts takes fewer than 2 P (H - 1) "
    "between them."
)


if __name__ == "__main__":
    main()
