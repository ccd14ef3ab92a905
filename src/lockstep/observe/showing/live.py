"""What is redrawn at the bottom of a terminal while a run goes on, and how fast it goes."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.engine.events import (
    Checkpointed,
    Evaluated,
    Event,
    Improved,
    RankTimes,
    RunStarted,
    StepDone,
)
from lockstep.observe import text
from lockstep.observe.showing.terminal import styled
from lockstep.observe.text import Item, fitted, kept, printable

_NUM_REPORTS = 30
"""Reports that steps are timed by: the newest ones."""

_MOST_MEDIANS = 5.0
"""What a step may count for at most, in medians: a suspended machine is no slow training."""


class Pace:
    """The time that is left, from steps that were measured in this session.

    It is the steps that are left, times the seconds of a step: a mean over the newest reports, in
    which one that took very long counts for little, and without the first report of the session,
    which has the start of everything in it. To these come evaluations and checkpoints, at what
    they have cost this session for each step.
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
            self._reports.clear()  # the first of the session
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


_LEAST_BAR = 8
"""Columns of the shortest bar that is worth its room."""

_ROOMY = 60
"""Columns from which on those of the table stand further apart."""

_OTHER_ROWS = 6
"""Rows of a terminal that the table of ranks leaves to everything else."""


class Display(Live):
    """A part of the terminal that a thread redraws a few times a second.

    Args:
        console: console to draw on.
        draw: function that returns what is to be drawn; called in that thread.
    """

    def __init__(self, console: Console, draw: Callable[[], RenderableType]) -> None:
        super().__init__(
            get_renderable=draw,
            console=console,
            refresh_per_second=5,
            # What goes to a file must not come to the terminal instead.
            redirect_stderr=sys.stderr.isatty(),
        )

    def refresh(self) -> None:
        """Draw; nothing where the terminal is gone, for which printing a line raises an error."""
        with contextlib.suppress(OSError):
            super().refresh()


class LiveArea:
    """Bar, newest report, newest and best evaluation, newest checkpoint: a line for each kind.

    What does not fit the terminal's width is left out, the least important first.

    Args:
        console: console that it is drawn on.
        clock: function that returns seconds since any fixed time.
        pace: what knows the time that is left; it gets the same events.
        per_rank: whether there is a table of what each rank does with its time.
    """

    def __init__(
        self, console: Console, clock: Callable[[], float], pace: Pace, per_rank: bool
    ) -> None:
        self._console = console
        self._clock = clock
        self._pace = pace
        self._per_rank = per_rank
        self._plan: RunStarted | None = None
        self._started_at = self._done_at = clock()
        self._forget()

    def _forget(self) -> None:
        self._done: StepDone | None = None
        self._evaluated: tuple[Evaluated, ...] = ()
        self._best: Improved | None = None
        self._saved: int | None = None

    def take(self, event: Event) -> None:
        """Take note of an event, to be shown when the area is drawn again."""
        if isinstance(event, RunStarted) and not (event.continued and self._plan):
            self._forget()
            self._plan, self._started_at = event, self._clock()
        elif isinstance(event, StepDone):
            self._done, self._done_at = event, self._clock()
        elif isinstance(event, Evaluated):
            # Never changed in place: another thread reads it.
            before = self._evaluated if self._is_newest(event.step) else ()
            self._evaluated = (*before, event)
        elif isinstance(event, Improved):
            self._best = event
        elif isinstance(event, Checkpointed):
            self._saved = event.step

    def draw(self) -> RenderableType:
        """All lines as they are now; it only reads, for it is called in another thread."""
        lines = [self._bar()]
        if self._done:
            lines.append(self._line(text.progress(self._done)))
        standing = self._standing()
        if standing:
            lines.append(self._line(standing))
        if self._per_rank and self._done and self._done.ranks:
            lines.append(self._ranks(self._done, self._done.ranks))
        return Group(*lines)

    def _is_newest(self, step: int) -> bool:
        return bool(self._evaluated) and self._evaluated[-1].step == step

    def _bar(self) -> RenderableType:
        plan, done, now = self._plan, self._done, self._clock()
        if plan is None:
            return Text()
        step, total = done.step if done else plan.step, plan.total_steps
        left_s = self._pace.left_s(now - self._done_at)
        width = self._console.width
        head = (Item(2, plan.task), Item(0, f"step {step:,}" + (f"/{total:,}" if total else "")))
        tail = (
            Item(3, text.clock(now - self._started_at)),
            Item(1, "" if left_s is None else f"left {text.clock(left_s)}"),
        )
        shown = kept([*head, *tail], width - _LEAST_BAR - 2 if total else width)
        parts = [fitted(filter(shown.__contains__, side), width) for side in (head, tail)]
        room = width - sum(len(part) + 1 for part in parts)
        if not total or room < _LEAST_BAR:
            return self._line([Item(number, part) for number, part in enumerate(parts)])
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True, overflow="crop")
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, overflow="crop")
        bar = ProgressBar(total=total, completed=min(step, total))
        grid.add_row(self._styled(parts[0], "bold"), bar, self._styled(parts[1]))
        return grid

    def _standing(self) -> list[Item]:
        """The newest evaluation of each split, the best one, and the newest checkpoint."""
        items: list[Item] = []
        for event in self._evaluated:
            first, *others = text.measures(event.metrics) or ["-"]
            items.append(Item(1 if not items else 4, f"{text.evaluated_at(event)}: {first}"))
            items.extend(Item(5 + place, measure) for place, measure in enumerate(others))
        best, saved = self._best, self._saved
        if best:
            items.append(Item(2, f"best {best.metric} {text.number(best.value)} at {best.step:,}"))
        if saved is not None:
            items.append(Item(3, f"saved at {saved:,}"))
        return items

    def _ranks(self, done: StepDone, ranks: tuple[RankTimes, ...]) -> RenderableType:
        """A row for each rank, or for the busiest where the terminal is not high enough.

        Where there is room, with the norm of each gradient before the sum, and after it.
        """
        has_norms = self._console.width >= _ROOMY and any(r.grad_norm for r in ranks)
        most = max(self._console.height - _OTHER_ROWS - has_norms, 1)
        busy = sorted(ranks, key=lambda r: r.compute_s + r.data_s + r.checkpoint_s, reverse=True)
        chosen = busy[:most] if len(ranks) <= most else busy[: max(most - 1, 1)]
        grid = Table.grid(padding=(0, 2 if self._console.width >= _ROOMY else 1))
        for name in ("rank", *text.KINDS_OF_WORK, *["gradient"] * has_norms):
            grid.add_column(self._styled(name), justify="right", no_wrap=True, overflow="crop")
        grid.show_header = True
        for times in sorted(chosen, key=lambda r: r.rank):
            norm = [text.number(times.grad_norm)] * has_norms
            grid.add_row(*map(self._styled, (str(times.rank), *text.shares(times), *norm)))
        if has_norms:
            blank = [""] * len(text.KINDS_OF_WORK)
            grid.add_row(*map(self._styled, ("all", *blank, text.number(done.grad_norm))))
        if len(chosen) == len(ranks):
            return grid
        others = text.count(len(ranks) - len(chosen), "rank")
        return Group(grid, self._line([Item(0, f"and {others} with less to do")]))

    def _line(self, items: list[Item]) -> Text:
        return self._styled(fitted(items, self._console.width))

    def _styled(self, line: str, style: str = "") -> Text:
        shown = styled(self._console, printable(line).replace("\n", " "), style)
        shown.no_wrap, shown.overflow = True, "crop"
        return shown
