"""All that the events of a run show up to now, and quantities over its steps."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.config.parsing import shown
from lockstep.engine.events import (
    Evaluated,
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
from lockstep.engine.timing import Times
from lockstep.errors import RunDirectoryError
from lockstep.observe import Measured, Predicted, StepMeter, event_from_row


class Curve:
    """Values of one quantity, one for each of some steps, ascending.

    Attributes:
        steps: int64.
        values: float64, as many.
        origins: int64, as many: the first step that a value comes from. It is the step itself, but
            for means over several steps, and for evaluations of older parameters.
    """

    __slots__ = ("origins", "steps", "values")

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.origins = array("q")

    def add(self, step: int, value: float, origin: int | None = None) -> None:
        """Append a value; what was there of this step or later ones comes again, so it goes.

        Args:
            step: of the value.
            value: to append.
            origin: the first step that it comes from; the step itself if left out.

        Raises:
            TypeError: the value is no number; nothing is appended then.
            OverflowError: what is given is larger than the curve can hold; nothing is appended.
        """
        steps = array("q", (step, step if origin is None else origin))
        values = array("d", (value,))
        self.cut(step - 1)
        self.steps.append(steps[0])
        self.values.append(values[0])
        self.origins.append(steps[1])

    def cut(self, last: int) -> None:
        """Remove what is of later steps."""
        while self.steps and self.steps[-1] > last:
            self.steps.pop()
            self.values.pop()
            self.origins.pop()

    def at(self, step: int, origin: int | None = None) -> float | None:
        """The value of a step; None if there is none, or if it comes from others than asked for."""
        place = bisect_left(self.steps, step)
        found = place < len(self.steps) and self.steps[place] == step
        is_meant = found and origin in (None, self.origins[place])
        return self.values[place] if is_meant else None


class CurveStore(Protocol):
    """Takes the values of a run as they come."""

    def add(self, step: int, values: Mapping[str, float], origin: int | None = None) -> None:
        """Take values, by the names of their curves.

        Args:
            step: of the values.
            values: by name.
            origin: the first step that they come from; the step itself if left out.
        """

    def cut(self, last: int) -> None:
        """Remove what is of later steps, of all curves."""


class Curves(defaultdict[str, Curve]):
    """A store that keeps every value: curves by name."""

    def __init__(self) -> None:
        super().__init__(Curve)

    def add(self, step: int, values: Mapping[str, float], origin: int | None = None) -> None:
        """Append the values of a step."""
        for name, value in values.items():
            self[name].add(step, value, origin)

    def cut(self, last: int) -> None:
        """Remove what is of later steps, of all curves."""
        for curve in self.values():
            curve.cut(last)


KINDS = ("compute_s", "communication_s", "data_s", "checkpoint_s")
"""What a rank spends its time with."""
_OF_ONE_STEP = ("lr", "grad_norm")
"""What a report says of its last step, and not as a mean over all of them."""
_MOST_PROBLEMS = 20
_END_OF_TIME = 1e11
"""Unix time that no clock shows."""
_MOST_STEPS = 2**62
_MOST_LOGGED = 100


@dataclass(eq=False)
class Process:
    """A process that takes part, or has.

    Attributes:
        joined: how it came in.
        since: Unix time of that.
        rank: its number now; ranks are numbered anew when one is lost.
        until: Unix time at which it was lost; None if it was not.
        reason: why its watchdog ended it; empty if it did not.
        times: what it has spent.
        num_microbatches: how many it computes in a step now.
        num_computed: how many it has computed in the steps that were reported.
        reported: Unix time of the newest report of what it has done; 0.0 before the first.
    """

    joined: Joined
    since: float
    rank: int
    until: float | None = None
    reason: str = ""
    times: Times = field(default_factory=Times)
    num_microbatches: float = 0.0
    num_computed: float = 0.0
    reported: float = 0.0

    def add(self, times: RankTimes, num_steps: int) -> None:
        """Count in what it has spent in the steps since the last report."""
        self.num_computed += num_steps * self.num_microbatches
        self.times = self.times.plus(Times(*(getattr(times, name) for name in Times._fields)))

    @property
    def seconds(self) -> dict[str, float]:
        """What it has spent its time with, by kind."""
        return {kind: getattr(self.times, kind) for kind in KINDS}


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

    Args:
        store: takes the values of curves, for runs too large for keeping them all; `curves` stays
            empty then.

    Attributes:
        plan: how the newest session was started; None before the first.
        started: Unix time of the first row.
        newest: Unix time of the newest row.
        step: steps that are committed.
        curves: by name: `lr`, `grad_norm`, `samples_per_s`, `compute_efficiency`, and the metrics
            as `split/name`, where `train` is what was trained on, and `log` what was logged.
        logged: texts, histograms and pictures that were logged, by name, ascending by step; the
            newest few of each.
        processes: all that have taken part in the newest session, in the order in which they came.
        happenings: in order.
        first_of_session: number of the first one of the newest session.
        num_at_start: how many processes the newest session began with.
        num_steps: steps that the newest session has committed, as far as it has reported them.
        end: how the newest session has ended; None while it goes on, or if it was killed.
        problems: rows that cannot be read, each with its reason; the first ones.
        num_problems: how many there are.
    """

    def __init__(self, store: CurveStore | None = None) -> None:
        self.plan: RunStarted | None = None
        self.started = self.newest = 0.0
        self.step = 0
        self.curves = Curves()
        self._store: CurveStore = self.curves if store is None else store
        self.logged: dict[str, list[Logged]] = defaultdict(list)
        self.processes: list[Process] = []
        self.happenings: list[Happening] = []
        self.end: Finished | Failed | None = None
        self.first_of_session = self.num_steps = self.num_at_start = 0
        self._joiners: list[Process] = []
        self._meter = StepMeter()
        self.problems: list[str] = []
        self.num_problems = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the next row; one that is not understood is a problem, and no error."""
        try:
            event, time = event_from_row(row), float(row["time"])
        except (RunDirectoryError, KeyError, TypeError, ValueError, OverflowError) as error:
            self.add_problem(str(error))
        else:
            self.add_event(event, time)

    def add_event(self, event: Event, time: float) -> None:
        """Take the next event; one that cannot be is a problem, and no error.

        Args:
            event: what has happened.
            time: of it, in Unix seconds.
        """
        try:
            _check_ranges(event, time)
            self._take(event, time)
        except (TypeError, ValueError, ArithmeticError) as error:
            self.add_problem(f"event {type(event).__name__}: {error}")

    def _take(self, event: Event, time: float) -> None:
        self.started = self.started or time
        self.newest = time
        self._meter.take(event)
        match event:
            case Predicted() | Measured():
                return
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
                joiner = Process(event, time, event.rank, num_microbatches=count)
                self.processes.append(joiner)
                self._joiners.append(joiner)
            case RankLost():
                self._lose(event, time)
            case Recovered():
                self._number_anew(event.world_size)
                self._deal_out(event.microbatches)
            case Rebalanced():
                self._deal_out(event.microbatches)
            case Finished() | Failed():
                self.end = event
            case Evaluated():
                origin = event.step if event.model_step is None else event.model_step
                values = {f"{event.split}/{name}": value for name, value in event.metrics.items()}
                self._store.add(event.step, values, origin)
        self.step = max(self.step, event.step)
        self.happenings.append(Happening(time, event))

    @property
    def cost(self) -> Measured:
        """What the steps of the newest session cost by now, and what was predicted."""
        return self._meter.measured(self.step)

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
        joined, self._joiners = self._joiners, []
        self.plan, self.end = plan, None
        if plan.continued:
            return
        # The ranks of a session say that they take part just before; a run that goes back to a
        # checkpoint in the midst of one has those that it had.
        if joined:
            self.processes = joined
            self.first_of_session = len(self.happenings) - len(joined)
            self.num_steps, self.num_at_start = 0, len(joined)
        self.step = plan.step
        self._store.cut(plan.step)
        for name, logged in self.logged.items():
            self.logged[name] = [event for event in logged if event.step <= plan.step]

    def _add_step(self, done: StepDone) -> None:
        step = self.step = done.step
        self.num_steps += done.num_steps
        metrics = {f"train/{name}": value for name, value in done.metrics.items()}
        means = step_values(done) | metrics
        self._store.add(step, {name: means.pop(name) for name in _OF_ONE_STEP})
        self._store.add(step, means, step - done.num_steps + 1)
        by_rank = {process.rank: process for process in self.living}
        for times in done.ranks:
            if times.rank in by_rank:
                by_rank[times.rank].add(times, done.num_steps)
                by_rank[times.rank].reported = self.newest

    def _add_logged(self, event: Logged) -> None:
        if event.kind == "scalar":
            if not isinstance(event.value, (int, float)):
                raise TypeError(f"{shown(event.value)} is no number")
            self._store.add(event.step, {f"log/{event.name}": event.value})
            return
        before = [logged for logged in self.logged[event.name] if logged.step < event.step]
        self.logged[event.name] = [*before[1 - _MOST_LOGGED :], event]

    def _lose(self, event: RankLost, time: float) -> None:
        for process in self.processes:
            if process.joined.slot == event.slot and process.until is None:
                process.until, process.reason = time, event.reason

    def _number_anew(self, world_size: int) -> None:
        """Survivors keep their order, and take the numbers that joining ranks have left them."""
        living = sorted(self.living, key=lambda process: process.rank)
        new, self._joiners = self._joiners, []
        survivors = [process for process in living if process not in new]
        taken = {process.rank for process in new}
        free = (rank for rank in range(world_size) if rank not in taken)
        for process, rank in zip(survivors, free, strict=False):
            process.rank = rank
        for process in living:  # files of earlier versions do not say who computes which
            process.num_microbatches = self.plan.num_microbatches / world_size if self.plan else 0.0

    def _deal_out(self, microbatches: Sequence[int]) -> None:
        for process in self.living:
            if 0 <= process.rank < len(microbatches):
                process.num_microbatches = microbatches[process.rank]


def _check_ranges(event: Event, time: float) -> None:
    """Refuse what no run can have said; `ValueError` then."""
    if not 0.0 <= time < _END_OF_TIME or abs(event.step) > _MOST_STEPS:
        raise ValueError(f"time {time} or step {event.step} is out of range")
    match event:
        case StepDone() if not 0 < event.num_steps <= _MOST_STEPS:
            raise ValueError(f"num_steps {shown(event.num_steps)} is out of range")
        case Evaluated(model_step=int(origin)) if abs(origin) > _MOST_STEPS:
            raise ValueError(f"model_step {shown(origin)} is out of range")


def step_values(done: StepDone) -> dict[str, float]:
    """What a report of steps says beside its metrics, by the names of the curves."""
    return {
        "lr": done.lr,
        "grad_norm": done.grad_norm,
        "samples_per_s": done.samples_per_s,
        "compute_efficiency": done.compute_efficiency,
        "train/loss": done.loss,
    }
