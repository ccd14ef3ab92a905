"""What balancing wins where one of two ranks is slow; writes `docs/benchmarks/balance.md`."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lockstep.observe import read_events, read_result
from page import Section, command, publish, ratio
from processes import HERE, Spread
from run import DOCS, machine
from slowed_task import SLOWED

RANKS = 2
MICROBATCHES = 12
"""A multiple of 3 and 4: a rank that is slowed twice or three times can get its share exactly."""
FACTORS = (2, 3)
ROUNDS = 5
OF_IDEAL = 1.4 / 1.5
"""The target: this part of the ideal."""
_TIMEOUT_S = 600


@dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        step_s: seconds of a step, once microbatches are where they stay.
        digest: SHA-256 of the parameters in the end.
        microbatches: how many each rank had in the end.
    """

    step_s: float
    digest: str
    microbatches: tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    args = parser.parse_args()
    rounds, steps = (1, 20) if args.quick else (ROUNDS, 60)
    facts = machine(("torch", "mpi4py")) | {"command": command("balance")}
    with tempfile.TemporaryDirectory() as name:
        section = _section(rounds, steps, Path(name))
    publish(None if args.quick else DOCS, "balance", "Balance", facts, [section])


def _section(rounds: int, steps: int, folder: Path) -> Section:
    section = Section(
        "One of two ranks is slow",
        f"{MICROBATCHES} microbatches, nearly all of whose time are products of matrices, of which "
        "one rank has two or three times as many to compute for each. `not balanced`: "
        "`balance_every=0`, each rank has half of the microbatches. `balanced`: "
        "`balance_every=5`; a step is the median of reports behind the last change of ranges. "
        "`ideal`: both ranks are done at once, and nothing else takes time.",
        (
            "slowed", "not balanced", "balanced", "microbatches", "balanced is faster by", "ideal",
            "SHA-256",
        ),
    )  # fmt: skip
    for factor in FACTORS:
        pairs = [
            (
                _run(factor, 0, steps, folder / f"{factor}-{number}-not"),
                _run(factor, 5, steps, folder / f"{factor}-{number}-balanced"),
            )
            for number in range(rounds)
        ]
        before, after = zip(*pairs, strict=True)
        won = Spread.of_ratios([r.step_s for r in before], [r.step_s for r in after])
        digests = {run.digest for pair in pairs for run in pair}
        digests.add(_run(1, 0, steps, folder / f"{factor}-even").digest)
        best = ideal(factor)
        shares = "; ".join(sorted({" + ".join(map(str, run.microbatches)) for run in after}))
        section.rows.append(
            (
                f"{factor}x", _milliseconds(before), _milliseconds(after), shares, ratio(won),
                f"{best:.2f}", "one" if len(digests) == 1 else f"{len(digests)} different ones",
            )
        )  # fmt: skip
        what = f"slowed {factor}x, balanced over not (ideal {best:.2f}), of the ideal"
        of_ideal = Spread(won.median / best, won.low / best, won.high / best)
        section.at_least(what, of_ideal, round(OF_IDEAL, 3))
        what = f"slowed {factor}x: SHA-256s of all trainings, also without a slow rank = 1"
        section.at_most(what, str(len(digests)), len(digests) == 1)
        section.raw[f"slowed {factor}x"] = [[r.__dict__ for r in pair] for pair in pairs]
    return section


def ideal(factor: int) -> float:
    """Steps with even ranges over those with the best ones, of two ranks."""
    even = max(MICROBATCHES // 2, factor * (MICROBATCHES - MICROBATCHES // 2))
    best = min(max(n, factor * (MICROBATCHES - n)) for n in range(MICROBATCHES + 1))
    return even / best


def _milliseconds(runs: tuple[Run, ...]) -> str:
    return f"{1e3 * statistics.median(run.step_s for run in runs):.1f} ms"


def _run(factor: int, balance_every: int, steps: int, run_dir: Path) -> Run:
    keys = [
        f"num_microbatches={MICROBATCHES}", "batch_size=96", f"steps={steps}", "log_every=1",
        f"balance_every={balance_every}", f"checkpoint.every={steps + 1}",
    ]  # fmt: skip
    argv = [sys.executable, "-m", "lockstep", "train", f"{HERE / 'slowed_task.py'}:Slowed"]
    argv += [*keys, "-n", str(RANKS), "--run-dir", str(run_dir)]
    ended = subprocess.run(
        argv,
        env={**os.environ, SLOWED: f"1x{factor}"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(argv)}: {ended.stdout}{ended.stderr}")
    rows = read_events(run_dir / "events.jsonl")
    moves = [row for row in rows if row["event"] == "Rebalanced"]
    settled = moves[-1]["step"] + 1 if moves else 1
    # The last report has the checkpoint in it.
    reports = [row for row in rows if row["event"] == "StepDone" and row["step"] > settled][:-1]
    if not reports:
        raise SystemExit(f"{run_dir}: ranges changed until the end")
    step_s = statistics.median(row["seconds"] / row["num_steps"] for row in reports)
    shares = tuple(moves[-1]["microbatches"]) if moves else (MICROBATCHES // RANKS,) * RANKS
    return Run(step_s, str(read_result(run_dir)["params_sha256"]), shares)


if __name__ == "__main__":
    main()
