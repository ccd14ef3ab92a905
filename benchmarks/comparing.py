"""Programs that are compared, and what a section says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from page import Section, duration, number, ratio
from processes import Program, Spread, alternate

SETTLED = (
    "The first 2,000 steps of Lockstep are left out: in them it looks for hidden state (see "
    "[guards](guards.md)). "
)
"""What pages say of `Effort.settled`."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        quick: as little as shows that everything runs.
    """

    quick: bool

    def rounds(self, full: int) -> int:
        """How often programs take turns."""
        return 1 if self.quick else full

    def length(self, steps: int, warmup: int, repeats: int) -> tuple[str, ...]:
        """The arguments that say how long a program measures."""
        if self.quick:
            steps, warmup, repeats = max(1, steps // 20), 1, 1
        return ("--steps", str(steps), "--warmup", str(warmup), "--repeats", str(repeats))

    @property
    def settled(self) -> tuple[str, ...]:
        """The arguments that leave out the steps in which Lockstep looks for hidden state most."""
        # In its first seconds a run may do so for 0.2 s in all (`guards.py`).
        return () if self.quick else ("--warmup", "2000")


def compared(
    section: Section,
    programs: Sequence[Program],
    rounds: int,
    targets: Sequence[tuple[int, float, str]],
) -> Section:
    """Fill a section with the samples/s of programs, relative to the first one.

    Args:
        section: to fill.
        programs: the first one is what the others are compared with.
        rounds: of all programs.
        targets: (number of the program, least ratio, what to call it).
    """
    results = alternate(programs, rounds)
    first = programs[0].name
    speeds = {name: [r["samples_per_s"] for r in found] for name, found in results.items()}
    ratios = {name: Spread.of_ratios(speeds[first], found) for name, found in speeds.items()}
    section.header = ("", "samples/s", "step", f"speed of {first} / this one's")
    section.rows = [
        [
            name,
            number(Spread.of(speeds[name])),
            duration(Spread.of([r["step_s"] for r in found])),
            "" if name == first else ratio(ratios[name]),
        ]
        for name, found in results.items()
    ]
    for index, target, called in targets:
        section.at_least(f"samples/s / {called}'s", ratios[programs[index].name], target)
    section.raw = dict[str, Any](results)
    return section


def speedup(section: Section, program: Program, reference: Program) -> Spread:
    """How many times as many samples/s a program of a filled section computes as another."""
    fast, slow = ([r["samples_per_s"] for r in section.raw[p.name]] for p in (program, reference))
    return Spread.of_ratios(fast, slow)


def side_by_side(arguments: tuple[str, ...]) -> Program:
    name = "two plain loops, fused Adam, no exchange"
    return Program(name, "peers/plain.py", (*arguments, "--fused"), "torchrun", 2)


def bare_mpi(name: str, arguments: tuple[str, ...]) -> Program:
    return Program(name, "peers/bare_mpi.py", arguments, "mpirun", 2)


def work(model: str, batch: int | None = None) -> tuple[str, ...]:
    return ("--model", model, *(() if batch is None else ("--batch", str(batch))))


def lockstep(name: str, arguments: tuple[str, ...], num_ranks: int = 1) -> Program:
    script = "lockstep_loop.py"
    return Program(name, script, arguments, "mpirun" if num_ranks > 1 else "python", num_ranks)


def peer(name: str, script: str, arguments: tuple[str, ...]) -> Program:
    return Program(name, f"peers/{script}.py", arguments, "torchrun", 2)


def percent(part: Spread) -> str:
    low, middle, high = (f"{100 * v:.2f}" for v in (part.low, part.median, part.high))
    return f"{middle} % ({low}–{high})"
