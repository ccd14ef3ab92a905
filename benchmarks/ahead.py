"""Parameters and gradients that travel while ranks compute; writes `docs/benchmarks/ahead.md`.

As root, for it makes network namespaces. `--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from typing import NamedTuple

from lab.network import Lab
from lab.ranks import Launcher, start_ranks
from page import Section, command, duration, publish, ratio
from processes import HERE, Spread
from run import DOCS, machine

_SCRIPT = "sliced_blocks.py"
_RATE = 1e9 / 8
"""Bytes per second of the network."""
_WIDTH = 1024
_UNIT_BYTES = 4 * _WIDTH * (_WIDTH + 1)
_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each program runs")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    facts = machine(("torch", "mpi4py")) | {"command": command("ahead")}
    sections = [
        gradients(rounds, args.quick),
        parameters(rounds, args.quick),
    ]
    publish(None if args.quick else DOCS, "ahead", "Messages during computing", facts, sections)


class Sizes(NamedTuple):
    """What two hosts train."""

    blocks: int
    samples: int
    microbatches: int
    sharding: str


def gradients(rounds: int, quick: bool) -> Section:
    """The exchange of gradients begins in the last backward pass of a step."""
    sizes = Sizes(blocks=26, samples=256, microbatches=2, sharding="none")
    received = sizes.blocks * _UNIT_BYTES
    return between_hosts("Gradients, two hosts at 1 Gbit/s", sizes, received, rounds, quick)


def parameters(rounds: int, quick: bool) -> Section:
    """Slices of parameters are gathered ahead."""
    sizes = Sizes(blocks=8, samples=320, microbatches=4, sharding="parameters")
    # Of each microbatch's round a rank receives half of each block twice, but that of the last one
    # once, and as much of gradients.
    received = sizes.microbatches // 2 * (3 * sizes.blocks - 1) * _UNIT_BYTES / 2
    title = "`sharding=parameters`, two hosts at 1 Gbit/s"
    return between_hosts(title, sizes, received, rounds, quick)


def between_hosts(title: str, sizes: Sizes, received: float, rounds: int, quick: bool) -> Section:
    """Two hosts with a rank each, where messages take as long as computing."""
    exchange = received / _RATE
    section = Section(
        title,
        f"{sizes.blocks} blocks of width {_WIDTH}, {sizes.microbatches} microbatches. `computing`: "
        "a step of one rank with half of them. `exchange`: "
        f"{received / 1e6:.0f} MB for each rank at the link's rate. `at best`: the greater.",
        ("library", "a step, one after the other", "a step, at once", "faster", "computing",
         "exchange", "at once / at best"),
    )  # fmt: skip
    launchers: tuple[Launcher, ...] = ("torchrun", "mpi")
    for launcher in launchers:
        found: dict[str, list[float]] = {"waits": [], "ahead": [], "computing": []}
        for _ in range(rounds):
            found["waits"].append(step_on(launcher, 2, sizes, quick, "--waits"))
            found["ahead"].append(step_on(launcher, 2, sizes, quick))
            found["computing"].append(step_on(launcher, 1, sizes, quick))
        section.raw[launcher] = found
        best = [max(seconds, exchange) for seconds in found["computing"]]
        section.rows.append(
            (
                "gloo" if launcher == "torchrun" else "MPI",
                duration(Spread.of(found["waits"])),
                duration(Spread.of(found["ahead"])),
                ratio(Spread.of_ratios(found["waits"], found["ahead"])),
                duration(Spread.of(found["computing"])),
                f"{exchange:.2f} s",
                ratio(Spread.of_ratios(found["ahead"], best)),
            )
        )
    return section


def step_on(launcher: Launcher, num_hosts: int, sizes: Sizes, quick: bool, *more: str) -> float:
    """Seconds of a step on hosts of a laboratory, the median; on one of them a share of it."""
    share = sizes.microbatches // 2 * num_hosts
    size = ("--width", _WIDTH, "--blocks", sizes.blocks, "--sharding", sizes.sharding)
    samples = 8 if quick else sizes.samples
    argv = (*size, "--samples", samples, "--microbatches", share, "--repeats", 1 if quick else 4)
    program = [sys.executable, str(HERE / _SCRIPT), *map(str, argv), "--no-peak", *more]
    with Lab(num_hosts, "1gbit") as lab, tempfile.TemporaryFile("w+") as said:
        ended = start_ranks(lab, 1, program, launcher, timeout_s=_TIMEOUT_S, output=said)
        said.seek(0)
        lines = said.read().splitlines()
    results = [json.loads(line) for line in lines if line.startswith("{")]
    if ended.exit_code or not results:
        sys.exit("\n".join(["ahead: ranks on hosts have failed", *lines]))
    return statistics.median(results[0]["seconds"])


if __name__ == "__main__":
    main()
