"""How long it takes until something is there: from a command to its result, or to the first step.

Writes `docs/benchmarks/starts.md` and `starts.json`; `--print` writes nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lockstep.launching.host.processes import usable_cores
from lockstep.launching.job.commands import mpirun_command, rank_environment
from lockstep.observe import read_events
from page import Section, command, duration, publish
from processes import Spread
from run import DOCS, machine

_HELP, _FIRST = 0.3, 3.0
_MEET = "import torch; from mpi4py import MPI; MPI.COMM_WORLD.barrier()"
_LOCKSTEP = (sys.executable, "-m", "lockstep")
_STEPS = ("steps=20", "log_every=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--print", action="store_true", help="instead of writing the page")
    args = parser.parse_args()
    facts = machine(("torch", "mpi4py")) | {"command": command("starts")}
    sections = [_commands(args.rounds), _trainings(args.rounds)]
    publish(None if args.print else DOCS, "starts", "Starts", facts, sections)


def _commands(rounds: int) -> Section:
    section = Section(
        "Commands",
        "From the command to its end; modules are compiled, and in the system's cache.",
        ("command", "time"),
    )
    programs = {
        "`python -c pass`": [sys.executable, "-c", "pass"],
        "`lockstep --help`": [*_LOCKSTEP, "--help"],
        "`lockstep recipes`": [*_LOCKSTEP, "recipes"],
        "`lockstep runs --help`": [*_LOCKSTEP, "runs", "--help"],
    }
    ended = {name: partial(_ended, argv) for name, argv in programs.items()}
    found = _in_turn(ended, rounds)
    for name, (spread,) in found.items():
        section.rows.append((name, duration(spread)))
    for name in ("`lockstep --help`", "`lockstep recipes`"):
        spread = found[name][0]
        section.at_most(f"{name} ≤ {_HELP} s", duration(spread), spread.median <= _HELP)
    section.raw = {name: [vars(s) for s in spreads] for name, spreads in found.items()}
    return section


def _trainings(rounds: int) -> Section:
    section = Section(
        "Trainings",
        "`lockstep train digits steps=20`: from the command to the end of the first step, and to "
        "its own end. Beside it what Python, torch and MPI need alone: ranks import torch, meet "
        "in a barrier, and end.",
        ("program", "first step", "end"),
    )
    meet = mpirun_command(2, [sys.executable, "-c", _MEET], cores=usable_cores()).argv
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = _in_turn(
            {
                "`import torch`": partial(_ended, [sys.executable, "-c", "import torch"]),
                "`import torch` and a barrier, mpirun, 2 ranks": partial(_ended, meet),
                "Lockstep, 1 rank": partial(_trained, folder, ()),
                "Lockstep, `-n 2` (MPI)": partial(_trained, folder, ("-n", "2")),
                "Lockstep, `-n 2 --launcher local`": partial(
                    _trained, folder, ("-n", "2", "--launcher", "local")
                ),
            },
            rounds,
        )
    for name, spreads in found.items():
        shown = [duration(spread) for spread in spreads]
        section.rows.append((name, *shown) if len(shown) == 2 else (name, "", *shown))
    first = found["Lockstep, `-n 2` (MPI)"][0]
    section.at_most(f"first step of `-n 2` ≤ {_FIRST:g} s", duration(first), first.median <= _FIRST)
    section.raw = {name: [vars(s) for s in spreads] for name, spreads in found.items()}
    return section


def _in_turn(
    programs: Mapping[str, Callable[[], Sequence[float]]], rounds: int
) -> dict[str, list[Spread]]:
    """Of each program, the spread of each of its times; one round before that does not count."""
    found: dict[str, list[Sequence[float]]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, program in programs.items():
            times = program()
            said = ", ".join(f"{seconds:.2f} s" for seconds in times)
            print(f"  {name}: {said}", file=sys.stderr, flush=True)
            if number:
                found[name].append(times)
    return {
        name: [Spread.of(each) for each in zip(*rows, strict=True)] for name, rows in found.items()
    }


def _ended(argv: Sequence[str]) -> Sequence[float]:
    started = time.time()
    subprocess.run(argv, env=rank_environment(1), capture_output=True, check=True, timeout=120)
    return (time.time() - started,)


def _trained(folder: Path, options: Sequence[str]) -> Sequence[float]:
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    argv = [*_LOCKSTEP, "train", "digits", *_STEPS, "--run-dir", str(run_dir), *options]
    started = time.time()
    (ended,) = _ended(argv)
    rows = read_events(run_dir / "events.jsonl")
    first = next(row["time"] for row in rows if row["event"] == "StepDone")
    return first - started, ended


if __name__ == "__main__":
    main()
