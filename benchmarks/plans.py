"""How far `lockstep plan` is off: predicted beside measured steps and memory.

Writes `docs/benchmarks/plans.md` and `plans.json`; as root, for it makes network namespaces.
`--only NAME` takes one task, and leaves the rows of others as they are on the page; `--without-lab`
leaves shaped networks out, `--print` writes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.network import Lab
from lab.ranks import start_ranks
from lockstep.observe import read_events
from lockstep.planning.measurements import Network
from lockstep.planning.operations import size_text
from lockstep.planning.plan import Plan, make_plan, read_plan
from lockstep.planning.prediction import Layout, Prediction, predict
from lockstep.planning.profile import read_profile
from page import Section, command, publish
from run import DOCS, machine

TASK = f"{Path(__file__).with_name('diagnosis_task.py')}:Ill"
RANKS = (1, 2, 3, 4)
LAUNCHERS = ("mpi", "local")
ROUNDS = 3
"""Of each plan and each training, in turn; the fastest counts."""
SHAPES = ("1gbit", "100mbit", "20ms")
_WORST, _MEDIAN, _MEMORY = 0.13, 0.05, 0.05
_NOT_SHOWN = (3, 4)
"""Ranks without rows on the page: those of 2 and 4 say as much."""
_ROWS = 40
_SECONDS = 3.0
_NEVER = 1_000_000_000
_TIMEOUT_S = 900
_LARGE_BYTES = 4 << 20
Cost = tuple[float, int]
"""Seconds of a step, and bytes of memory."""

_LOCKSTEP = (sys.executable, "-m", "lockstep")


@dataclass(frozen=True)
class Case:
    """A task to plan.

    Attributes:
        name: what the table calls it.
        target: recipe or `file.py:Task`.
        keys: of its config.
    """

    name: str
    target: str
    keys: tuple[str, ...] = ()


CASES = (
    Case("digits, CNN", "digits"),
    Case("linear layers, 9 k", TASK, ("width=64", "depth=2", "batch_size=2000", "samples=8192")),
    Case("linear layers, 0.3 M", TASK, ("width=384", "batch_size=512")),
    Case("linear layers, 2.2 M", TASK, ("width=1024", "batch_size=512")),
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A prediction and what came of it.

    Attributes:
        case: name of the task.
        where: launcher, or shape of the network.
        ranks: number of ranks.
        predicted: seconds of a step, and bytes of memory.
        measured: the same.
        parts: seconds of the prediction: computing, sums, waiting.
        from_parts_s: seconds of a step if no ranks had been trained together.
        spread: by how much the slowest of the trainings took longer than the fastest.
    """

    case: str
    where: str
    ranks: int
    predicted: Cost
    measured: Cost
    parts: tuple[float, float, float]
    from_parts_s: float
    spread: float

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted over measured, less 1: of the time, and of the memory."""
        step, peak = (p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True))
        return step, peak

    @property
    def parts_error(self) -> float:
        """The same of the time that follows from parts alone."""
        return self.from_parts_s / self.measured[0] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="just the tasks of these names")
    parser.add_argument("--without-lab", action="store_true", help="no shaped networks")
    parser.add_argument("--print", action="store_true", help="instead of writing the page")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.only or case.name in args.only]
    shapes = () if args.without_lab else SHAPES
    there = _there()
    facts = machine(("torch", "mpi4py")) | {"command": command("plans")}
    if args.only and there:  # the others' rows are of the page's own command
        facts["command"] = there["facts"]["command"]
    pairs = [pair for case in cases for pair in _pairs(case, shapes)]
    sections = [section_of([*_kept(there, {case.name for case in cases}), *pairs])]
    publish(None if args.print else DOCS, "plans", "Plans", facts, sections)


def _there() -> dict[str, Any]:
    """The numbers of the page that is there."""
    file = DOCS / "plans.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _kept(there: Mapping[str, Any], names: Set[str]) -> list[Pair]:
    """The rows of other tasks that the page has."""
    rows = [row for section in there.get("sections", ()) for row in section["raw"]["rows"]]
    return [Pair(**row) for row in rows if row["case"] not in names]


def section_of(pairs: Sequence[Pair]) -> Section:
    """Predicted beside measured, of each task on each number of ranks."""
    section = Section(
        "Predicted steps",
        f"{ROUNDS} times in turn: `lockstep plan --ranks 1,2,3,4`, then a training of about "
        f"{_SECONDS:.0f} s on as many ranks; the fastest of each counts. A step is the median of "
        "reports; memory is the greatest resident set of a rank. `1gbit`, `100mbit`, `20ms`: two "
        "network namespaces with a rank each (`benchmarks/lab`). `rounds`: how far "
        "trainings of the same program were apart. The file with raw numbers has memory too, the "
        "parts of each prediction, and the rows of 3 and 4 ranks.",
        (
            "task", "where", "ranks", "predicted, ms", "measured, ms", "off", "rounds",
        ),
    )  # fmt: skip
    for pair in pairs:
        if pair.ranks in _NOT_SHOWN:
            continue
        section.rows.append(
            (
                pair.case, pair.where, str(pair.ranks), f"{1e3 * pair.predicted[0]:.2f}",
                f"{1e3 * pair.measured[0]:.2f}", f"{pair.errors[0]:+.1%}", f"{pair.spread:.1%}",
            )
        )  # fmt: skip
    section.raw["rows"] = [pair.__dict__ for pair in pairs]
    _judge(section, pairs)
    return section


def _judge(section: Section, pairs: Sequence[Pair]) -> None:
    steps = [abs(pair.errors[0]) for pair in pairs]
    fitting = [abs(pair.errors[0]) for pair in pairs if pair.ranks <= 2]
    peaks = [abs(pair.errors[1]) for pair in pairs]
    worst, median = max(steps), statistics.median(steps)
    section.at_most(f"worst step ≤ {_WORST:.0%}", f"{worst:.1%}", worst <= _WORST)
    section.at_most(f"median step ≤ {_MEDIAN:.0%}", f"{median:.1%}", median <= _MEDIAN)
    section.at_most(f"worst memory ≤ {_MEMORY:.0%}", f"{max(peaks):.1%}", max(peaks) <= _MEMORY)
    section.at_most(f"rows ≥ {_ROWS}", str(len(pairs)), len(pairs) >= _ROWS)
    section.verdicts.append(
        f"- Of those with a core for each rank ({len(fitting)}): worst "
        f"{max(fitting):.1%}, median {statistics.median(fitting):.1%}"
    )
    spreads = [pair.spread for pair in pairs]
    section.verdicts.append(
        f"- The {ROUNDS} trainings of a row, of the same program: apart by {max(spreads):.1%} at "
        f"worst, {statistics.median(spreads):.1%} in the median"
    )
    bare = [abs(pair.parts_error) for pair in pairs if pair.ranks > 1]
    section.verdicts.append(
        f"- From parts alone, several ranks ({len(bare)}): worst {max(bare):.1%}, median "
        f"{statistics.median(bare):.1%}"
    )


def _pairs(case: Case, shapes: Sequence[str]) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans: dict[str, list[Plan]] = {launcher: [] for launcher in LAUNCHERS}
        ways = [(launcher, ranks) for launcher in LAUNCHERS for ranks in RANKS]
        ways.remove((LAUNCHERS[1], 1))
        found: dict[tuple[str, int], list[Cost]] = {way: [] for way in ways}
        for number in range(ROUNDS):
            for launcher in LAUNCHERS:
                plans[launcher].append(_plan(case, launcher, folder / f"{launcher}-{number}.json"))
            for launcher, ranks in ways:
                run_dir = folder / f"{launcher}-{ranks}-{number}"
                plan = plans[launcher][-1]
                found[launcher, ranks].append(_train(case, plan, launcher, ranks, run_dir))
        for (launcher, ranks), costs in found.items():
            yield _compared(case, launcher, plans[launcher], None, ranks, costs)
        for shape in shapes:
            yield _shaped(case, _fastest(plans["mpi"], 2), shape, folder)


def _fastest(plans: Sequence[Plan], ranks: int) -> Plan:
    """The plan with the shortest step on so many ranks."""
    return min(plans, key=lambda plan: _way(plan, ranks).step_s)


def _way(plan: Plan, ranks: int) -> Prediction:
    row = plan.find(Layout(ranks))
    assert row is not None
    return row.prediction


def _plan(case: Case, launcher: str, path: Path) -> Plan:
    argv = [
        *_LOCKSTEP, "plan", case.target, *case.keys, "--ranks", ",".join(map(str, RANKS)),
        "--launcher", launcher, "--ranks-per-host", str(max(RANKS)), "--seconds", "2",
        "--json", str(path),
    ]  # fmt: skip
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=_TIMEOUT_S)
    return read_plan(path)


def _keys(case: Case, plan: Plan, ranks: int) -> list[str]:
    steps = max(40, int(_SECONDS / _way(plan, ranks).step_s) // 10 * 10)
    return [*case.keys, f"steps={steps}", f"eval_every={_NEVER}", f"checkpoint.every={steps // 2}"]


def _train(case: Case, plan: Plan, launcher: str, ranks: int, run_dir: Path) -> Cost:
    many = ["-n", str(ranks), "--launcher", launcher] if ranks > 1 else []
    argv = [*_LOCKSTEP, "train", case.target, *_keys(case, plan, ranks), "--run-dir", str(run_dir),
            *many]  # fmt: skip
    subprocess.run(argv, check=True, capture_output=True, timeout=_TIMEOUT_S)
    return _cost(run_dir)


def _cost(run_dir: Path) -> Cost:
    """Median seconds of a step over reports, the first one left out; and the greatest memory."""
    rows = read_events(run_dir / "events.jsonl")
    reports = [row for row in rows if row["event"] == "StepDone"][1:]
    step_s = statistics.median(row["seconds"] / row["num_steps"] for row in reports)
    return step_s, max(rank["peak_bytes"] for rank in reports[-1]["ranks"])


def _shaped(case: Case, plan: Plan, shape: str, folder: Path) -> Pair:
    """Two hosts with a rank each."""
    profile, costs = folder / f"{shape}.json", []
    whole = plan.facts.anatomy.gradient_bytes
    sizes = ",".join(size_text(n) for n in sorted({1024, whole // 2, whole, 2 * whole}))
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(2, shape))
        said = stack.enter_context((folder / "lab.log").open("w"))
        seconds = "90" if whole > _LARGE_BYTES else "30"
        argv = ["lockstep", "comm-profile", "--no-torch", "--sizes", sizes, "--seconds", seconds]
        _checked(start_ranks(lab, 1, [*argv, "--json", str(profile)], "mpi", output=said).exit_code)
        network = Network([read_profile(profile)], ranks_per_host=max(RANKS))
        shaped = make_plan(plan.facts, network, RANKS, max(RANKS), plan.hours_between)
        for number in range(ROUNDS):
            run_dir = folder / f"{shape}-{number}"
            argv = ["lockstep", "train", case.target, *_keys(case, shaped, 2)]
            argv += ["--run-dir", str(run_dir)]
            _checked(start_ranks(lab, 1, argv, "mpi", output=said).exit_code)
            costs.append(_cost(run_dir))
    return _compared(case, shape, [shaped], network, 2, costs)


def _checked(exit_code: int) -> None:
    if exit_code:
        raise SystemExit(f"ranks of the laboratory ended with exit code {exit_code}")


def _compared(
    case: Case,
    where: str,
    plans: Sequence[Plan],
    shaped: Network | None,
    ranks: int,
    costs: Sequence[Cost],
) -> Pair:
    """A row: what the fastest of the plans said beside what the fastest training took."""
    plan = _fastest(plans, ranks)
    network = shaped or Network(plan.facts.messages, max(RANKS))
    way = _way(plan, ranks)
    parts = (way.compute_s, way.exchange_s, way.waiting_s)
    alone = predict(replace(plan.facts, groups=()), network, Layout(ranks), max(RANKS))
    times = [step_s for step_s, _ in costs]
    # Ranks of several hosts start by themselves, as those do that a plan has measured alone.
    memory = alone.peak_bytes if shaped else max(_way(one, ranks).peak_bytes for one in plans)
    pair = Pair(
        case.name, where, ranks, (way.step_s, memory), (min(times), max(peak for _, peak in costs)),
        parts, alone.step_s,
        max(times) / min(times) - 1,
    )  # fmt: skip
    print(pair, *(f"{error:+.1%}" for error in pair.errors), file=sys.stderr, flush=True)
    return pair


if __name__ == "__main__":
    main()
