"""How often `lockstep diagnose` names the cause that was injected: a scoreboard.

Writes `docs/benchmarks/diagnosis.md`; `--only NAME` runs one case and prints.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.faults import PlannedFault, to_env
from lockstep.launching.host.processes import usable_cores
from page import Section, command, publish
from run import DOCS, machine

TASK = f"{Path(__file__).with_name('diagnosis_task.py')}:Ill"
_BURN = "while True: pass"
_LEAST = 0.9


@dataclass(frozen=True)
class Case:
    """A cause to inject.

    Attributes:
        name: what tables call it.
        cause: its name in `lockstep diagnose --json`; empty for a run in which nothing is wrong.
        keys: of the config.
        ranks: how many there are.
        faults: what goes wrong from outside: slot, step, moment, kind and so on.
        burners: other processes that keep cores busy.
    """

    name: str
    cause: str
    keys: tuple[str, ...] = ()
    ranks: int = 2
    faults: tuple[PlannedFault, ...] = ()
    burners: int = 0


CASES = (
    Case("nothing", "", ("batch_size=2048", "steps=80")),
    Case("a rank that sleeps in its loss", "slow_rank", ("ill=slow rank", "steps=60")),
    Case("slow samples", "data", ("ill=data", "steps=40")),
    Case("slow samples of one rank", "data", ("ill=data of a rank", "steps=40")),
    Case("slow evaluations, often", "evaluation", ("ill=evaluation", "eval_every=10")),
    Case(
        "checkpoints of a large model in each step", "checkpoints",
        ("width=1024", "checkpoint.every=1", "steps=40", "checkpoint.background=false"),
    ),
    Case(
        "a slow disk", "disk",
        ("checkpoint.every=30", "checkpoint.background=false", "steps=60"),
        faults=tuple(
            PlannedFault(0, step, "checkpoint", "slow", sleep_s=1.5) for step in (29, 59)
        ),
    ),
    Case("more ranks than cores", "oversubscribed", ("num_microbatches=10",), ranks=5),
    Case("a busy process on each core", "busy", burners=2),
    Case(
        "three microbatches on two ranks", "imbalance",
        ("num_microbatches=3", "batch_size=6144", "width=512", "steps=30"),
    ),
    Case(
        "tiny batches", "latency",
        ("batch_size=2", "num_microbatches=2", "width=16", "depth=1", "steps=1500"),
    ),
    Case(
        "a large model, small batches", "bandwidth",
        ("batch_size=4", "num_microbatches=2", "width=2048", "optimizer.name=sgd", "steps=40",
         "checkpoint.every=0"),
    ),
    Case("a rank killed", "lost_ranks", faults=(PlannedFault(1, 20, "reduce"),)),
    Case(
        "a rank that hangs", "hang", ("hang_timeout_s=3",),
        faults=(PlannedFault(1, 20, "compute", "stop"),),
    ),
    Case("NaN in a weight", "not_finite", ("ill=not finite",)),
    Case("a flipped bit on one rank", "divergence", ("ill=flipped bit", "digest_every=10")),
    Case("an error in the task", "task_error", ("ill=error",)),
    Case("all processes killed", "killed", ("ill=killed",), ranks=1),
    Case("one rank, several cores", "idle_cores", ranks=1),
)  # fmt: skip


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launchers", default="local,mpi", help="of several ranks")
    parser.add_argument("--only", help="just the case of this name, printed")
    args = parser.parse_args()
    facts = machine(("torch", "mpi4py"))
    facts["command"] = command("diagnosis")
    facts["cores"] = str(usable_cores())
    cases = [case for case in CASES if args.only in (None, case.name)]
    first, *others = args.launchers.split(",")
    sections = [scoreboard(cases, first), *(scoreboard(cases, each, True) for each in others)]
    publish(
        None if args.only else DOCS,
        "diagnosis",
        "Diagnosis",
        facts,
        sections,
        "Each run is made once, one after the other.",
    )


def scoreboard(cases: list[Case], launcher: str, only_wrong: bool = False) -> Section:
    """Each case trained, and what is said of it; or of those that are named wrongly."""
    section = Section(
        f"Injected causes, launcher {launcher}",
        "As above; the causes named wrongly."
        if only_wrong
        else "Each cause is injected into a run of its own; `lockstep diagnose` then reads the run "
        "directory. The first cause that it names counts.",
        ("injected", "named first", "of the time", "right", "others"),
    )
    seconds, right = [], 0
    for case in cases:
        found, took = diagnosed(case, launcher)
        first = found[0]["name"] if found else ""
        seconds.append(took)
        right += first == case.cause
        lost = _percent(found[0]["lost"]) if found else ""
        others = ", ".join(f"{c['name']} {_percent(c['lost'])}".strip() for c in found[1:])
        hit = "yes" if first == case.cause else f"**no** ({case.cause or 'nothing'})"
        row = (case.name, first or "nothing", lost, hit, others)
        if not only_wrong or first != case.cause:
            section.rows.append(row)
        print(*row, sep=" | ", file=sys.stderr, flush=True)
        section.raw[case.name] = {"found": found, "seconds": took}
    share = right / len(cases)
    section.at_most(
        f"first cause right ≥ {_LEAST:.0%}", f"{right} of {len(cases)}", share >= _LEAST
    )
    section.verdicts.append(
        f"- Median time of a diagnosis, the start of Python included: "
        f"{statistics.median(seconds):.2f} s"
    )
    return section


def diagnosed(case: Case, launcher: str) -> tuple[list[dict[str, object]], float]:
    """The causes that are named in a run of a case, and how many seconds it took to name them."""
    with tempfile.TemporaryDirectory() as folder, burning(case.burners):
        run_dir = Path(folder) / "run"
        lockstep = [sys.executable, "-m", "lockstep"]
        many = ["-n", str(case.ranks), "--launcher", launcher] if case.ranks > 1 else []
        subprocess.run(
            [*lockstep, "train", TASK, "--run-dir", run_dir, *many, "eval_every=1000",
             "log_every=10", *case.keys],
            env=os.environ | to_env(case.faults, Path(folder) / "faults"),
            capture_output=True, check=False, timeout=240,
        )  # fmt: skip
        began = time.perf_counter()
        said = subprocess.run(
            [*lockstep, "diagnose", run_dir, "--json"], capture_output=True, text=True, check=True
        )
        took = time.perf_counter() - began
    return [json.loads(line) for line in said.stdout.splitlines()], took


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Processes that keep cores busy."""
    burners = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


if __name__ == "__main__":
    main()
