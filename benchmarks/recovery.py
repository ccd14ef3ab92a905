"""How long a killed rank holds up the others; writes `docs/benchmarks/recovery.md` and `.json`."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.commands.chaos_plan import Blow
from lockstep.commands.chaos_table import effect_of
from lockstep.commands.start import rank_command, start
from lockstep.front import Sitting
from lockstep.observe import read_events, read_result
from lockstep.train.faults import Fault, Moment, to_env
from page import Section, duration
from processes import Spread
from run import DOCS, machine

STEPS = 60
CONFIG = (f"steps={STEPS}", "log_every=1", "checkpoint.every=1000")
MOMENTS: tuple[Moment, ...] = ("compute", "reduce", "reduced", "optimizer", "committed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="kills for each number of ranks")
    parser.add_argument("--seed", type=int, default=0, help="which ranks, and when")
    args = parser.parse_args()
    facts = machine()
    source = random.Random(args.seed)
    section = Section(
        "A rank is killed",
        "SIGKILL of a random rank, at a random moment of a random step or up to 10 ms after it. "
        "`noticed`: until a survivor's collective fails. `regrouped`: until the survivors have "
        "shrunk the group, agreed on the state and dealt out the microbatches anew. `next step`: "
        "from the kill to the next committed step.",
        ("ranks", "kills", "noticed", "regrouped", "next step", "worst", "step before", "equal"),
    )
    raw: dict[str, Any] = {}
    for num_ranks in (2, 3, 4):
        found = [_killed(num_ranks, source) for _ in range(args.rounds)]
        raw[str(num_ranks)] = found
        section.rows.append(_row(num_ranks, found))
        if num_ranks == 2:
            resumed = Spread.of([f["resumed_s"] - f["step_s"] for f in found])
            worst = max(f["resumed_s"] for f in found)
            section.at_most(
                "2 ranks: next step after less than 50 ms and a step, in the median",
                duration(resumed) + " without the step",
                resumed.median < 0.05,
            )
            section.at_most("2 ranks: worst below 250 ms", f"{1e3 * worst:.0f} ms", worst < 0.25)
    teardown = Spread.of([_teardown() for _ in range(args.rounds)])
    raw["teardown_s"] = asdict(teardown)
    section.verdicts.append(
        f"- Of this the kernel takes {duration(teardown)} to take down a killed process that has "
        "imported torch: nobody can be told before. Measured alone, on a free core."
    )
    cores = facts["CPU"].rpartition(", ")[2]
    section.verdicts.append(
        f"- With more ranks than cores (here {cores}), survivors that wait keep the cores busy and "
        "hold up the end of the killed one."
    )
    head = ["# Benchmark of recovery", "", "Made by `benchmarks/recovery.py`.", "", "| | |"]
    table = ["| --- | --- |", *(f"| {k} | {v} |" for k, v in facts.items()), ""]
    DOCS.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*head, *table, section.markdown()])
    (DOCS / "recovery.md").write_text(text, encoding="utf-8")
    (DOCS / "recovery.json").write_text(json.dumps({"facts": facts, "raw": raw}, indent=1) + "\n")
    print(text)


def _killed(num_ranks: int, source: random.Random) -> dict[str, Any]:
    """Kill one rank of a run; times in seconds."""
    fault = Fault(
        source.randrange(num_ranks),
        source.randrange(5, STEPS - 5),
        source.choice(MOMENTS),
        "kill",
        source.choice((0.0, source.uniform(0, 0.01))),
    )
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "log"
        command = rank_command("mpi", num_ranks, "digits", CONFIG)
        sitting = Sitting(str(run_dir), False, (), False, "digits")
        ended = start(
            command, sitting, 1, on_row=_ignore, on_line=_ignore, restarts=0,
            env=to_env([fault], log),
        )  # fmt: skip
        if ended.exit_code:
            sys.exit(f"the run with {fault} ended with {ended.exit_code}: {ended.message}")
        rows = read_events(run_dir / "events.jsonl")
        strikes = [json.loads(line) for line in log.read_text().splitlines()]
        sha256 = read_result(run_dir)["params_sha256"]
    effect = effect_of(Blow("kill", fault.step, (fault,)), strikes, rows)
    steps = [r["seconds"] for r in rows if r["event"] == "StepDone" and r["step"] < fault.step]
    print(num_ranks, fault, effect.resumed_s, file=sys.stderr)
    return {
        "fault": asdict(fault),
        "noticed_s": effect.noticed_s,
        "regroup_s": effect.regroup_s,
        "resumed_s": effect.resumed_s,
        "step_s": sorted(steps)[len(steps) // 2],
        "sha256": sha256,
    }


def _row(num_ranks: int, found: list[dict[str, Any]]) -> list[str]:
    spreads = [
        duration(Spread.of([f[key] for f in found]))
        for key in ("noticed_s", "regroup_s", "resumed_s")
    ]
    worst = max(f["resumed_s"] for f in found)
    step = duration(Spread.of([f["step_s"] for f in found]))
    equal = "yes" if len({f["sha256"] for f in found}) == 1 else "NO"
    return [str(num_ranks), str(len(found)), *spreads, f"{1e3 * worst:.0f} ms", step, equal]


def _teardown() -> float:
    """From SIGKILL until the kernel reports the end of a process with torch in memory."""
    code = "import torch, lockstep; print('up', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.1)
        started = time.perf_counter()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        return time.perf_counter() - started


def _ignore(_: object) -> None:
    """Runs that are measured are not shown."""


if __name__ == "__main__":
    main()
