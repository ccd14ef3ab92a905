"""The published reasoning model beside a plain loop, and what carries cost.

Writes `docs/benchmarks/hrm.md`; `--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import statistics

from page import Section, command, duration, publish, ratio
from processes import Program, Result, Spread, alternate
from run import DOCS, machine

STEPS, COPIES = "reasoning_steps.py", "carry_copies.py"
SLOTS = 384
"""Of the published global batch on one GPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each program runs")
    args = parser.parse_args()
    facts = machine(("torch", "mpi4py"))
    facts["command"] = command("hrm")
    rounds = 1 if args.quick else args.rounds
    steps, slot_s = published_model(args.quick, rounds)
    sections = [steps, copies(args.quick, rounds, slot_s)]
    publish(None if args.quick else DOCS, "hrm", "Reasoning in segments", facts, sections)


def published_model(quick: bool, rounds: int) -> tuple[Section, float]:
    """A step beside a plain loop; also seconds of one slot on two ranks."""
    slots, steps = (2, 1) if quick else (32, 2)
    size = ("--slots", str(slots), "--steps", str(steps))
    programs = [
        Program("a plain loop", STEPS, (*size, "--plain")),
        Program("Lockstep, one rank", STEPS, size),
        Program("Lockstep, two ranks (MPI)", STEPS, size, "mpirun", 2),
    ]
    results = alternate(programs, rounds)
    section = Section(
        "A step of the published model",
        "The hierarchical model for Sudoku with 27,275,266 parameters "
        f"(`preset=sudoku-extreme-hrm`) in float32, {slots} slots, AdamATan2. The plain loop "
        "computes the same formulas on the "
        "whole batch; Lockstep computes two microbatches, sums them in order, checks and keeps "
        "what slots carry. `bits` is the beginning of a SHA-256 of the final parameters: it is to "
        "be the same on one rank and on two.",
        ("", "time of a step", "plain loop / this", "bits"),
        raw=dict(results),
    )
    base = times(results["a plain loop"])
    for name, found in results.items():
        digests = ", ".join(sorted({r["digest"] for r in found}))
        faster = Spread.of_ratios(base, times(found))
        section.rows.append((name, duration(Spread.of(times(found))), ratio(faster), digests))
    one, two = times(results["Lockstep, one rank"]), times(results["Lockstep, two ranks (MPI)"])
    section.at_least("plain loop / Lockstep on one rank", Spread.of_ratios(base, one), 0.95)
    section.at_least("one rank / two ranks", Spread.of_ratios(one, two), 1.8)
    return section, min(two) / slots


def copies(quick: bool, rounds: int, slot_s: float) -> Section:
    """What it costs to keep carries, and to have each of them on two ranks."""
    more = ("--repeats", "2" if quick else "7")
    results = alternate([Program("two ranks (MPI)", COPIES, more, "mpirun", 2)], rounds)
    (found,) = results.values()
    kept = Spread.of([statistics.median(r["kept_s"]) for r in found])
    sent = Spread.of([statistics.median(r["sent_s"]) for r in found])
    step_s = slot_s * SLOTS
    section = Section(
        "What slots carry, and its copies",
        f"A slot is a puzzle's place in the batch. {SLOTS} slots of the published Sudoku size: two "
        "states of 82 x 512 in bf16 each, puzzle, "
        f"labels and counts; {found[0]['mbytes']:.1f} MB on each of two ranks. `keeping` is what "
        "each step costs on one rank too: a copy for the task, and one of what it returns. "
        "`copies` sends it to the next rank (`carry.buddy`). A step of so many slots would take "
        f"{step_s:.0f} s on these two ranks: {SLOTS} times the time of a slot above, not measured.",
        ("", "time in a step", "part of such a step"),
        raw=dict(results),
    )
    for name, spread in (("keeping", kept), ("copies", sent)):
        section.rows.append((name, duration(spread), f"{100 * spread.median / step_s:.3f} %"))
    part = (kept.median + sent.median) / step_s
    section.at_most("carry and buddy ≤ 5 % of a step", f"{100 * part:.3f} %", part <= 0.05)
    return section


def times(found: list[Result]) -> list[float]:
    """The median step of each round, in seconds."""
    return [statistics.median(result["step_s"]) for result in found]


if __name__ == "__main__":
    main()
