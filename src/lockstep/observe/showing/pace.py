"""How fast a run goes, and so how long it still takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lockstep.engine.events import Evaluated, Event, RunStarted, StepDone

_NUM_REPORTS = 30
"""Reports that steps are timed by: the newest ones."""

_MOST_MEDIANS = 5.0
"""What a step may count for at most, in medians: a suspended machine is no slow training."""


class Pace:
    """The time that is left, from steps that were measured in this sitting.

    It is the steps that are left, times the seconds of a step: a mean over the newest reports, in
    which one that took very long counts for little, and without the first report of the sitting,
    which has the start of everything in it. To these come evaluations and checkpoints, at what
    they have cost this sitting for each step.
    """

    def __init__(self) -> None:
        self._total = self._step = self._num_steps = 0
        self._reports: deque[tuple[int, float]] = deque(maxlen=_NUM_REPORTS)
        self._pauses_s = self._evaluating_s = self._last_s = 0.0
        self._left_s: float | None = None

    def take(self, event: Event) -> None:
        """Learn from an event; only starts, reports and evaluations tell anything."""
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, Evaluated):
            self._evaluating_s += event.seconds
        elif isinstance(event, StepDone):
            self._report(event)

    def left_s(self, waited_s: float = 0.0) -> float | None:
        """Seconds to the last step; None where the last step or the pace is not known.

        Args:
            waited_s: seconds since the newest report; they count down to where the next one is due.
        """
        if self._left_s is None:
            return None
        return max(self._left_s - min(max(waited_s, 0.0), self._last_s), 0.0)

    def _start(self, plan: RunStarted) -> None:
        if plan.continued and self._total == plan.total_steps:
            return
        self._total, self._step, self._num_steps = plan.total_steps, plan.step, 0
        self._reports.clear()
        self._pauses_s = self._evaluating_s = self._last_s = 0.0
        self._left_s = None

    def _report(self, done: StepDone) -> None:
        num_steps = done.num_steps
        if num_steps < 1:
            return
        pauses_s = self._evaluating_s + max((r.checkpoint_s for r in done.ranks), default=0.0)
        pauses_s = min(pauses_s, done.seconds)
        if len(self._reports) == 1 and self._num_steps == self._reports[0][0]:
            self._reports.clear()  # the first of the sitting
        self._reports.append((num_steps, (done.seconds - pauses_s) / num_steps))
        self._step, self._last_s = done.step, done.seconds
        self._num_steps += num_steps
        self._pauses_s += pauses_s
        self._evaluating_s = 0.0
        self._left_s = self._estimate()

    def _estimate(self) -> float | None:
        # A single step has said little: it was the first one.
        if self._total <= 0 or self._num_steps < 2:
            return None
        each_s = _steady_mean(self._reports) + self._pauses_s / self._num_steps
        return each_s * max(self._total - self._step, 0)


def _steady_mean(reports: Sequence[tuple[int, float]]) -> float:
    """The mean of seconds by number of steps, each value cut off at some medians."""
    most = _MOST_MEDIANS * _median(reports)
    num_steps = sum(weight for weight, _ in reports)
    return sum(weight * min(value, most) for weight, value in reports) / num_steps


def _median(reports: Sequence[tuple[int, float]]) -> float:
    """The value that half of all steps do not exceed."""
    half, passed = sum(weight for weight, _ in reports) / 2, 0
    for weight, value in sorted(reports, key=lambda report: report[1]):
        passed += weight
        if passed >= half:
            return value
    return 0.0
