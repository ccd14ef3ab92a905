"""Compressed gradients: accuracy, bytes and steps beside those of whole ones, in a slow network.

Writes `docs/benchmarks/compression.md` and `compression.json`; as root, for it makes network
namespaces. `--quick` sees that everything runs and prints; `--without-lab` leaves the network out.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lab.network import Lab
from lab.ranks import start_ranks
from lockstep.observe import read_events, read_result
from page import Section, command, page, write
from run import DOCS, machine

SHAPE = "100mbit"
RANKS = 2
ROUNDS = 3
"""Of each training in the network; the fastest counts."""
SEEDS = (0, 1, 2, 3, 4)
_NEVER = 1_000_000_000
_TIMEOUT_S = 900

KINDS = {
    "none": (),
    "int8": ("compression.name=int8",),
    "int8, no feedback": ("compression.name=int8", "compression.error_feedback=false"),
    "int16": ("compression.name=int16",),
    "topk 1 %": ("compression.name=topk",),
    "topk 10 %": ("compression.name=topk", "compression.ratio=0.1"),
    "randomk 10 %": ("compression.name=randomk", "compression.ratio=0.1"),
    "onebit": ("compression.name=onebit",),
}


@dataclass(frozen=True)
class Case:
    """A task to train.

    Attributes:
        name: what the table calls it.
        keys: of the config of `digits`.
        steps: optimizer steps of a training whose accuracy counts.
        timed_steps: those of one that is timed.
    """

    name: str
    keys: tuple[str, ...]
    steps: int
    timed_steps: int


CASES = (
    Case("CNN, 21 k", ("model=cnn",), 360, 120),
    Case("MLP, 0.6 M", ("model=mlp", "hidden=8192", "batch_size=256"), 180, 60),
)
QUICK = (Case("CNN, 21 k", ("model=cnn",), 20, 40),)


@dataclass(frozen=True)
class Row:
    """A kind of compression and what came of it.

    Attributes:
        case: name of the task.
        kind: name of the compression.
        accuracies: on the test split after the last step, of each seed.
        sent_bytes: bytes that a rank sends in a step, the mean of all ranks.
        step_s: seconds of a step in the network.
        digests: SHA-256s of the parameters after the timed steps, of each round.
    """

    case: str
    kind: str
    accuracies: list[float]
    sent_bytes: float = 0.0
    step_s: float = 0.0
    digests: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--without-lab", action="store_true", help="accuracy only")
    args = parser.parse_args()
    cases, seeds = (QUICK, SEEDS[:1]) if args.quick else (CASES, SEEDS)
    rounds = 1 if args.quick else ROUNDS
    facts = machine(("torch", "mpi4py")) | {"command": command("compression")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            row for case in cases for row in _rows(case, seeds, rounds, args.without_lab, folder)
        ]
    sections = [section_of(rows, seeds, rounds)]
    text = page("Compression", "compression", facts, sections, "Nothing else runs.")
    if args.quick or args.without_lab:
        print(text)
        return
    write(DOCS, "compression", text, facts, sections)


def section_of(rows: Sequence[Row], seeds: Sequence[int], rounds: int) -> Section:
    """Every kind beside the run that compresses nothing."""
    section = Section(
        "Digits with compressed gradients",
        f"The recipe `digits` (1,437 images) for the same number of steps. Accuracy: on the test "
        f"split (180 images) after the last step, the mean over {len(seeds)} seeds, with the least "
        f"and the greatest; it is the same on any number of ranks. Bytes: what a rank sends in a "
        f"step as its transport counts them, in the median of reports without checkpoints, and "
        f"batch norm's statistics, headers and scalars, which travel as they are, counted in. "
        f"Steps: {RANKS} hosts (network namespaces) with a rank each, on links of {SHAPE}; the "
        f"fastest of {rounds} trainings in turn, of each the median of reports. "
        "`compression.buddy=false`, the default: copies of what was cut off are not sent.",
        ("task", "compression", "accuracy", "sent a step", "of whole", "step", "faster"),
    )
    for row in rows:
        whole = next(other for other in rows if (other.case, other.kind) == (row.case, "none"))
        mean = statistics.mean(row.accuracies)
        spread = f"{min(row.accuracies):.1%}–{max(row.accuracies):.1%}"
        cells = [row.case, row.kind, f"{mean:.1%} ({spread})"]
        if row.step_s:
            cells += [
                f"{row.sent_bytes / 1e3:,.1f} kB", f"{row.sent_bytes / whole.sent_bytes:.0%}",
                f"{1e3 * row.step_s:.2f} ms", f"{whole.step_s / row.step_s:.2f}",
            ]  # fmt: skip
        section.rows.append([*cells, *["–"] * (len(section.header) - len(cells))])
    if all(row.digests for row in rows):
        same = sum(len(set(row.digests)) == 1 for row in rows)
        what = "one SHA-256 of each in the network, in all rounds and on one rank"
        section.at_most(what, f"{same} of {len(rows)}", same == len(rows))
    section.raw["rows"] = [row.__dict__ for row in rows]
    return section


def _rows(
    case: Case, seeds: Sequence[int], rounds: int, without_lab: bool, folder: Path
) -> Iterator[Row]:
    accuracies = {kind: [_accuracy(case, kind, seed, folder) for seed in seeds] for kind in KINDS}
    if without_lab:
        yield from (Row(case.name, kind, found) for kind, found in accuracies.items())
        return
    costs: dict[str, list[tuple[float, float, str]]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(RANKS, SHAPE))
        for number in range(rounds):
            for kind in KINDS:
                costs[kind].append(_timed(lab, case, kind, number, folder))
    for kind, found in costs.items():
        sent_bytes, step_s, _ = min(found, key=lambda cost: cost[1])
        digests = (*(digest for _, _, digest in found), _alone(case, kind, folder))
        row = Row(case.name, kind, accuracies[kind], sent_bytes, step_s, digests)
        print(row, file=sys.stderr, flush=True)
        yield row


def _keys(case: Case, kind: str, steps: int, run_dir: Path) -> list[str]:
    rest = [f"eval_every={_NEVER}", f"checkpoint.every={_NEVER}", "test_on=last"]
    return [*case.keys, *KINDS[kind], f"steps={steps}", *rest, "--run-dir", str(run_dir)]


def _accuracy(case: Case, kind: str, seed: int, folder: Path) -> float:
    run_dir = folder / f"{case.name}-{kind}-{seed}"
    _train([*_keys(case, kind, case.steps, run_dir), f"seed={seed}"])
    return float(read_result(run_dir)["metrics"]["test/accuracy"])


def _alone(case: Case, kind: str, folder: Path) -> str:
    """The SHA-256 of what is timed, on one rank without a network."""
    run_dir = folder / f"{case.name}-{kind}-alone"
    _train(_keys(case, kind, case.timed_steps, run_dir))
    return str(read_result(run_dir)["params_sha256"])


def _train(keys: Sequence[str]) -> None:
    argv = [sys.executable, "-m", "lockstep", "train", "digits", *keys]
    subprocess.run(argv, check=True, capture_output=True, timeout=_TIMEOUT_S)


def _timed(lab: Lab, case: Case, kind: str, number: int, folder: Path) -> tuple[float, float, str]:
    """Bytes and seconds of a step, and the SHA-256 in the end."""
    run_dir = folder / f"{case.name}-{kind}-timed-{number}"
    argv = ["lockstep", "train", "digits", *_keys(case, kind, case.timed_steps, run_dir)]
    with (folder / "lab.log").open("a") as said:
        ended = start_ranks(lab, 1, argv, "mpi", output=said, timeout_s=_TIMEOUT_S)
    if ended.exit_code:
        raise SystemExit(f"{kind}: ranks ended with exit code {ended.exit_code}")
    rows = read_events(run_dir / "events.jsonl")
    # The first report has the start in it, the last one the checkpoint at the end.
    reports = [row for row in rows if row["event"] == "StepDone"][1:-1]
    sent = [
        statistics.mean(rank["sent_bytes"] for rank in row["ranks"]) / row["num_steps"]
        for row in reports
    ]
    step_s = statistics.median(row["seconds"] / row["num_steps"] for row in reports)
    return statistics.median(sent), step_s, str(read_result(run_dir)["params_sha256"])


if __name__ == "__main__":
    main()
