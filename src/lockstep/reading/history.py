"""All that the events of a run tell, up to now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.engine.events import (
    Event,
    Failed,
    Finished,
    Joined,
    Logged,
    RankLost,
    RankTimes,
    Rebalanced,
    Recovered,
    RunStarted,
    StepDone,
)
from lockstep.errors import RunDirectoryError
from lockstep.observe import event_from_row
from lockstep.parsing import shown
from lockstep.reading.curves import Curve

KINDS = ("compute_s", "communication_s", "data_s", "checkpoint_s")
"""What a rank spends its time with."""
_MOST_PROBLEMS = 20
_MOST_LOGGED = 100


@dataclass
class Process:
    """A process that takes part, or has.

    Attributes:
        joined: how it came in.
        since: Unix time of that.
        rank: its number now; ranks are numbered anew when one is lost.
        until: Unix time at which it was lost; None if it was not.
        reason: why its watchdog ended it; empty if it did not.
        seconds: what it has spent its time with, by kind.
        cpu_s: seconds that its threads have computed.
        cores_s: seconds that anybody has computed on the cores that it may run on.
        faults: page faults that had to read from a disk.
        preemptions: how often it had to leave a core to another process.
        peak_bytes: the most memory that it has had.
        num_microbatches: how many it computes now.
    """

    joined: Joined
    since: float
    rank: int
    until: float | None = None
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    cpu_s: float = 0.0
    cores_s: float = 0.0
    faults: int = 0
    preemptions: int = 0
    peak_bytes: int = 0
    num_microbatches: float = 0.0

    def add(self, times: RankTimes) -> None:
        """Count in what it has spent since the last report."""
        for kind in KINDS:
            self.seconds[kind] += getattr(times, kind)
        self.cpu_s += times.cpu_s
        self.cores_s += times.cores_s
        self.faults += times.faults
        self.preemptions += times.preemptions
        self.peak_bytes = max(self.peak_bytes, times.peak_bytes)


@dataclass(frozen=True)
class Happening:
    """An event that is no point of a curve.

    Attributes:
        time: Unix time.
        event: what has happened.
    """

    time: float
    event: Event


class History:
    """A run, as far as its rows have been read.

    Attributes:
        plan: how the newest sitting was started; None before the first.
        first_plan: the same of the first sitting.
        started: Unix time of the first row.
        newest: Unix time of the newest row.
        step: steps that are committed.
        curves: by name: `lr`, `grad_norm`, `samples_per_s`, `compute_efficiency`, and the metrics
            as `split/name`, where `train` is what was trained on, and `log` what was logged.
        logged: texts, histograms and pictures that were logged, by name, ascending by step; the
            newest few of each.
        processes: all that have taken part in the newest sitting, in the order in which they came.
        happenings: in order.
        first_of_sitting: number of the first one of the newest sitting.
        num_steps: steps that the newest sitting has committed, as far as it has reported them.
        end: how the newest sitting has ended; None while it goes on, or if it was killed.
        problems: rows that cannot be read, each with its reason; the first ones.
        num_problems: how many there are.
    """

    def __init__(self) -> None:
        self.plan: RunStarted | None = None
        self.first_plan: RunStarted | None = None
        self.started = self.newest = 0.0
        self.step = 0
        self.curves: dict[str, Curve] = defaultdict(Curve)
        self.logged: dict[str, list[Logged]] = defaultdict(list)
        self.processes: list[Process] = []
        self.happenings: list[Happening] = []
        self.end: Finished | Failed | None = None
        self.first_of_sitting = self.num_steps = 0
        self._newcomers: list[int] = []
        self.problems: list[str] = []
        self.num_problems = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the next row; one that is not understood is a problem, and no error."""
        try:
            event = event_from_row(row)
            time = float(row["time"])
        except (RunDirectoryError, KeyError, TypeError, ValueError) as error:
            self.add_problem(str(error))
            return
        self.started = self.started or time
        self.newest = time
        match event:
            case StepDone():
                self._add_step(event)
                return
            case Logged():
                self._add_logged(event)
                return
            case RunStarted():
                self._start(event)
            case Joined():
                count = len(range(*event.microbatches))
                self.processes.append(Process(event, time, event.rank, num_microbatches=count))
                self._newcomers.append(event.rank)
            case RankLost():
                self._lose(event, time)
            case Recovered():
                self._number_anew(event.world_size)
            case Rebalanced():
                for process in self.living:
                    if process.rank < len(event.microbatches):
                        process.num_microbatches = event.microbatches[process.rank]
            case Finished() | Failed():
                self.end = event
            case _:
                self._add_evaluation(event)
        self.step = max(self.step, event.step)
        self.happenings.append(Happening(time, event))

    @property
    def living(self) -> list[Process]:
        """The processes that take part now."""
        return [process for process in self.processes if process.until is None]

    def add_problem(self, problem: str) -> None:
        """Note what cannot be read."""
        self.num_problems += 1
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem)

    def _start(self, plan: RunStarted) -> None:
        self.first_plan = self.first_plan or plan
        self.plan, self.end, self._newcomers = plan, None, []
        if plan.continued:
            return
        # Its ranks have said that they take part just before.
        self.processes = self.processes[-plan.world_size :]
        self.first_of_sitting = len(self.happenings) - len(self.processes)
        self.num_steps = 0
        self.step = plan.step
        for curve in self.curves.values():
            curve.cut(plan.step)
        for name, logged in self.logged.items():
            self.logged[name] = [event for event in logged if event.step <= plan.step]

    def _add_step(self, done: StepDone) -> None:
        step = self.step = done.step
        self.num_steps += done.num_steps
        named = {"lr": done.lr, "grad_norm": done.grad_norm, "samples_per_s": done.samples_per_s}
        named["compute_efficiency"] = done.compute_efficiency
        metrics = {"loss": done.loss, **done.metrics}
        for name, value in (named | {f"train/{k}": v for k, v in metrics.items()}).items():
            self.curves[name].add(step, value)
        by_rank = {process.rank: process for process in self.living}
        for times in done.ranks:
            if times.rank in by_rank:
                by_rank[times.rank].add(times)

    def _add_logged(self, event: Logged) -> None:
        if event.kind == "scalar":
            if isinstance(event.value, (int, float)):
                self.curves[f"log/{event.name}"].add(event.step, event.value)
            else:
                self.add_problem(f"event Logged: {shown(event.value)} is no number")
            return
        before = [logged for logged in self.logged[event.name] if logged.step < event.step]
        self.logged[event.name] = [*before[1 - _MOST_LOGGED :], event]

    def _add_evaluation(self, event: Event) -> None:
        split, metrics = getattr(event, "split", None), getattr(event, "metrics", {})
        if split is not None:
            for name, value in metrics.items():
                self.curves[f"{split}/{name}"].add(event.step, value)

    def _lose(self, event: RankLost, time: float) -> None:
        for process in self.processes:
            if process.joined.slot == event.slot and process.until is None:
                process.until, process.reason = time, event.reason

    def _number_anew(self, world_size: int) -> None:
        """Survivors keep their order, and take the numbers that newcomers have left them."""
        living = sorted(self.living, key=lambda process: process.rank)
        new, self._newcomers = self._newcomers, []
        survivors = [p for p in living if not (p.joined.rank in new and p.joined.step > 0)]
        free = (rank for rank in range(world_size) if rank not in new)
        for process, rank in zip(survivors, free, strict=False):
            process.rank = rank
        for process in living:  # nobody says who computes which of them now
            process.num_microbatches = self.plan.num_microbatches / world_size if self.plan else 0.0
