"""Compressed gradients: what is learnt, bytes and steps beside those of whole ones.

Writes `docs/benchmarks/compression.md` and `compression.json`, within a quarter of an hour; as
root, for steps are timed in a slow network of namespaces. `--quick` sees that everything runs and
prints; `--without-lab` leaves the network out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from compression_cases import CASES, KINDS, NEVER, Case
from lab.network import Lab
from lab.ranks import start_ranks
from lockstep.launching.host.processes import usable_cores
from lockstep.observe import read_events, read_result
from page import Section, command, publish, ratio
from processes import Spread
from run import DOCS, machine

SHAPE = "100mbit"
RANKS = 2
ROUNDS = 3
TARGET = 8.0
"""Steps of whole gradients over compressed ones."""
LARGE = "MLP, 0.8 M"
"""The case of the target."""
_TIMEOUT_S = 900

Found = dict[str, list[float]]
"""Results of all seeds, by kind of compression."""


@dataclass(frozen=True)
class Timed:
    """A training in the network.

    Attributes:
        sent_bytes: bytes that a rank sends in a step, the mean of all ranks.
        step_s: seconds of a step.
        digest: SHA-256 of the parameters in the end.
    """

    sent_bytes: float
    step_s: float
    digest: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--without-lab", action="store_true", help="only what is learnt")
    parser.add_argument("--only", choices=[c.name for c in CASES], action="append")
    args = parser.parse_args()
    cases, rounds = [c for c in CASES if not args.only or c.name in args.only], ROUNDS
    if args.quick:
        rounds = 1
        cases = [replace(c, steps=12, seeds=1, timed_steps=min(c.timed_steps, 12)) for c in cases]
    facts = machine(("torch", "mpi4py")) | {"command": command("compression")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learnt = {case.name: _learnt(case, folder) for case in cases}
        sections = [_section_of_results(cases, learnt)]
        for case in cases:
            if case.timed_steps and not args.without_lab:
                sections.append(_section_of_steps(case, learnt[case.name], rounds, folder))
    publish(
        None if args.quick or args.without_lab or args.only else DOCS,
        "compression",
        "Compression",
        facts,
        sections,
    )


def _section_of_results(cases: Sequence[Case], learnt: Mapping[str, Found]) -> Section:
    what = ", ".join(f"{c.name}: {c.metric} after {c.steps} steps, {c.seeds} seeds" for c in cases)
    section = Section(
        "What is learnt",
        f"The same number of steps with each kind. {what}. The mean over the seeds, with the least "
        "and the greatest. A result is the same on any number of ranks.",
        ("compression", *(case.name for case in cases)),
    )
    for kind in KINDS:
        cells = [_shown(case, learnt[case.name][kind]) for case in cases]
        section.rows.append((kind, *cells))
    section.raw["results"] = dict(learnt)
    return section


def _section_of_steps(case: Case, learnt: Found, rounds: int, folder: Path) -> Section:
    section = Section(
        f"{case.name} over a link of {SHAPE}",
        f"{RANKS} hosts (network namespaces) with a rank each, `{' '.join(case.keys)}`. "
        + (
            "`sent`: all bytes of a rank in a step. A step is the median of reports, the least of "
            f"{rounds} trainings in turn. Results are within noise if the mean over the seeds is "
            "worse by at most two standard errors."
            if case.name == LARGE
            else "Columns as above."
        ),
        ("compression", "sent a step", "of whole", "step", "faster", "result within noise"),
    )
    timed: dict[str, list[Timed]] = {kind: [] for kind in KINDS}
    with Lab(RANKS, SHAPE) as lab:
        for number in range(rounds):
            for kind in KINDS:
                timed[kind].append(_timed(lab, case, kind, number, folder))
    faster, same = {}, 0
    for kind, found in timed.items():
        best, whole = (min(of, key=lambda t: t.step_s) for of in (found, timed["none"]))
        faster[kind] = Spread.of_ratios(
            [t.step_s for t in timed["none"]], [t.step_s for t in found]
        )
        is_same = _is_as_good(case, learnt[kind], learnt["none"])
        section.rows.append(
            (
                kind, f"{best.sent_bytes / 1e3:,.1f} kB",
                f"{best.sent_bytes / whole.sent_bytes:.1%}", f"{1e3 * best.step_s:.2f} ms",
                ratio(faster[kind]), "yes" if is_same else "no",
            )
        )  # fmt: skip
        same += {t.digest for t in found} == {_alone(case, kind, folder)}
    good = [kind for kind in KINDS if _is_as_good(case, learnt[kind], learnt["none"])]
    if case.name == LARGE:
        quickest = max(good, key=lambda kind: faster[kind].median)
        section.at_least(
            f"steps with whole gradients over those with {quickest}, the quickest of the same "
            "result",
            faster[quickest],
            TARGET,
        )
    what = "one SHA-256 of each in the network, in all rounds and on one rank"
    section.at_most(what, f"{same} of {len(KINDS)}", same == len(KINDS))
    section.raw["timed"] = {kind: [t.__dict__ for t in found] for kind, found in timed.items()}
    return section


def _shown(case: Case, found: Sequence[float]) -> str:
    kind = ".1%" if case.is_accuracy else ".4g"
    return f"{statistics.mean(found):{kind}} ({min(found):{kind}}–{max(found):{kind}})"


def _is_as_good(case: Case, found: Sequence[float], whole: Sequence[float]) -> bool:
    """Whether a mean is not worse by more than two standard errors of the difference."""
    worse = statistics.mean(whole) - statistics.mean(found)
    if not case.is_accuracy:
        worse = -worse
    if len(found) < 2:
        return worse <= 0
    variance = statistics.variance(found) / len(found) + statistics.variance(whole) / len(whole)
    return worse <= 2 * math.sqrt(variance)


def _learnt(case: Case, folder: Path) -> Found:
    """Results on one rank each: as many trainings at once as there are cores, for none is timed."""
    jobs = [(kind, seed) for kind in KINDS for seed in range(case.seeds)]
    with ThreadPoolExecutor(usable_cores()) as pool:
        results = list(pool.map(lambda job: _result(case, *job, folder), jobs))
    found: Found = {kind: [] for kind in KINDS}
    for (kind, _), value in zip(jobs, results, strict=True):
        found[kind].append(value)
    print(case.name, found, file=sys.stderr, flush=True)
    return found


def _result(case: Case, kind: str, seed: int, folder: Path) -> float:
    run_dir = folder / f"{case.name}-{kind}-{seed}"
    _train([*_keys(case, kind, case.steps, run_dir), f"seed={seed}"])
    return float(read_result(run_dir)["metrics"][case.metric])


def _keys(case: Case, kind: str, steps: int, run_dir: Path) -> list[str]:
    rest = [f"eval_every={NEVER}", f"checkpoint.every={NEVER}", "test_on=last"]
    where = ["--run-dir", str(run_dir)]
    return [case.target, *case.keys, *KINDS[kind], f"steps={steps}", *rest, *where]


def _alone(case: Case, kind: str, folder: Path) -> str:
    """The SHA-256 of what is timed, on one rank without a network."""
    run_dir = folder / f"{case.name}-{kind}-alone"
    _train(_keys(case, kind, case.timed_steps, run_dir))
    return str(read_result(run_dir)["params_sha256"])


def _train(keys: Sequence[str]) -> None:
    argv = [sys.executable, "-m", "lockstep", "train", *keys]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(argv)}: {ended.stdout}{ended.stderr}")


def _timed(lab: Lab, case: Case, kind: str, number: int, folder: Path) -> Timed:
    run_dir = folder / f"{case.name}-{kind}-timed-{number}"
    keys = [*_keys(case, kind, case.timed_steps, run_dir), "log_every=4"]
    with (folder / "lab.log").open("a+") as said:
        argv = ["lockstep", "train", *keys]
        ended = start_ranks(lab, 1, argv, "mpi", output=said, timeout_s=_TIMEOUT_S)
        if ended.exit_code:
            said.seek(0)
            raise SystemExit(f"{kind}: exit code {ended.exit_code}: {said.read()[-2000:]}")
    rows = read_events(run_dir / "events.jsonl")
    # The first report has the start in it, the last one the checkpoint at the end.
    reports = [row for row in rows if row["event"] == "StepDone"][1:-1]
    sent = [
        statistics.mean(rank["sent_bytes"] for rank in row["ranks"]) / row["num_steps"]
        for row in reports
    ]
    step_s = statistics.median(row["seconds"] / row["num_steps"] for row in reports)
    return Timed(statistics.median(sent), step_s, str(read_result(run_dir)["params_sha256"]))


if __name__ == "__main__":
    main()
