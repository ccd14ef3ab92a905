"""Sums of gradients over 4 hosts of 2 ranks, flat and host by host; losses of processes and hosts.

Writes `docs/benchmarks/hosts.md` and `hosts.json`; as root, for it makes network namespaces.
`--quick` sees that everything runs, and prints instead; `--lost` measures losses of hosts only, and
leaves the rest of the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from host_losses import lost
from lab.network import Lab
from lab.ranks import start_ranks
from page import Section, command, duration, publish, ratio
from processes import Spread
from run import DOCS, machine

HOSTS, RANKS = 4, 2
SHAPES = ("100mbit", "1gbit", "20ms")
PARAMETERS = (9_217, 800_000)
MICROBATCHES = (8, 20)
"""Of 8 ranks: aligned ranges, one node each; and ranges that leave several nodes each."""
_ITEM_BYTES = 4
"""Gradients are float32."""
_TIMEOUT_S = 900.0
_ROUNDS = 3
Launcher = Literal["mpi", "torchrun"]
_LAUNCHERS: tuple[Launcher, ...] = ("mpi", "torchrun")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--lost", action="store_true", help="measure the losses only")
    args = parser.parse_args()
    facts = machine(("torch", "mpi4py")) | {"command": command("hosts")}
    losses = lost(1 if args.quick else _ROUNDS, f"Measured {facts['date']}, in turn.")
    if args.lost:
        print(losses.markdown())
        if not args.quick:
            _replace(losses)
        return
    shapes = ("lan",) if args.quick else SHAPES
    sections = [section_of(launcher, shapes, args.quick) for launcher in _LAUNCHERS]
    sections.append(losses)
    publish(
        None if args.quick else DOCS, "hosts", "Hosts of several ranks", facts, sections, _METHOD
    )


def _replace(losses: Section) -> None:
    """Write the section of losses into the page that is there."""
    text, numbers = DOCS / "hosts.md", DOCS / "hosts.json"
    rest, _, _ = text.read_text(encoding="utf-8").partition(f"## {losses.title}")
    text.write_text(f"{rest.rstrip()}\n\n{losses.markdown()}", encoding="utf-8")
    raw = json.loads(numbers.read_text(encoding="utf-8"))
    kept = [section for section in raw["sections"] if section["title"] != losses.title]
    raw["sections"] = [*kept, losses.saved()]
    numbers.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def section_of(launcher: Launcher, shapes: Sequence[str], quick: bool) -> Section:
    """Every network and size, over one library."""
    section = Section(
        "MPI" if launcher == "mpi" else "gloo",
        f"{HOSTS} hosts (network namespaces, `benchmarks/lab`) with {RANKS} ranks each, and "
        f"{MICROBATCHES[0]} microbatches; the file with raw numbers, and targets, have "
        f"{MICROBATCHES[1]} too.",
        ("network", "parameters", "bytes, flat", "bytes, hierarchical", "of flat",
         "over the minimum", "sum, flat", "sum, hierarchical", "faster"),
    )  # fmt: skip
    parts: list[float] = []
    same: list[bool] = []
    for shape in shapes:
        found = measured(launcher, shape, quick)
        section.raw[shape] = found
        for case in found:
            flat, by_host = case["flat"], case["hierarchical"]
            part = min(by_host["bytes"]) / min(flat["bytes"])
            least = 2 * _ITEM_BYTES * case["parameters"] * (HOSTS - 1)
            parts.append(part)
            same.append(flat["sum"] == by_host["sum"])
            if case["microbatches"] != MICROBATCHES[0]:
                continue
            section.rows.append(
                (
                    shape,
                    f"{case['parameters']:,}",
                    f"{min(flat['bytes']):,.0f}",
                    f"{min(by_host['bytes']):,.0f}",
                    f"{part:.2f}",
                    f"{min(by_host['bytes']) / least:.2f}",
                    duration(Spread.of(flat["seconds"])),
                    duration(Spread.of(by_host["seconds"])),
                    ratio(Spread.of_ratios(flat["seconds"], by_host["seconds"])),
                )
            )
    few = sum(part <= 0.5 for part in parts)
    section.at_most("bytes over flat ≤ 0.5", f"{few} of {len(parts)} cases", few == len(parts))
    section.at_most("the same bits both ways", f"{sum(same)} of {len(same)} cases", all(same))
    return section


def measured(launcher: Launcher, shape: str, quick: bool) -> list[dict[str, Any]]:
    """What `host_sums.py` finds in a network."""
    effort = ("--repeats", "1", "--seconds", "0.1") if quick else ("--repeats", "7")
    nums = MICROBATCHES[:1] if quick else MICROBATCHES
    argv = ["--parameters", *map(str, PARAMETERS), "--microbatches", *map(str, nums), *effort]
    with tempfile.TemporaryDirectory() as folder, Lab(HOSTS, shape) as lab:
        out = Path(folder) / "found.json"
        program = [sys.executable, str(Path(__file__).with_name("host_sums.py"))]
        ended = start_ranks(
            lab, RANKS, [*program, *argv, "--out", str(out)], launcher, timeout_s=_TIMEOUT_S,
        )  # fmt: skip
        if ended.exit_code:
            sys.exit(f"hosts: {launcher}, {shape}: ended with {ended.exit_code}")
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return found


_METHOD = (
    "The time of the sum of gradients alone: `flat` with messages between all ranks, "
    "`hierarchical` first inside hosts. Bytes are those on all hosts' interfaces, headers "
    "included. `over the minimum`: bytes divided by 2 P (H - 1), the minimum for a gradient of P "
    "bytes over H hosts. Gradients under a megabyte travel whole: more bytes, fewer messages. On "
    "gloo, large gradients use a ring, so `flat` needs 9.5 P here (12 P over MPI), and the minimum "
    "is 0.63 of it."
)


if __name__ == "__main__":
    main()
