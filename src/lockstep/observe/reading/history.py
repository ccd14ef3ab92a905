"""The state of a run by its events so far, and its curves."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.config.parsing import shown
from lockstep.engine import events
from lockstep.engine.timing import Times
from lockstep.errors import RunDirectoryError
from lockstep.observe.step_costs import Measured, Predicted, StepMeter
from lockstep.observe.storing.jsonl import event_from_row


class Curve:
    """Values of one quantity at ascending steps.

    Attributes:
        steps: int64 [n].
        values: float64 [n].
        origins: int64 [n]: the first step that a value comes from. It is the step itself, but for
            means over several steps, and for evaluations of older parameters.
    """

    __slots__ = ("origins", "steps", "values")

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.origins = array("q")

    def add(self, step: int, value: float, origin: int | None = None) -> None:
        """Append a value; values of this step and later ones are removed, since they come again.

        Args:
            step: step of the value.
            value: value to append.
            origin: the first step that it comes from; the step itself if left out.

        Raises:
            TypeError: the value is not a number; nothing is appended then.
            OverflowError: a number is larger than the curve can hold; nothing is appended then.
        """
        steps = array("q", (step, step if origin is None else origin))
        values = array("d", (value,))
        self.cut(step - 1)
        self.steps.append(steps[0])
        self.values.append(values[0])
        self.origins.append(steps[1])

    def cut(self, last: int) -> None:
        """Remove the values of later steps."""
        while self.steps and self.steps[-1] > last:
            self.steps.pop()
            self.values.pop()
            self.origins.pop()

    def at(self, step: int, origin: int | None = None) -> float | None:
        """The value of a step; None if there is none, or none with that origin."""
        index = bisect_left(self.steps, step)
        found = index < len(self.steps) and self.steps[index] == step
        has_origin = found and origin in (None, self.origins[index])
        return self.values[index] if has_origin else None


class CurveStore(Protocol):
    """Stores the values of a run's curves."""

    def add(self, step: int, values: Mapping[str, float], origin: int | None = None) -> None:
        """Add the values of a step, by the names of their curves.

        Args:
            step: step of the values.
            values: values by name.
            origin: the first step that they come from; the step itself if left out.
        """

    def cut(self, last: int) -> None:
        """Remove the values of later steps from all curves."""


class Curves(defaultdict[str, Curve]):
    """A store that keeps every value: curves by name."""

    def __init__(self) -> None:
        super().__init__(Curve)

    def add(self, step: int, values: Mapping[str, float], origin: int | None = None) -> None:
        """Append the values of a step."""
        for name, value in values.items():
            self[name].add(step, value, origin)

    def cut(self, last: int) -> None:
        """Remove the values of later steps from all curves."""
        for curve in self.values():
            curve.cut(last)


KINDS = ("compute_s", "communication_s", "data_s", "checkpoint_s")
"""The kinds of work that a rank spends its time on."""
_OF_ONE_STEP = ("lr", "grad_norm")
"""What a report says of its last step, not as a mean over all its steps."""
_MAX_PROBLEMS = 20
_END_OF_TIME = 1e11
"""A Unix time that no clock shows."""
_MAX_STEP = 2**62
_MAX_LOGGED = 100


@dataclass(eq=False)
class Process:
    """A process that is or was a rank of the newest session.

    Attributes:
        joined: the event of its joining.
        since: Unix time of that event.
        rank: its present rank, which changes when another one is lost.
        until: Unix time at which it was lost; None if it was not.
        reason: why its watchdog ended it; empty if it did not.
        times: the sums of its reported times and counts.
        num_microbatches: how many microbatches it computes in a step now.
        num_computed: how many it has computed in the reported steps.
        reported: Unix time of its newest report; 0.0 before the first.
    """

    joined: events.Joined
    since: float
    rank: int
    until: float | None = None
    reason: str = ""
    times: Times = field(default_factory=Times)
    num_microbatches: float = 0.0
    num_computed: float = 0.0
    reported: float = 0.0

    def add(self, times: events.RankTimes, num_steps: int) -> None:
        """Add a report of its times."""
        self.num_computed += num_steps * self.num_microbatches
        self.times = self.times.plus(Times(*(getattr(times, name) for name in Times._fields)))

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds that it has spent on each kind of work."""
        return {kind: getattr(self.times, kind) for kind in KINDS}


@dataclass(frozen=True)
class Happening:
    """An event with its time; of those that are not points of curves.

    Attributes:
        time: Unix time.
        event: the event.
    """

    time: float
    event: events.Event


class History:
    """The state of a run by the rows that have been read.

    Args:
        store: stores the values of curves, for runs that are too large to keep all of them;
            `curves` stays empty then.

    Attributes:
        plan: the start of the newest session; None before the first.
        started: Unix time of the first row.
        newest: Unix time of the newest row.
        step: number of committed steps.
        curves: curves by name: `lr`, `grad_norm`, `samples_per_s`, `compute_efficiency`, and the
            metrics as `split/name`, where the split is `train` for training and `log` for logged
            scalars.
        logged: logged texts, histograms and pictures by name, ascending by step; the newest ones.
        processes: all processes of the newest session, in the order of their joining.
        happenings: the other events, in order.
        first_of_session: index of the first of them in the newest session.
        num_at_start: number of processes at the start of the newest session.
        num_steps: number of steps that the newest session has reported.
        end: the end of the newest session; None while it is running, or if it was killed.
        problems: the first rows that cannot be read, each with its reason.
        num_problems: number of rows that cannot be read.
    """

    def __init__(self, store: CurveStore | None = None) -> None:
        self.plan: events.RunStarted | None = None
        self.started = self.newest = 0.0
        self.step = 0
        self.curves = Curves()
        self._store: CurveStore = self.curves if store is None else store
        self.logged: dict[str, list[events.Logged]] = defaultdict(list)
        self.processes: list[Process] = []
        self.happenings: list[Happening] = []
        self.end: events.Finished | events.Failed | None = None
        self.first_of_session = self.num_steps = self.num_at_start = 0
        self._joiners: list[Process] = []
        self._meter = StepMeter()
        self.problems: list[str] = []
        self.num_problems = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the next row; an invalid one is a problem, not an error."""
        try:
            event, time = event_from_row(row), float(row["time"])
        except (RunDirectoryError, KeyError, TypeError, ValueError, OverflowError) as error:
            self.add_problem(str(error))
        else:
            self.add_event(event, time)

    def add_event(self, event: events.Event, time: float) -> None:
        """Take the next event; an impossible one is a problem, not an error.

        Args:
            event: the event.
            time: its Unix time.
        """
        try:
            _check_ranges(event, time)
            self._take(event, time)
        except (TypeError, ValueError, ArithmeticError) as error:
            self.add_problem(f"event {type(event).__name__}: {error}")

    def _take(self, event: events.Event, time: float) -> None:
        self.started = self.started or time
        self.newest = time
        self._meter.take(event)
        match event:
            case Predicted() | Measured():
                return
            case events.StepDone():
                self._add_step(event)
                return
            case events.Logged():
                self._add_logged(event)
                return
            case events.RunStarted():
                self._start(event)
            case events.Joined():
                count = len(range(*event.microbatches))
                joiner = Process(event, time, event.rank, num_microbatches=count)
                self.processes.append(joiner)
                self._joiners.append(joiner)
            case events.RankLost():
                self._lose(event, time)
            case events.Recovered():
                self._renumber(event.world_size)
                self._assign(event.microbatches)
            case events.Rebalanced():
                self._assign(event.microbatches)
            case events.Finished() | events.Failed():
                self.end = event
            case events.Evaluated():
                origin = event.step if event.model_step is None else event.model_step
                values = {f"{event.split}/{name}": value for name, value in event.metrics.items()}
                self._store.add(event.step, values, origin)
        self.step = max(self.step, event.step)
        self.happenings.append(Happening(time, event))

    @property
    def cost(self) -> Measured:
        """What the steps of the newest session have cost so far, and what was predicted."""
        return self._meter.measured(self.step)

    @property
    def living(self) -> list[Process]:
        """The processes that were not lost."""
        return [process for process in self.processes if process.until is None]

    def add_problem(self, problem: str) -> None:
        """Note a row that cannot be read."""
        self.num_problems += 1
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)

    def _start(self, plan: events.RunStarted) -> None:
        joined, self._joiners = self._joiners, []
        self.plan, self.end = plan, None
        if plan.continued:
            return
        # The ranks of a session join just before it starts; a run that goes back to a checkpoint
        # within a session keeps its ranks.
        if joined:
            self.processes = joined
            self.first_of_session = len(self.happenings) - len(joined)
            self.num_steps, self.num_at_start = 0, len(joined)
        self.step = plan.step
        self._store.cut(plan.step)
        for name, logged in self.logged.items():
            self.logged[name] = [event for event in logged if event.step <= plan.step]

    def _add_step(self, done: events.StepDone) -> None:
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

    def _add_logged(self, event: events.Logged) -> None:
        if event.kind == "scalar":
            if not isinstance(event.value, (int, float)):
                raise TypeError(f"{shown(event.value)} is no number")
            self._store.add(event.step, {f"log/{event.name}": event.value})
            return
        before = [logged for logged in self.logged[event.name] if logged.step < event.step]
        self.logged[event.name] = [*before[1 - _MAX_LOGGED :], event]

    def _lose(self, event: events.RankLost, time: float) -> None:
        for process in self.processes:
            if process.joined.slot == event.slot and process.until is None:
                process.until, process.reason = time, event.reason

    def _renumber(self, world_size: int) -> None:
        """Survivors keep their order, and take the ranks that joining processes have not taken."""
        living = sorted(self.living, key=lambda process: process.rank)
        new, self._joiners = self._joiners, []
        survivors = [process for process in living if process not in new]
        taken = {process.rank for process in new}
        free = (rank for rank in range(world_size) if rank not in taken)
        for process, rank in zip(survivors, free, strict=False):
            process.rank = rank
        for process in living:  # files of earlier versions do not say how they are assigned
            process.num_microbatches = self.plan.num_microbatches / world_size if self.plan else 0.0

    def _assign(self, microbatches: Sequence[int]) -> None:
        for process in self.living:
            if 0 <= process.rank < len(microbatches):
                process.num_microbatches = microbatches[process.rank]


def _check_ranges(event: events.Event, time: float) -> None:
    """Raise `ValueError` for numbers that no run can have."""
    if not 0.0 <= time < _END_OF_TIME or abs(event.step) > _MAX_STEP:
        raise ValueError(f"time {time} or step {event.step} is out of range")
    match event:
        case events.StepDone() if not 0 < event.num_steps <= _MAX_STEP:
            raise ValueError(f"num_steps {shown(event.num_steps)} is out of range")
        case events.Evaluated(model_step=int(origin)) if abs(origin) > _MAX_STEP:
            raise ValueError(f"model_step {shown(origin)} is out of range")


def step_values(done: events.StepDone) -> dict[str, float]:
    """The values of a report of steps beside its metrics, by the names of their curves."""
    return {
        "lr": done.lr,
        "grad_norm": done.grad_norm,
        "samples_per_s": done.samples_per_s,
        "compute_efficiency": done.compute_efficiency,
        "train/loss": done.loss,
    }
