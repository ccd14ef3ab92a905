"""Layers in shards and blocks in stages, beside torch's own; writes `docs/benchmarks/parallel.md`.

`--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import statistics

from page import Section, command, duration, publish, ratio
from processes import Program, Result, Spread, alternate
from run import DOCS, machine

LAYERS, PEER = "sharded_layers.py", "peers/dtensor_layers.py"
STAGES, STAGES_PEER = "staged_blocks.py", "peers/pipelining_stages.py"
NUM_MICROBATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--rounds", type=int, default=7, help="how often each program runs")
    parser.add_argument("--only", choices=CASES, action="append", help="may be repeated; prints")
    args = parser.parse_args()
    facts = machine(("torch", "mpi4py"))
    facts["command"] = command("parallel")
    rounds = 1 if args.quick else args.rounds
    sections = [CASES[name](args.quick, rounds) for name in args.only or CASES]
    publish(
        None if args.quick or args.only else DOCS, "parallel", "Shards and stages", facts, sections
    )


def shards_on_one_rank(quick: bool, rounds: int) -> Section:
    """What invariance costs where one rank computes all shards."""
    width = "128" if quick else "1024"
    size = ("--model", "block", "--width", width, "--rows", "512")
    programs = [Program(f"{n} shards", LAYERS, (*size, "--shards", str(n))) for n in (1, 2, 4, 8)]
    results = alternate(programs, rounds)
    section = Section(
        "The cost of shards on one rank",
        f"A block of a transformer, width {width}, 16 heads, 512 tokens, float32, forward and "
        "backward. One rank computes all shards one after another; `1 shards` is the model as it "
        "was written.",
        ("", "time", "time / that of 1 shard"),
        raw=dict(results),
    )
    base = times(results["1 shards"])
    for name, found in results.items():
        slower = Spread.of_ratios(times(found), base)
        section.rows.append((name, duration(Spread.of(times(found))), ratio(slower)))
        if name == "4 shards":
            section.at_most("4 shards cost < 5 %", ratio(slower), slower.median < 1.05)
    return section


def two_ranks(quick: bool, rounds: int) -> Section:
    """Two ranks that share two layers, beside one rank and beside DTensor."""
    size = ("--width", "256" if quick else "4096", "--rows", "256")
    shards = (*size, "--shards", "4")
    programs = [
        Program("one rank, whole", LAYERS, size),
        Program("one rank, 4 shards", LAYERS, shards),
        Program("two ranks, MPI", LAYERS, shards, "mpirun", 2),
        Program("two ranks, gloo", LAYERS, shards, "torchrun", 2),
        Program("DTensor, one rank", PEER, size, "torchrun", 1),
        Program("DTensor, two ranks (gloo)", PEER, size, "torchrun", 2),
    ]
    results = alternate(programs, rounds)
    section = Section(
        "Two ranks share two layers",
        f"Two dense layers of {size[1]}² with GELU between, batch 256, float32, forward and "
        "backward. `bits` is a SHA-256 of output and input gradient: it is to be the same on one "
        "rank and on two.",
        ("", "time", "one rank, whole / this", "bits"),
        raw=dict(results),
    )
    base = times(results["one rank, whole"])
    for name, found in results.items():
        faster = Spread.of_ratios(base, times(found))
        digests = sorted({r["digest"] for r in found})
        row = (name, duration(Spread.of(times(found))), ratio(faster), ", ".join(digests))
        section.rows.append(row)
    ours, theirs = times(results["two ranks, MPI"]), times(results["DTensor, two ranks (gloo)"])
    section.at_least("two ranks over one", Spread.of_ratios(base, ours), 1.7)
    section.at_least("DTensor / Lockstep, on MPI", Spread.of_ratios(theirs, ours), 1.0)
    gloo = times(results["two ranks, gloo"])
    section.at_least("DTensor / Lockstep, both on gloo", Spread.of_ratios(theirs, gloo), 1.0)
    return section


def two_stages(quick: bool, rounds: int) -> Section:
    """Two ranks that share eight blocks, beside one rank and beside torch's pipelines."""
    width, samples = ("64", "1") if quick else ("256", "4")
    size = ("--width", width, "--samples", samples, "--microbatches", str(NUM_MICROBATCHES))
    programs = [
        Program("one rank", STAGES, size),
        Program("two stages, MPI", STAGES, size, "mpirun", 2),
        Program("two stages, gloo", STAGES, size, "torchrun", 2),
        Program("torch, one rank", STAGES_PEER, size, "torchrun", 1),
        Program(
            "torch.distributed.pipelining, two stages (gloo)", STAGES_PEER, size, "torchrun", 2
        ),
    ]
    several = (*size, "--interleave", "2")
    programs += [
        Program("2 x 2 stages, MPI", STAGES, several, "mpirun", 2),
        Program("2 x 2 stages, gloo", STAGES, several, "torchrun", 2),
        Program(
            "torch.distributed.pipelining, 2 x 2 stages (gloo)", STAGES_PEER, several, "torchrun", 2
        ),
    ]
    results = alternate(programs, rounds)
    best = 2 * NUM_MICROBATCHES / (NUM_MICROBATCHES + 1)
    section = Section(
        "Two stages",
        f"Eight blocks of a transformer, width {width}, 8 heads, {NUM_MICROBATCHES} microbatches "
        f"of {samples} x 128 tokens, float32, 1F1B; a whole step with SGD. `bits`: SHA-256 of the "
        f"final parameters. Two stages can be at most {best:.2f} times as fast as one rank; two "
        "for each rank (`mesh.interleave=2`) "
        f"{2 * NUM_MICROBATCHES / (NUM_MICROBATCHES + 0.5):.2f} times.",
        ("", "time", "one rank / this", "bits"),
        raw=dict(results),
    )
    base = times(results["one rank"])
    for name, found in results.items():
        faster = Spread.of_ratios(base, times(found))
        digests = sorted({r["digest"] for r in found})
        row = (name, duration(Spread.of(times(found))), ratio(faster), ", ".join(digests))
        section.rows.append(row)
    ours = [times(results[f"two stages, {name}"]) for name in ("MPI", "gloo")]
    theirs = times(results["torch.distributed.pipelining, two stages (gloo)"])
    section.at_least(
        "two stages over one rank, on MPI", Spread.of_ratios(base, ours[0]), 0.9 * best
    )
    section.at_least("torch / Lockstep, on MPI", Spread.of_ratios(theirs, ours[0]), 1.0)
    section.at_least("torch / Lockstep, both on gloo", Spread.of_ratios(theirs, ours[1]), 1.0)
    ours = [times(results[f"2 x 2 stages, {name}"]) for name in ("MPI", "gloo")]
    theirs = times(results["torch.distributed.pipelining, 2 x 2 stages (gloo)"])
    for name, seconds in zip(("on MPI", "both on gloo"), ours, strict=True):
        what = f"interleaved: torch / Lockstep, {name}"
        section.at_least(what, Spread.of_ratios(theirs, seconds), 1.0)
    return section


CASES = {"shards": shards_on_one_rank, "ranks": two_ranks, "stages": two_stages}


def times(results: list[Result]) -> list[float]:
    """The median of each round, in seconds."""
    return [statistics.median(result["seconds"]) for result in results]


if __name__ == "__main__":
    main()
