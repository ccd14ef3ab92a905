"""What the loss of ranks costs; writes `docs/benchmarks/recovery.md` and `recovery.json`."""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import asdict
from typing import Any

from page import Section, command, duration, page, write
from processes import Spread
from recovery_runs import (
    TORCHFT_JOIN_MS,
    calm,
    hogged,
    interrupted,
    lost,
    replaced,
    sharded,
    teardown,
    torchft,
)
from run import DOCS, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="kills for each number of ranks")
    parser.add_argument("--seed", type=int, default=0, help="which ranks, and when")
    parser.add_argument("--interrupted-s", type=float, default=300, help="length of that run")
    parser.add_argument("--hogged-s", type=float, default=600, help="length of that run")
    args = parser.parse_args()
    source = random.Random(args.seed)
    facts = machine()
    sections = [
        _killed(args.rounds, source),
        _stopped(args.rounds, source),
        _replaced(args.rounds),
        _hogged(args.hogged_s),
        _interrupted(args.interrupted_s),
        _calm(args.rounds),
        _buddies(args.rounds),
    ]
    facts["command"] = command("recovery")
    text = page("Benchmark of recovery", facts, sections)
    write(DOCS, "recovery", text, facts, sections)
    print(text)


def _killed(rounds: int, source: random.Random) -> Section:
    section = Section(
        "A rank is killed",
        "SIGKILL of a random rank at a random moment; for torchft, after a random step. "
        "`noticed`: until a survivor's collective fails. `regrouped`: until microbatches are "
        "distributed again. `next step`: from the kill to the next committed step. torchft waits "
        f"{TORCHFT_JOIN_MS} ms for stragglers (`join_timeout_ms`; default 60 s).",
        ("ranks", "of", "kills", "noticed", "regrouped", "next step", "worst", "a step", "equal"),
    )
    for num_ranks in (2, 3, 4):
        found: dict[str, list[dict[str, Any]]] = {"mpi": [], "local": [], "torchft": []}
        for _ in range(rounds):
            found["mpi"].append(lost("mpi", num_ranks, source))
            found["local"].append(lost("local", num_ranks, source))
            if num_ranks == 3:
                found["torchft"].append(torchft(num_ranks, source))
        section.raw[str(num_ranks)] = found
        section.rows += [_row(num_ranks, name, rows) for name, rows in found.items() if rows]
        if num_ranks == 2:
            for name in ("mpi", "local"):
                _judge_kills(section, name, found[name])
        if num_ranks == 3:
            ours, theirs = (
                statistics.median(f["resumed_s"] for f in found[name])
                for name in ("mpi", "torchft")
            )
            section.verdicts.append(f"- 3 ranks: torchft takes {theirs / ours:.0f} times as long.")
    down = Spread.of([teardown() for _ in range(rounds)])
    section.raw["teardown_s"] = asdict(down)
    section.verdicts.append(
        f"- Of this the kernel takes {duration(down)} to end a process that has imported torch, "
        "on a free core."
    )
    return section


def _row(num_ranks: int, name: str, found: list[dict[str, Any]]) -> list[str]:
    def shown(key: str) -> str:
        return duration(Spread.of([f[key] for f in found])) if key in found[0] else ""

    worst = max(f["resumed_s"] for f in found)
    hashes = {f.get("sha256") for f in found}
    equal = "" if None in hashes else "yes" if len(hashes) == 1 else "NO"
    times = [shown(key) for key in ("noticed_s", "regroup_s", "resumed_s")]
    shown_worst = f"{1e3 * worst:.0f} ms"
    return [str(num_ranks), name, str(len(found)), *times, shown_worst, shown("step_s"), equal]


def _judge_kills(section: Section, name: str, found: list[dict[str, Any]]) -> None:
    resumed = Spread.of([f["resumed_s"] - f["step_s"] for f in found])
    worst = max(f["resumed_s"] for f in found)
    section.at_most(
        f"2 ranks, {name}: next step after less than 50 ms and a step, in the median",
        duration(resumed) + " without the step",
        resumed.median < 0.05,
    )
    section.at_most(f"2 ranks, {name}: worst below 250 ms", f"{1e3 * worst:.0f} ms", worst < 0.25)


def _stopped(rounds: int, source: random.Random) -> Section:
    section = Section(
        "A rank is stopped",
        "SIGSTOP of a random one of 2 ranks, `hang_timeout_s=1`. `noticed`: until a survivor's "
        "collective fails, after the watchdog has taken the stack and killed the process.",
        ("of", "stops", "noticed", "next step"),
    )
    found = [lost("mpi", 2, source, "stop") for _ in range(max(rounds // 2, 1))]
    section.raw["stops"] = found
    noticed = Spread.of([f["noticed_s"] for f in found])
    resumed = Spread.of([f["resumed_s"] for f in found])
    section.rows.append(["mpi", str(len(found)), duration(noticed), duration(resumed)])
    section.at_most(
        "noticed within hang_timeout_s + 0.5 s", f"at most {noticed.high:.2f} s", noticed.high < 1.5
    )
    return section


def _replaced(rounds: int) -> Section:
    section = Section(
        "A new process comes in the place of a killed one",
        "2 ranks, `--replace 1`. `there`: from the kill until the new process takes part, mostly "
        "the import of torch. `merged`: how long the other rank waits.",
        ("of", "kills", "there", "merged"),
    )
    for launcher in ("mpi", "local"):
        found = [replaced(launcher) for _ in range(max(rounds // 2, 1))]
        section.raw[launcher] = found
        spreads = [duration(Spread.of([f[key] for f in found])) for key in ("came_s", "merged_s")]
        section.rows.append([launcher, str(len(found)), *spreads])
    return section


def _hogged(seconds: float) -> Section:
    section = Section(
        "Busy cores are no hang",
        "2 ranks beside a process for each core that never pauses, `hang_timeout_s=1`.",
        ("trained for", "longest step", "ranks wrongly ended"),
    )
    found = section.raw["hogged"] = hogged(seconds)
    section.rows.append(
        [f"{found['seconds']:.0f} s", f"{found['longest_step_s']:.2f} s", str(found["alarms"])]
    )
    section.at_most("no false alarm", str(found["alarms"]), found["alarms"] == 0)
    return section


def _interrupted(seconds: float) -> Section:
    section = Section(
        "The group breaks every two seconds",
        "2 ranks. Every 2 s one of them gives the group up in the middle of a step, as if it had "
        "lost another: all regroup, agree, and do the step again. Against the same run without "
        "faults.",
        ("faults", "without", "with", "throughput kept", "equal"),
    )
    found = section.raw["interrupted"] = interrupted(seconds, 2.0)
    kept = found["calm_s"] / found["rough_s"]
    section.rows.append(
        [
            str(found["faults"]), f"{found['calm_s']:.1f} s", f"{found['rough_s']:.1f} s",
            f"{100 * kept:.1f} %", "yes" if found["equal"] else "NO",
        ]
    )  # fmt: skip
    section.at_most("throughput kept ≥ 95 %", f"{100 * kept:.1f} %", kept >= 0.95)
    return section


def _calm(rounds: int) -> Section:
    section = Section(
        "What it costs when nothing happens",
        "A step of 2 ranks over MPI: with fault tolerance and watchdogs, as `lockstep train -n 2` "
        "has it, and without `--with-ft ulfm` and with `hang_timeout_s=0`, in turn.",
        ("", "step"),
    )
    found: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(max(rounds, 2)):
        for name, times in found.items():
            times.append(calm(name == "with"))
    section.raw["step_s"] = found
    section.rows += [[name, duration(Spread.of(times))] for name, times in found.items()]
    # The least of each: what other work on the machine adds is noise.
    cost = min(found["with"]) / min(found["without"]) - 1
    section.at_most("added < 1 %", f"{100 * cost:.1f} %", cost < 0.01)
    return section


def _buddies(rounds: int) -> Section:
    section = Section(
        "Sharded optimizer state on two ranks",
        "A perceptron with 0.8 million parameters, AdamW, 2 ranks: time of a step, in turn.",
        ("optimizer", "step"),
    )
    cases = {
        "whole on each rank": (),
        "sharded, `optimizer.buddy=false`": ("optimizer.sharded=true", "optimizer.buddy=false"),
        "sharded, with buddies": ("optimizer.sharded=true",),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(max(rounds // 3, 1)):
        for name, overrides in cases.items():
            found[name].append(sharded(overrides))
    section.raw["step_s"] = found
    section.rows += [[name, duration(Spread.of(times))] for name, times in found.items()]
    return section


if __name__ == "__main__":
    main()
