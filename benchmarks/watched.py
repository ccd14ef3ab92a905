"""What it costs a run to be watched; writes `docs/benchmarks/watched.md` and `watched.json`.

`--quick` just sees that everything runs, and prints.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config import TrainConfig
from lockstep.engine.events import StepDone
from lockstep.launching.job.commands import rank_environment
from lockstep.observe import event_from_row
from lockstep.observe.storing.jsonl import EventsJsonl
from lockstep.observe.storing.metrics_csv import MetricsCsv
from page import Section, command, duration, publish
from processes import Spread
from run import DOCS, machine
from watchers import exporter, screen, web_page

TASK = f"{Path(__file__).with_name('diagnosis_task.py')}:Ill"
KEYS = ("batch_size=256", "num_microbatches=4", "width=128", "log_every=1", "checkpoint.every=0")
RANKS = 2
_ORDER = ("alone", "watched", "alone again")
_TIMEOUT_S = 300
_MOST_S = 20e-6


@dataclass(frozen=True)
class Cores:
    """Who may run where.

    Attributes:
        ranks: cores of the ranks.
        watchers: cores of those that watch; those of the ranks where there are no others.
    """

    ranks: frozenset[int]
    watchers: frozenset[int]

    @classmethod
    def distributed(cls) -> Cores:
        """The first two of those that this process may use are the ranks'."""
        usable = sorted(os.sched_getaffinity(0))
        ranks = frozenset(usable[:RANKS])
        return cls(ranks, frozenset(usable[RANKS:]) or ranks)

    def told(self) -> str:
        """What a table says."""
        shared = "the same" if self.ranks == self.watchers else f"{len(self.watchers)} others"
        return f"{len(self.ranks)} for the ranks, {shared} for those that watch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of three runs each")
    parser.add_argument("--steps", type=int, default=3000, help="of each run")
    parser.add_argument("--quick", action="store_true", help="one short round, printed")
    args = parser.parse_args()
    rounds, steps = (1, 500) if args.quick else (args.rounds, args.steps)
    cores = Cores.distributed()
    facts = machine(("torch", "mpi4py", "textual", "prometheus-client"))
    facts["cores"] = cores.told()
    facts["command"] = command("watched")
    with tempfile.TemporaryDirectory() as folder:
        sections = [being_watched(Path(folder), rounds, steps, cores), events(Path(folder))]
    publish(None if args.quick else DOCS, "watched", "Being watched", facts, sections)


def being_watched(folder: Path, rounds: int, steps: int, cores: Cores) -> Section:
    """Runs alone and runs that are watched, in turn."""
    has_page = importlib.util.find_spec("lockstep.observe.monitor.web") is not None
    who = "the screen of `lockstep monitor`, its exporter, asked each second" + (
        ", and its page, with one reader" if has_page else ""
    )
    section = Section(
        "A run with short steps",
        f"{RANKS} ranks, {steps:,} steps, a report for each step. Watched by {who}, all at once, "
        "each looking once a second. A run alone, one that is watched, and another one alone, in "
        "turn: the last one says how much two runs differ when nothing does.",
        ("", "a step", "as a multiple of alone"),
    )
    found: dict[str, list[float]] = {name: [] for name in _ORDER}
    for number in range(rounds):
        for name in _ORDER:
            run_dir = folder / f"{number}-{name.replace(' ', '-')}"
            with watched(run_dir, cores) if name == "watched" else ExitStack():
                found[name].append(trained(run_dir, steps, cores))
        times = "  ".join(f"{name} {1e3 * found[name][-1]:.3f} ms" for name in _ORDER)
        print(f"  round {number + 1}/{rounds}: {times}", file=sys.stderr, flush=True)
    section.raw["step_s"] = found
    ratios = {n: Spread.of_ratios(found[n], found["alone"]) for n in _ORDER}
    for name in _ORDER:
        value = ratios[name]
        shown = f"{value.median:.4f} ({value.low:.4f}–{value.high:.4f})"
        section.rows.append((name, duration(Spread.of(found[name])), shown))
    cost = ratios["watched"].median - 1
    section.raw["ratios"] = {name: asdict(value) for name, value in ratios.items()}
    pairs = zip(found["alone again"], found["alone"], strict=True)
    noise = statistics.median(abs(again / alone - 1) for again, alone in pairs)
    section.at_most(
        "added less than two runs alone differ",
        f"{cost:.1%} of a step, and {noise:.1%}, the median of {rounds} rounds",
        cost < noise,
    )
    return section


@contextmanager
def watched(run_dir: Path, cores: Cores) -> Iterator[None]:
    """Everything that watches, from before the run until after it."""
    run_dir.mkdir()
    with ExitStack() as stack:
        stack.enter_context(screen(run_dir, cores.watchers))
        stack.enter_context(exporter(run_dir, cores.watchers))
        if importlib.util.find_spec("lockstep.observe.monitor.web") is not None:
            stack.enter_context(web_page(run_dir, cores.watchers))
        time.sleep(2.0)  # their start is not what is measured
        yield


def trained(run_dir: Path, steps: int, cores: Cores) -> float:
    """Median of the seconds of a step, without the first tenth of them."""
    argv = [
        sys.executable, "-m", "lockstep", "train", TASK, "-n", str(RANKS), "--run-dir",
        str(run_dir), f"steps={steps}", *KEYS, "-q",
    ]  # fmt: skip
    done = subprocess.run(
        argv,
        env=rank_environment(threads=1),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        preexec_fn=lambda: os.sched_setaffinity(0, cores.ranks),
    )
    if done.returncode:
        sys.exit(f"{run_dir}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    times = [row["seconds"] / row["num_steps"] for row in reports(run_dir)]
    return statistics.median(times[len(times) // 10 :])


def reports(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's steps."""
    with (run_dir / "events.jsonl").open() as file:
        rows = [json.loads(line) for line in file]
    return [row for row in rows if row["event"] == "StepDone"]


def events(folder: Path) -> Section:
    """How long rank 0 takes to write a step's event down, which is all that watching needs."""
    section = Section(
        "An event for each step",
        "The time that rank 0 takes to write one. Runs write them whether they are watched or not.",
        ("file", "an event"),
    )
    source = next(path for path in sorted(folder.iterdir()) if path.is_dir())
    steps = [event_from_row(row) for row in reports(source)]
    again = folder / "again"
    for name, kind in (("events.jsonl", EventsJsonl), ("metrics.csv", MetricsCsv)):
        again.mkdir()
        times = []
        sink = kind(again / name)
        for step in steps:
            assert isinstance(step, StepDone)
            begun = time.perf_counter()
            sink(step)
            times.append(time.perf_counter() - begun)
        sink.close()
        shutil.rmtree(again)
        section.raw[name] = times
        cuts = statistics.quantiles(times, n=20)
        section.rows.append((name, duration(Spread(statistics.median(times), cuts[0], cuts[-1]))))
    both = sum(statistics.median(section.raw[name]) for name in ("events.jsonl", "metrics.csv"))
    every = TrainConfig().log_every
    section.at_most(
        "events ≤ 20 µs a step",
        f"{1e6 * both / every:.1f} µs with log_every={every}, the default; {1e6 * both:.1f} µs "
        "with a report for each step",
        both / every <= _MOST_S,
    )
    section.verdicts.append("- In brackets: the 5th and the 95th of a hundred.")
    return section


if __name__ == "__main__":
    main()
