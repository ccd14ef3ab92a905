"""`lockstep comm-profile` beside plain loops; writes `docs/benchmarks/comm-profile.md`.

`--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Literal

from lockstep.planning.operations import parse_sizes, size_text
from lockstep.planning.profile import Layer, from_json
from page import Section, command, duration, publish, ratio
from processes import Program, Result, Spread, alternate
from run import DOCS, machine

OURS, LOOPS = "comm_ranks.py", "comm_loops.py"
NUM_RANKS = 2
LOW, HIGH = 0.67, 1.5
"""Between these, a ratio of times counts as the same: rounds of one program differ as much."""
FROM_BYTES = 64 << 10
"""Below this size, a call of Python's is a part of the time that is worth naming."""

_QUIET = 0.5
"""Busy processes, in the minute before, from which on times cannot be trusted."""

Over = Literal["mpi", "gloo"]

SHOWN = ("1KB", "64KB", "16MB")
"""Sizes that the page has rows of."""
NOT_SHOWN = ("torch/all_gather", "torch/broadcast", "torch/send_recv")
"""Operations that it has none of."""
COUNTERPARTS: dict[Over, tuple[tuple[Layer, str, str], ...]] = {
    "mpi": (
        ("lockstep", "message", "message"),
        ("lockstep", "all_gather", "all_gather"),
        ("lockstep", "broadcast", "broadcast"),
        ("torch", "all_reduce", "all_reduce"),
    ),
    "gloo": (
        ("lockstep", "message", "message"),
        ("lockstep", "all_gather", "all_gather"),
        ("lockstep", "broadcast", "broadcast"),
        ("torch", "all_reduce", "all_reduce"),
        ("torch", "all_gather", "all_gather"),
        ("torch", "broadcast", "broadcast"),
        ("torch", "send_recv", "message"),
    ),
}
"""For each operation of a profile, the loop that does the same."""

OTHER_WAYS: frozenset[tuple[Over, str]] = frozenset(
    {("mpi", "torch/all_reduce"), ("gloo", "lockstep/all_gather")}
)
"""Operations that go another way than their loop, so that how they compare says nothing of clocks:
Lockstep's backend of `torch.distributed`, and memory that ranks of one host share."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--rounds", type=int, default=5, help="how often each program runs")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each profile, about")
    args = parser.parse_args()
    sizes = parse_sizes("1KB,64KB" if args.quick else "1KB:16MB")
    rounds, seconds = (1, 2.0) if args.quick else (args.rounds, args.seconds)
    facts = machine(("torch", "mpi4py", "numpy"))
    facts["command"] = command("comm_profile")
    if os.getloadavg()[0] > _QUIET:
        facts["note"] = "the machine was busy: to be made again when it is quiet"
    overs: tuple[Over, ...] = ("mpi", "gloo")
    sections = [compared(over, sizes, rounds, seconds) for over in overs]
    publish(None if args.quick else DOCS, "comm-profile", "Communication", facts, sections)


def compared(over: Over, sizes: tuple[int, ...], rounds: int, seconds: float) -> Section:
    """Both programs over one kind of connection."""
    launcher: Literal["mpirun", "torchrun"] = "mpirun" if over == "mpi" else "torchrun"
    request = json.dumps({"sizes": sizes, "seconds": seconds, "device": "cpu"})
    listed = ",".join(map(str, sizes))
    each = str(seconds / (4 * len(sizes)))
    programs = [
        Program("ours", OURS, (request,), launcher, NUM_RANKS),
        Program(
            "loops", LOOPS, ("--over", over, "--sizes", listed, "--seconds", each), launcher,
            NUM_RANKS,
        ),
    ]  # fmt: skip
    results = alternate(programs, rounds)
    how = "mpi4py and NumPy arrays" if over == "mpi" else "`torch.distributed` under torchrun"
    text = (
        f"Medians of single calls on {NUM_RANKS} ranks of one host, each the time of its slowest "
        f"rank, beside loops without Lockstep (`benchmarks/comm_loops.py`: {how}; ping-pong as "
        "`osu_latency`, collectives as `osu_allreduce`). Targets: the median of comm-profile / "
        f"loop of all sizes from {size_text(FROM_BYTES)} on. The file with raw numbers has more."
        if over == "mpi"
        else f"As above, beside {how}. `lockstep/all_gather` of up to 1.25 MiB uses shared memory, "
        "the loop sockets."
    )
    section = Section(
        f"Over {over}",
        text,
        ("operation", "size", "comm-profile", "loop", "comm-profile / loop"),
        raw=dict(results),
    )
    worst: dict[str, list[float]] = {}
    for layer, name, loop in COUNTERPARTS[over]:
        for size in sizes:
            ours = [of_profile(r, layer, name, size) for r in results["ours"]]
            theirs = [float(r["median_s"][loop][str(size)]) for r in results["loops"]]
            if None in ours:
                continue
            mine = [each for each in ours if each is not None]
            quotient = Spread.of_ratios(mine, theirs)
            key = f"{layer}/{name}"
            if size >= FROM_BYTES and (over, key) not in OTHER_WAYS:
                worst.setdefault(key, []).append(quotient.median)
            if size_text(size) in SHOWN and key not in NOT_SHOWN:
                section.rows.append(
                    (key, size_text(size), duration(Spread.of(mine)),
                     duration(Spread.of(theirs)), ratio(quotient))
                )  # fmt: skip
    for key, quotients in worst.items():
        middle = statistics.median(quotients)
        section.at_most(
            f"{key} within {LOW}–{HIGH}",
            f"{middle:.2f} ({min(quotients):.2f}–{max(quotients):.2f})", LOW <= middle <= HIGH,
        )  # fmt: skip
    return section


def of_profile(result: Result, layer: Layer, name: str, size: int) -> float | None:
    """The median of one size of an operation, in seconds; None if it was skipped."""
    found = from_json(json.dumps(result)).find(layer, name, "inside")
    points = found.points if found else ()
    return next((p.median_s for p in points if p.num_bytes == size), None)


if __name__ == "__main__":
    main()
