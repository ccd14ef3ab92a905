"""Sharded parameters, beside torch's FSDP2; writes `docs/benchmarks/slices.md`.

`--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import statistics

from page import Section, command, duration, publish, ratio
from processes import Program, Result, Spread, alternate
from run import DOCS, machine

OURS, PEER = "sliced_blocks.py", "peers/fsdp_blocks.py"
_MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each program runs")
    args = parser.parse_args()
    facts = machine(("torch",))
    facts["command"] = command("slices")
    section = measured(args.quick, 1 if args.quick else args.rounds)
    publish(None if args.quick else DOCS, "slices", "Sharded parameters", facts, [section])


def measured(quick: bool, rounds: int) -> Section:
    """Time of a step and peak of memory, with each kind of slices and with FSDP2."""
    size = ("--width", "128", "--blocks", "4") if quick else ("--width", "2048", "--blocks", "24")

    def ours(sharding: str) -> tuple[str, ...]:
        return (*size, "--sharding", sharding)

    programs = [
        Program("one rank", OURS, size),
        Program("2 ranks, sharding=none", OURS, ours("none"), "torchrun", 2),
        Program("2 ranks, sharding=gradients", OURS, ours("gradients"), "torchrun", 2),
        Program("2 ranks, sharding=parameters", OURS, ours("parameters"), "torchrun", 2),
        Program("FSDP2, 2 ranks", PEER, size, "torchrun", 2),
        Program("4 ranks, sharding=parameters", OURS, ours("parameters"), "torchrun", 4),
        Program("FSDP2, 4 ranks", PEER, size, "torchrun", 4),
    ]
    results = alternate(programs, rounds)
    width, num_blocks = int(size[1]), int(size[3])
    millions = num_blocks * width * (width + 1) / 1e6
    section = Section(
        "Peak memory and time of a step",
        f"{num_blocks} blocks of width {width}, {millions:.1f} million parameters, Adam, float32, "
        "8 microbatches of 32 samples, gloo. The peak is the greatest of all ranks, Python and "
        "torch included; Lockstep's includes the check of the first microbatch and a checkpoint. "
        "Both use large pages (`THP_MEM_ALLOC_ENABLE=1`). Time is that of a whole step; 4 ranks "
        "share two cores. `bits` is a SHA-256 of the final parameters.",
        ("", "time", "peak", "peak / one rank's", "bits"),
        raw=dict(results),
    )
    base = peak(results["one rank"])
    for name, found in results.items():
        digests = sorted({r["digest"] for r in found})
        section.rows.append(
            (
                name,
                duration(Spread.of(times(found))),
                f"{peak(found) / _MIB:,.0f} MiB",
                f"{peak(found) / base:.2f}",
                ", ".join(digests),
            )
        )
    for num_ranks, most in ((2, 0.6), (4, 0.35)):
        part = peak(results[f"{num_ranks} ranks, sharding=parameters"]) / base
        section.at_most(
            f"peak of {num_ranks} ranks over one's ≤ {most}", f"{part:.2f}", part <= most
        )
    two, four = (
        Spread.of_ratios(
            times(results[f"FSDP2, {num_ranks} ranks"]),
            times(results[f"{num_ranks} ranks, sharding=parameters"]),
        )
        for num_ranks in (2, 4)
    )
    section.at_least("FSDP2 / Lockstep, time on 2 ranks", two, 1.0)
    section.verdicts.append(f"- FSDP2 / Lockstep, time on 4 ranks: {ratio(four)}.")
    return section


def times(results: list[Result]) -> list[float]:
    """The median of each round, in seconds."""
    return [statistics.median(result["seconds"]) for result in results]


def peak(results: list[Result]) -> float:
    """The median of each round, in bytes."""
    return statistics.median(float(result["peak_bytes"]) for result in results)


if __name__ == "__main__":
    main()
