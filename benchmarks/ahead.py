"""Slices of parameters that travel while blocks are computed; writes `docs/benchmarks/ahead.md`.

As root, for it makes network namespaces. `--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from typing import Literal

from lab.network import Lab
from lab.ranks import Launcher, start_ranks
from page import Section, command, duration, page, ratio, write
from processes import HERE, Program, Spread, alternate
from run import DOCS, machine
from slices import peak, times

_SCRIPT = "sliced_blocks.py"
_SHARDED = ("--sharding", "parameters")
_RATE = 1e9 / 8
"""Bytes per second of the network."""
_WIDTH, _BLOCKS, _SAMPLES, _MICROBATCHES = 1024, 8, 320, 4
_UNIT_BYTES = 4 * _WIDTH * (_WIDTH + 1)
_TIMEOUT_S = 120.0
_MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each program runs")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    facts = machine(("torch", "mpi4py")) | {"command": command("ahead")}
    sections = [between_hosts(rounds, args.quick), on_one_host(rounds, args.quick)]
    text = page("Gathering ahead", facts, sections)
    if args.quick:
        print(text)
        return
    write(DOCS, "ahead", text, facts, sections)


def between_hosts(rounds: int, quick: bool) -> Section:
    """Two hosts with a rank each, where messages take as long as computing."""
    # Of each microbatch's round a rank receives half of each block twice, but that of the last one
    # once, and as much of gradients.
    received = _MICROBATCHES // 2 * (3 * _BLOCKS - 1) * _UNIT_BYTES / 2
    exchange = received / _RATE
    section = Section(
        "Two hosts at 1 Gbit/s",
        f"A rank on each of two network namespaces, {_BLOCKS} blocks of width {_WIDTH}, "
        f"{_MICROBATCHES} microbatches of {_SAMPLES} samples. A rank receives "
        f"{received / 1e6:.0f} MB in a step. `computing`: a step of one rank with half of the "
        "microbatches. `exchange`: those bytes at the link's rate, headers not counted. `at best`: "
        "the greater of both.",
        ("library", "a step, one after the other", "a step, ahead", "faster", "computing",
         "exchange", "ahead / at best"),
    )  # fmt: skip
    launchers: tuple[Launcher, ...] = ("torchrun", "mpi")
    for launcher in launchers:
        found: dict[str, list[float]] = {"waits": [], "ahead": [], "computing": []}
        for _ in range(rounds):
            found["waits"].append(step_on(launcher, 2, quick, "--waits"))
            found["ahead"].append(step_on(launcher, 2, quick))
            found["computing"].append(step_on(launcher, 1, quick))
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


def step_on(launcher: Launcher, num_hosts: int, quick: bool, *more: str) -> float:
    """Seconds of a step on hosts of a laboratory, the median; on one of them a share of it."""
    share = _MICROBATCHES // 2 * num_hosts
    size = ("--width", _WIDTH, "--blocks", _BLOCKS, "--samples", 8 if quick else _SAMPLES)
    argv = map(str, (*size, "--microbatches", share, "--repeats", 1 if quick else 4))
    program = [sys.executable, str(HERE / _SCRIPT), *argv, *_SHARDED, "--no-peak", *more]
    with Lab(num_hosts, "1gbit") as lab, tempfile.TemporaryFile("w+") as said:
        ended = start_ranks(lab, 1, program, launcher, timeout_s=_TIMEOUT_S, output=said)
        said.seek(0)
        lines = said.read().splitlines()
    results = [json.loads(line) for line in lines if line.startswith("{")]
    if ended.exit_code or not results:
        sys.exit("\n".join(["ahead: ranks on hosts have failed", *lines]))
    return statistics.median(results[0]["seconds"])


def on_one_host(rounds: int, quick: bool) -> Section:
    """Two ranks on two cores, both of which compute: nothing to hide, and nothing to lose."""
    width = 256 if quick else 2048
    size = ("--width", str(width), "--blocks", "6", "--repeats", "1" if quick else "5", *_SHARDED)
    programs = []
    launchers: dict[str, Literal["mpirun", "torchrun"]] = {"gloo": "torchrun", "MPI": "mpirun"}
    for library, launcher in launchers.items():
        for samples in ("32", "256"):
            for name, more in (("one after the other", ("--waits",)), ("ahead", ())):
                arguments = (*size, "--samples", samples, *more)
                title = f"{library}, {samples} samples, {name}"
                programs.append(Program(title, _SCRIPT, arguments, launcher, 2))
    results = alternate(programs, rounds)
    section = Section(
        "One host",
        f"2 ranks with a core each, 6 blocks of width {width}, 8 microbatches. Ranks of one host "
        "move what they gather with the cores that they compute with.",
        ("", "one after the other", "ahead", "faster", "peak", "peak, ahead"),
        raw=dict(results),
    )
    for title in [name.rpartition(",")[0] for name in results if name.endswith("ahead")]:
        waits, ahead = (results[f"{title}, {name}"] for name in ("one after the other", "ahead"))
        pair = [times(found) for found in (waits, ahead)]
        section.rows.append(
            (
                title,
                *(duration(Spread.of(seconds)) for seconds in pair),
                ratio(Spread.of_ratios(*pair)),
                *(f"{peak(found) / _MIB:,.0f} MiB" for found in (waits, ahead)),
            )
        )
        section.raw[f"{title}, same bits"] = len({r["digest"] for r in (*waits, *ahead)}) == 1
    same = all(value for name, value in section.raw.items() if name.endswith("same bits"))
    section.at_most("the same bits both ways", "all cases" if same else "not all cases", same)
    return section


if __name__ == "__main__":
    main()
