"""A table of rows beside a small one, and beside `nn.Embedding` under DistributedDataParallel.

Writes `docs/benchmarks/tables.md`; `--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import statistics

from page import Section, command, duration, publish, ratio
from processes import Program, Result, Spread, alternate
from run import DOCS, machine
from table_steps import BATCH, DIM

STEPS, PEER = "table_steps.py", "peers/sparse_ddp.py"
SMALL, LARGE = 10_000, 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--rounds", type=int, default=5, help="how often each program runs")
    args = parser.parse_args()
    facts = machine(("torch", "mpi4py"))
    facts["command"] = command("tables")
    rounds = 1 if args.quick else args.rounds
    sections = [sizes(args.quick, rounds), peers(args.quick, rounds)]
    publish(None if args.quick else DOCS, "tables", "Tables of rows", facts, sections)


def arguments(rows: int, quick: bool, *more: str) -> tuple[str, ...]:
    return ("--rows", str(rows), "--steps", "3" if quick else "100", *more)


def sizes(quick: bool, rounds: int) -> Section:
    """A step with a large table beside one with a small table."""
    programs = [
        Program(name, STEPS, arguments(rows, quick), "mpirun", 2)
        for name, rows in ((f"{SMALL:,} rows", SMALL), (f"{LARGE:,} rows", LARGE))
    ]
    results = alternate(programs, rounds)
    section = Section(
        "A large table beside a small one",
        f"Two ranks over MPI; {BATCH} rows of {DIM} elements are drawn uniformly in each step, and "
        "stepped by SGD; a linear layer on top. With copies on the next rank. Megabytes are what "
        "the first rank sends in a step about rows.",
        ("", "time of a step", "megabytes"),
        raw=dict(results),
    )
    for name, found in results.items():
        sent = Spread.of([r["mbytes"] for r in found])
        section.rows.append((name, duration(Spread.of(times(found))), f"{sent.median:.2f}"))
    small, large = (results[p.name] for p in programs)
    slower = Spread.of_ratios(times(large), times(small))
    section.at_most("large / small, time ≤ 1.05", ratio(slower), slower.median <= 1.05)
    sent = Spread.of_ratios([r["mbytes"] for r in large], [r["mbytes"] for r in small])
    section.at_most("large / small, megabytes ≤ 1.05", ratio(sent), sent.median <= 1.05)
    return section


def peers(quick: bool, rounds: int) -> Section:
    """The large table beside an embedding with sparse gradients, copied to each rank."""
    rows = LARGE if not quick else SMALL
    programs = [
        Program("Lockstep, two ranks (gloo)", STEPS, arguments(rows, quick), "torchrun", 2),
        Program("Lockstep, two ranks (MPI)", STEPS, arguments(rows, quick), "mpirun", 2),
        Program("DDP, sparse=True", PEER, arguments(rows, quick), "torchrun", 2),
    ]
    results = alternate(programs, rounds)
    section = Section(
        "Beside DistributedDataParallel",
        f"The same with {rows:,} rows beside `nn.Embedding(sparse=True)` under "
        "DistributedDataParallel on gloo, where each rank holds the whole table. Time spent "
        "loading data is not counted for either. Under torchrun Lockstep keeps no copies on other "
        "ranks, since under torchrun a lost rank ends the run.",
        ("", "time of a step", "DDP / this"),
        raw=dict(results),
    )
    base = times(results["DDP, sparse=True"])
    for name, found in results.items():
        faster = Spread.of_ratios(base, times(found))
        section.rows.append((name, duration(Spread.of(times(found))), ratio(faster)))
    gloo = times(results["Lockstep, two ranks (gloo)"])
    section.at_least("DDP / Lockstep, both on gloo", Spread.of_ratios(base, gloo), 5.0)
    message = Spread.of([statistics.median(r["message_s"]) for r in results["DDP, sparse=True"]])
    fifth = statistics.median(base) / 5
    section.verdicts.append(
        f"- What stops it: a message of 32 bytes takes {duration(message)} on gloo here. DDP's "
        "step has four messages, Lockstep's has eight, since rows come from other ranks. A fifth "
        f"of DDP's step, {1e3 * fifth:.2f} ms, is the time of {fifth / message.median:.1f}. What "
        "Lockstep's table saves is memory: DDP has all rows on each rank."
    )
    return section


def times(results: list[Result]) -> list[float]:
    """Of each round, the least-noisy time of a step: the lower quartile."""
    return [sorted(r["step_s"])[len(r["step_s"]) // 4] for r in results]


if __name__ == "__main__":
    main()
