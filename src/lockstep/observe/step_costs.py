"""What the steps of a session cost, beside what was predicted."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from lockstep.engine.events import Evaluated, Event, Joined, Recovered, RunStarted, StepDone
from lockstep.observe import text


@dataclass(frozen=True)
class StepCost:
    """What a step costs.

    Attributes:
        step_s: seconds, without evaluations and checkpoints.
        peak_bytes: the most memory that a rank has; 0 if it is not known.

    Raises:
        ValueError: no step can cost that.
    """

    step_s: float
    peak_bytes: int

    def __post_init__(self) -> None:
        if not (0 < self.step_s < math.inf and self.peak_bytes >= 0):
            raise ValueError(
                f"step_s={self.step_s}, peak_bytes={self.peak_bytes}: must be a finite time above "
                "0, and no fewer than 0 bytes"
            )


@dataclass(frozen=True, kw_only=True)
class Predicted(Event):
    """Before a session begins: what a plan says that its steps will cost.

    Attributes:
        by: the plan; empty where it says nothing of this run, and the first reports count instead.
        cost: what it says; None if it says nothing of this layout.
        reason: why there is no cost.
    """

    by: str
    cost: StepCost | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured(Event):
    """Before a session ends: what its steps have cost, beside what was predicted.

    Attributes:
        measured: the median time, and the greatest memory; None where there were too few reports.
        predicted: what was predicted; None where nothing can be said.
        by: what has predicted it: a plan, or the first reports; empty if nothing has.
        reason: why there is no prediction, or not the plan's.
    """

    measured: StepCost | None
    predicted: StepCost | None
    by: str = ""
    reason: str = ""


def step_time(cost: Measured | None) -> str:
    """`5.9 ms; 6.1 ms predicted by plan.json`; empty where nothing was measured."""
    if cost is None or cost.measured is None:
        return ""
    if cost.predicted is None:
        return f"{text.brief(cost.measured.step_s)}; no prediction: {cost.reason}"
    predicted = f"{text.brief(cost.predicted.step_s)} predicted by {cost.by}"
    return f"{text.brief(cost.measured.step_s)}; {predicted}"


def each_step(cost: Measured | None) -> str:
    """`5.9 ms a step, 6.1 ms predicted by plan.json`; empty where nothing was measured.

    What the first reports have predicted is left out: in a short run it is noise.
    """
    if cost is None or cost.measured is None:
        return ""
    measured = f"{text.brief(cost.measured.step_s)} a step"
    if cost.predicted is None or cost.by == FIRST_REPORTS:
        return measured
    return f"{measured}, {text.brief(cost.predicted.step_s)} predicted by {cost.by}"


def peak_memory(cost: Measured | None) -> str:
    """`210.0 MiB; 220.0 MiB predicted by plan.json`; empty where nothing was measured."""
    if cost is None or cost.measured is None or not cost.measured.peak_bytes:
        return ""
    measured = text.size(cost.measured.peak_bytes)
    if cost.predicted is None or not cost.predicted.peak_bytes:
        return measured
    return f"{measured}; {text.size(cost.predicted.peak_bytes)} predicted by {cost.by}"


FIRST_REPORTS = "the first reports"
"""What predicts steps where no plan does."""

_MOST_VALUES = 4096
_LEAST_STEPS = 10
"""Fewer are noise: a single one may be ten times as slow as the next."""
_LEAST_S = 5.0
"""Unless they have taken so many seconds together."""


class SampledMedian:
    """The median of any number of values, of which a bounded number is kept.

    Up to `most` values it is exact. Whenever that many are kept, every second one is dropped, and
    from then on twice as many come for each that is kept: those that are kept are always spread
    evenly over all that came.

    Args:
        most: greatest number of values that are kept; even.

    Raises:
        ValueError: `most` is odd, or not above 0.
    """

    def __init__(self, most: int = _MOST_VALUES) -> None:
        if most <= 0 or most % 2:
            raise ValueError(f"most={most}: must be an even number above 0")
        self._most = most
        self._values: list[float] = []
        self._num = 0
        self._every = 1

    def add(self, value: float) -> None:
        """Count a value in."""
        number, self._num = self._num, self._num + 1
        if number % self._every:
            return
        if len(self._values) == self._most:
            del self._values[1::2]
            self._every *= 2
        self._values.append(value)

    def __len__(self) -> int:
        """How many values are kept."""
        return len(self._values)

    @property
    def value(self) -> float:
        """The median of those that are kept, of which there must be one.

        Of an even number it is the lesser one in the middle: the mean of two may be infinite.
        """
        return statistics.median_low(self._values)


class _Costs:
    """What the steps of some reports have cost."""

    def __init__(self) -> None:
        self._times = SampledMedian()
        self._peak_bytes = self._num_steps = 0
        self._seconds = 0.0

    def add(self, step_s: float, peak_bytes: int, num_steps: int) -> None:
        """Count a report in.

        Args:
            step_s: mean seconds of its steps.
            peak_bytes: peak memory of a rank.
            num_steps: number of its steps.
        """
        self._times.add(step_s)
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        self._num_steps += num_steps
        self._seconds += num_steps * step_s

    @property
    def cost(self) -> StepCost | None:
        """The median time and the most memory; None while there are too few steps."""
        if self._num_steps < _LEAST_STEPS and self._seconds < _LEAST_S:
            return None
        return StepCost(self._times.value, self._peak_bytes)


class StepMeter:
    """Follows a run's events, and says what the steps of the newest session cost.

    Reports count if they come from as many ranks as the run's session began with. The first report
    is left out, for the first step is slow. Without a plan the next reports, of ten steps or five
    seconds together, are the prediction. What steps cost is the median over all later reports,
    without evaluations and checkpoints, and the most memory that a rank had, once they are as many.
    It takes the same memory however many reports there are.
    """

    def __init__(self) -> None:
        self._plan: RunStarted | None = None
        self._coming: Predicted | None = None
        self._reported: Measured | None = None
        self._evaluating_s = 0.0
        self._start(None)

    def take(self, event: Event) -> None:
        """Learn from an event."""
        match event:
            case StepDone():
                self._report(event)
            case Evaluated():
                self._evaluating_s += event.seconds
            case Predicted():
                self._coming = event
            case Measured():
                self._reported = event
            case Joined():
                self._has_joined = True
            case Recovered():
                self._has_joined = False
            case RunStarted() if not event.continued:
                # A run that goes back to a checkpoint within a session emits this too, but its
                # ranks do not join again.
                if self._has_joined or self._plan is None:
                    self._start(event)

    def measured(self, step: int) -> Measured:
        """What is known by now, or the run's own `Measured` event of this session.

        Args:
            step: number of steps that are committed.
        """
        if self._reported is not None:
            return self._reported
        measured = self._later.cost
        plan, reasons = self._prediction, []
        if plan is not None and plan.reason:
            reasons.append(plan.reason)
        if plan is not None and plan.by:
            predicted, by = plan.cost, plan.by
        else:
            predicted, by = self._first.cost if measured else None, FIRST_REPORTS
            if predicted is None:
                reasons.append(self._why_nothing())
        return Measured(
            step=step,
            measured=measured,
            predicted=predicted,
            by=by if predicted else "",
            reason="; ".join(reasons),
        )

    @property
    def _prediction(self) -> Predicted | None:
        """The prediction of a plan; a process that joins later never sees the session's start."""
        return self._coming if self._plan is None else self._predicted

    def _start(self, plan: RunStarted | None) -> None:
        """Begin a new session."""
        self._plan = plan
        self._predicted = self._coming
        self._reported = None
        if plan is not None:
            self._coming = None
        self._num_ranks = plan.world_size if plan else 0
        self._has_joined = False
        self._num_reports = 0
        self._evaluating_s = 0.0
        self._first, self._later = _Costs(), _Costs()

    def _report(self, done: StepDone) -> None:
        pauses_s = self._evaluating_s + max((r.checkpoint_s for r in done.ranks), default=0.0)
        self._evaluating_s = 0.0
        self._num_reports += 1
        self._num_ranks = self._num_ranks or len(done.ranks)
        if self._num_reports == 1 or done.num_steps < 1 or len(done.ranks) != self._num_ranks:
            return
        step_s = (done.seconds - pauses_s) / done.num_steps
        if not 0 < step_s < math.inf:
            return
        peak_bytes = max((r.memory_bytes for r in done.ranks if r.memory_bytes > 0), default=0)
        has_prediction = self._prediction is not None and self._prediction.by
        is_first = self._plan is not None and not has_prediction and self._first.cost is None
        (self._first if is_first else self._later).add(step_s, peak_bytes, done.num_steps)

    def _why_nothing(self) -> str:
        if self._plan is None and self._num_reports:
            return "the process that stores this has joined after the first reports"
        if not self._num_ranks:
            return "no report"
        return f"too few steps on {text.count(self._num_ranks, 'rank')}"
