"""Measures the recipe `ufs` and writes `docs/benchmarks/ufs.md` and `ufs.json`.

A quick or partial run is printed instead, unless `--output` names a folder for it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from comparing import Effort
from lockstep.launching.host.processes import usable_cores
from page import Section, command, duration, number, publish, ratio
from processes import Program, Spread, alternate
from run import DOCS, machine

TARGET_LOSS = 1e-4
PACKAGES = ("lockstep-train", "torch", "numpy", "mpi4py", "netCDF4")


def one_rank(effort: Effort) -> Section:
    """What the loop costs where there is nobody to talk to."""
    length = effort.length(200, 40, 5)
    programs = [
        Program("Lockstep", "ufs_train.py", length),
        Program("DataLoader loop", "peers/ufs_loop.py", (*length, "--loader")),
        Program("plain tensor loop", "peers/ufs_loop.py", length),
        Program("plain tensor loop, fused Adam", "peers/ufs_loop.py", (*length, "--fused")),
    ]
    section = Section(
        "Training, 1 process, batch 1000",
        "The system's network (14 → 64 → 64 → 64 → 1, 9,345 parameters) and rows. The DataLoader "
        "has torch's defaults; the tensor loops gather batches with one index operation.",
    )
    return _compared(section, programs, effort.rounds(5), {1: (4.0, (3, 1)), 2: (0.95, (3, 2))})


def two_ranks(effort: Effort) -> Section:
    """What two ranks gain."""
    length = effort.length(200, 40, 5)
    programs = [
        Program("Lockstep, 2 ranks (MPI)", "ufs_train.py", length, "mpirun", 2),
        Program("Lockstep, 1 rank", "ufs_train.py", length),
        Program(
            "DDP + DataLoader, 2 ranks (gloo)", "peers/ufs_loop.py", (*length, "--loader"),
            "torchrun", 2,
        ),
        Program("DDP, tensor loop, 2 ranks (gloo)", "peers/ufs_loop.py", length, "torchrun", 2),
        Program(
            "two plain loops, fused Adam, no exchange", "peers/ufs_loop.py",
            (*length, "--apart", "--fused"), "torchrun", 2,
        ),
        Program("one plain loop, fused Adam", "peers/ufs_loop.py", (*length, "--fused")),
        Program(
            "plain loop, fused Adam, mpi4py, 2 ranks", "peers/ufs_loop.py", (*length, "--fused"),
            "mpirun", 2,
        ),
    ]  # fmt: skip
    section = Section(
        "Training, 2 ranks, batch 1000 a rank",
        "Samples of both ranks. `no exchange`: two separate models. The last row sums the flat "
        "gradient with one call of mpi4py, without an engine.",
    )
    targets = {1: (1.8, (4, 5)), 2: (8.0, (4, 2))}
    found = _compared(section, programs, effort.rounds(5), targets)
    found.verdicts.append(
        "- With mpi4py's sum and without an engine, two processes are "
        f"{ratio(_gain(found, programs[6], programs[5]))} of one, and "
        f"{ratio(_gain(found, programs[6], programs[2]))} of DDP + DataLoader."
    )
    return found


def time_to_target(effort: Effort) -> Section:
    """Seconds to a validation loss, with the recipe's defaults: the same steps on any ranks."""
    section = Section(
        f"Time to a validation loss of {TARGET_LOSS:g}",
        "The system's defaults: global batch 1000 in 4 microbatches, evaluated every 100 steps. "
        "Seconds of training and evaluation, without start-up. The bits, and so the steps, are the "
        "same on any number of ranks.",
        ("", "steps", "time", "1 rank's time / this one's"),
    )
    target = ("--target", str(TARGET_LOSS))
    programs = [
        Program(
            f"{n} rank{'s'[: n > 1]}", "ufs_train.py", target, "mpirun" if n > 1 else "python", n
        )
        for n in (1, 2, 4)
        if n <= usable_cores()
    ]
    results = alternate(programs, effort.rounds(3))
    first = [r["seconds"] for r in results[programs[0].name]]
    for program in programs:
        seconds = [r["seconds"] for r in results[program.name]]
        steps = f"{results[program.name][0]['step']:.0f}"
        gain = ratio(Spread.of_ratios(first, seconds))
        section.rows.append((program.name, steps, duration(Spread.of(seconds)), gain))
    section.raw = dict(results)
    return section


def jacobians(effort: Effort) -> Section:
    """Rows a second."""
    section = Section(
        "Jacobians",
        "∂aice/∂input of all training rows in physical units, one thread: batched "
        "(`jacobian.physical`) and with `torch.autograd.grad` a row at a time.",
        ("", "rows/s"),
    )
    results = alternate([Program("Jacobians", "ufs_jacobians.py")], effort.rounds(3))["Jacobians"]
    for name in ("batched", "loop"):
        section.rows.append((name, number(Spread.of([r[name] for r in results]))))
    pairs = [r["batched"] for r in results], [r["loop"] for r in results]
    section.at_least("batched / loop", Spread.of_ratios(*pairs), 50)
    section.raw = {"results": results}
    return section


def reading(effort: Effort) -> Section:
    """Speed and memory."""
    section = Section(
        "Reading 721 × 1440 cells, 14 inputs and aice, 4 times",
        "One process reads, checks and keeps all ocean cells in files, and draws 400,000 rows; "
        "`from what is kept` is a later start. Peak memory is beyond that of the imports. "
        "`read(2)` and `netCDF4 alone` read as much and keep nothing. Files are dropped from the "
        "kernel's cache before each run.",
        ("", "time", "MB/s of the variables", "memory, MiB"),
    )
    with tempfile.TemporaryDirectory() as folder:
        alternate([Program("write", "ufs_reading.py", (folder, "--write"))], 1)
        programs = [
            Program("system", "ufs_reading.py", (folder,)),
            Program("system, 2 ranks", "ufs_reading.py", (folder,), "mpirun", 2),
            Program("system, from what is kept", "ufs_reading.py", (folder, "--again")),
            Program("read(2)", "ufs_reading.py", (folder, "--raw")),
            Program("netCDF4 alone", "ufs_reading.py", (folder, "--netcdf")),
        ]
        results = alternate(programs, effort.rounds(3))
    for program in programs:
        found = results[program.name]
        memory = Spread.of([r["mib_peak"] - r["mib_before"] for r in found])
        speed = Spread.of([r["mb_per_s"] for r in found])
        seconds = Spread.of([r["seconds"] for r in found])
        section.rows.append((program.name, duration(seconds), number(speed), number(memory)))
    whole = results["system"][0]["mib_of_data"]
    section.verdicts.append(f"- All values together are {whole:.0f} MiB.")
    section.raw = dict(results)
    return section


CASES = {
    "one_rank": one_rank,
    "two_ranks": two_ranks,
    "time_to_target": time_to_target,
    "jacobians": jacobians,
    "reading": reading,
}


def _compared(
    section: Section,
    programs: list[Program],
    rounds: int,
    targets: dict[int, tuple[float, tuple[int, int]]],
) -> Section:
    """Fill a section: the first program against all others.

    Args:
        section: to fill.
        programs: that are compared.
        rounds: of all programs.
        targets: by the position of a program, the least ratio, and the positions of two programs
            without an engine that show what it could be at best.
    """
    results = alternate(programs, rounds)
    section.header = ("", "samples/s", "step", f"{programs[0].name} / this one's")
    section.raw = dict(results)
    for position, program in enumerate(programs):
        found = results[program.name]
        gain = _gain(section, programs[0], program)
        section.rows.append(
            (
                program.name,
                number(Spread.of([r["samples_per_s"] for r in found])),
                duration(Spread.of([r["step_s"] for r in found])),
                ratio(gain) if position else "",
            )
        )
        if position in targets:
            target, (above, below) = targets[position]
            best = _gain(section, programs[above], programs[below])
            section.at_least(f"samples/s / those of {program.name}", gain, target, best)
    return section


def _gain(section: Section, above: Program, below: Program) -> Spread:
    pairs = ([r["samples_per_s"] for r in section.raw[p.name]] for p in (above, below))
    return Spread.of_ratios(*pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--only", choices=CASES, action="append", help="may be repeated")
    parser.add_argument("--output", type=Path, help="folder for ufs.md and ufs.json")
    args = parser.parse_args()
    started = time.perf_counter()
    facts = machine(PACKAGES)
    facts["command"] = command("ufs")
    folder = args.output or (None if args.quick or args.only else DOCS)
    sections: list[Section] = []
    for name in args.only or CASES:
        sections.append(CASES[name](Effort(args.quick)))
        facts["took"] = f"{time.perf_counter() - started:.0f} s"
        if folder is not None or len(sections) == len(args.only or CASES):
            # Written after each case: what there is, should a later one fail.
            publish(folder, "ufs", "Benchmarks of the sea-ice emulator", facts, sections)


if __name__ == "__main__":
    main()
