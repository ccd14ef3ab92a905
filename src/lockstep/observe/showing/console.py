"""Live progress on a terminal or in a notebook's cell, plain lines elsewhere, or nothing."""

from __future__ import annotations

import html
import sys
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.spinner import Spinner
from rich.text import Text

from lockstep.engine.events import (
    Checkpointed,
    Evaluated,
    Event,
    ExchangeChosen,
    Failed,
    Finished,
    Improved,
    Joined,
    Logged,
    RankLost,
    Rebalanced,
    RunStarted,
    StepDone,
    Warned,
)
from lockstep.observe import text
from lockstep.observe.showing.live import Display, LiveArea, Pace
from lockstep.observe.showing.terminal import (
    EvaluationLine,
    banner,
    spinner_name,
    stdout_console,
    styled,
)
from lockstep.observe.sink import Sink
from lockstep.observe.step_costs import Measured, Predicted, each_step, step_time
from lockstep.observe.text import Item, fitted, printable, row, wrapped

_DRAWN = (StepDone, Evaluated, Improved, Checkpointed)
"""Events that come again and again: on a terminal they are drawn, and leave no line."""

_MOST_SILENT_PART = 1 / 10
"""Of the time that a run has taken so far, the part that may pass without a line."""

_LONGEST_INTERVAL_S = 300.0
"""Most seconds between two lines of a long run, if there are reports."""

_MOST_EVALUATIONS = 15
"""Evaluations of a split that have a line in a log, spread evenly over the run's steps."""

_NOTABLE_SLOWDOWN = 1.5
"""Of a rank; less than this is noise on most machines, and is balanced without a line."""


class ConsoleView(Sink):
    """Shows a run: what it is about to do, progress, faults and warnings, a summary.

    On an interactive terminal progress is an area at its bottom that is redrawn several times a
    second (`LiveArea`); what is worth keeping is printed above it, in lines that are broken between
    words where they are longer than the terminal is wide. Evaluations and checkpoints leave no
    lines there. In a pipe, a log file, or with `TERM=dumb`, an evaluation is one line, of many
    evaluations some 15 that are spread evenly. Where no evaluation comes for a while, a `StepDone`
    is a line; the first and the last one always are. No line is broken.

    Args:
        console: console to show the run on; standard output by default.
        resumable: whether `lockstep resume` can go on with the run, should it be stopped.
        per_rank: whether to show with each report what each rank has done with its time.
        verbose: whether to show all evaluations, checkpoints, changes of microbatches, and how
            samples and gradients are distributed.
        show_failure: whether to print the message of `Failed`; by default the live display only
            ends, because whoever catches the error prints it.
        interval_s: least time between two progress lines, in seconds.
        clock: function that returns seconds since any fixed time.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        resumable: bool = True,
        per_rank: bool = False,
        verbose: bool = False,
        show_failure: bool = False,
        interval_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or stdout_console()
        self._resumable = resumable
        self._per_rank = per_rank
        self._verbose = verbose
        self._show_failure = show_failure
        self._interval_s = interval_s
        self._clock = clock
        self._joined: list[Joined] = []
        self._plan: RunStarted | None = None
        self._announced = True
        self._done: StepDone | None = None
        self._cost: Measured | None = None
        self._withheld = False
        self._printed_at = -inf
        self._started_at = self._progress_at = clock()
        self._evaluated: dict[str, float] = {}
        """By split, when its newest line was due: a part of the run, or a time."""
        self._pace = Pace()
        self._area = LiveArea(self._console, clock, self._pace, per_rank)
        self._live: Display | None = None
        self._spinner = Spinner(spinner_name(self._console))
        # The line of an evaluation may be printed by a timer's thread.
        self._lock = threading.RLock()
        self._evaluation = EvaluationLine(
            self._print, lambda: self._console.width, self._lock, interval_s
        )

    def wait(self, message: str) -> None:
        """Show that something is being waited for, until the first event; on terminals only."""
        self._spinner.update(text=styled(self._console, printable(message)))
        self._start_live()

    def __call__(self, event: Event) -> None:
        """Show one event; what a task logs is for files, and what steps cost for the summary."""
        if isinstance(event, Measured):
            self._cost = event
        if isinstance(event, (Logged, Predicted, Measured)):
            return
        with self._lock:
            self._evaluation.raise_late()
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, Joined) and not (self._plan and self._announced):
            self._joined.append(event)
        else:
            self._announce()
            self._note(event)
            self._show(event)
        if self._plan and len(self._joined) >= self._plan.world_size:
            self._announce()

    def _note(self, event: Event) -> None:
        self._pace.take(event)
        self._area.take(event)

    def close(self) -> None:
        """End the live display and give the cursor back; nothing if that is done."""
        with self._lock:
            self._evaluation.show()
            live, self._live = self._live, None
            if live:
                if not self._is_begun():  # a spinner, of which nothing is to be left
                    live.transient = True
                live.stop()
            self._show_withheld()

    def _start(self, plan: RunStarted) -> None:
        if plan.continued and self._plan:
            return
        if self._plan:
            self.close()
        self._plan, self._announced = plan, False
        self._done = None
        self._started_at = self._progress_at = self._clock()
        self._note(plan)

    def _announce(self) -> None:
        """Show the banner, once all ranks or any other event have come."""
        if self._announced or not self._plan:
            return
        lines = banner(self._plan, self._joined, self._verbose)
        self._announced, self._joined = True, []
        if self._live:
            self._live.refresh()  # the bar in place of the spinner
        self._print_block(lines)
        self._start_live()

    def _start_live(self) -> None:
        if self._live is None and self._console.is_interactive:
            self._live = Display(self._console, self._drawn)
            self._live.start(refresh=True)

    def _drawn(self) -> RenderableType:
        """The live display: called from its own thread, so it only reads."""
        if not self._is_begun():
            return self._spinner
        area = self._area.draw()
        # A terminal shows ^C where the cursor is, and would break a line that is full already. The
        # last drawing, when there is no display to go on with, needs no line for that.
        return Group(area, Text()) if self._live else area

    def _is_begun(self) -> bool:
        return self._plan is not None and self._announced

    def _show(self, event: Event) -> None:
        if self._console.is_interactive and isinstance(event, _DRAWN):
            return
        if isinstance(event, StepDone):
            self._progress(event)
            return
        if isinstance(event, Improved):
            self._evaluation.improve(event.step)
            return
        self._evaluation.show()
        if isinstance(event, Evaluated):
            self._evaluate(event)
        elif isinstance(event, Finished):
            self.close()
            took = step_time(self._cost) if self._verbose else each_step(self._cost)
            summary = text.summary(self._plan, event, self._resumable, took, self._verbose)
            self._print_block(summary)
        elif isinstance(event, Failed):
            self.close()
            if self._show_failure:
                self._print(text.line(event), "bold red")
        elif self._verbose or _is_notable(event):
            self._print(text.line(event), _style(event))

    def _evaluate(self, event: Evaluated) -> None:
        """Show an evaluation, if so many have not been shown; what is the best is said later."""
        if not self._is_due(event):
            return
        self._printed_at = self._clock()
        loss = None
        if event.split == "val" and self._done and self._done.step == event.step:
            loss, self._withheld = self._done.loss, False
        self._evaluation.wait(event, loss)

    def _is_due(self, event: Evaluated) -> bool:
        """Whether an evaluation is shown; the last ones are in the summary."""
        if self._verbose:
            return True
        if event.model_step is not None:  # of the best step, when training is over
            return False
        total = self._plan.total_steps if self._plan else 0
        before = self._evaluated.get(event.split)
        if total:
            now = float(event.step * _MOST_EVALUATIONS // total)
            is_due = before is None or now > before
        else:
            now = self._clock()
            so_far_s = now - self._started_at
            is_due = before is None or now - before >= so_far_s / _MOST_EVALUATIONS
        if is_due:
            self._evaluated[event.split] = now
        return is_due

    def _progress(self, done: StepDone) -> None:
        self._done, self._progress_at, self._withheld = done, self._clock(), True
        so_far_s = self._progress_at - self._started_at
        interval_s = min(so_far_s * _MOST_SILENT_PART, _LONGEST_INTERVAL_S)
        if self._progress_at - self._printed_at >= max(interval_s, self._interval_s):
            self._show_withheld()

    def _show_withheld(self) -> None:
        """Print the last progress, if it came too soon after the one before."""
        done = self._done
        if not (self._withheld and done):
            return
        self._withheld, self._printed_at = False, self._progress_at
        total = f"/{self._plan.total_steps:,}" if self._plan and self._plan.total_steps else ""
        left_s = self._pace.left_s()
        items = (
            Item(0, f"step {done.step:,}{total}"),
            *text.progress(done),
            Item(0, "" if left_s is None else f"left {text.clock(left_s)}"),
        )
        self._print(fitted(items, self._console.width))
        if self._per_rank:
            for times in done.ranks:
                self._print(text.rank_times(done, times))

    def _print_block(self, pairs: text.Pairs) -> None:
        width = self._width_to_fit()
        self._write("\n".join(row(name, printable(value), width) for name, value in pairs))

    def _print(self, message: str, style: str = "") -> None:
        width = self._width_to_fit()
        lines = printable(message).split("\n")
        self._write("\n".join(wrapped(line, width) for line in lines), style)

    def _width_to_fit(self) -> float:
        """Columns of a terminal; a line of a pipe or a log file may be of any length."""
        return self._console.width if self._console.is_terminal else inf

    def _write(self, lines: str, style: str = "") -> None:
        # rich would break lines inside paths and digests, which could not be copied then.
        self._console.print(styled(self._console, lines, style), soft_wrap=True)


def _is_notable(event: Event) -> bool:
    """Whether an event has a line even if not everything is to be shown."""
    if isinstance(event, Rebalanced):
        return event.slowdown >= _NOTABLE_SLOWDOWN
    if isinstance(event, ExchangeChosen):
        return event.way == "messages" and bool(event.reason)  # the slow way, where it need not be
    return not isinstance(event, Checkpointed)


def _style(event: Event) -> str:
    return "yellow" if isinstance(event, (Warned, RankLost)) else ""


class QuietView(ConsoleView):
    """Shows warnings, lost ranks, how the run ended and how to go on, one line each."""

    def wait(self, message: str) -> None:
        """Show nothing."""

    def __call__(self, event: Event) -> None:
        """Show one event, or nothing."""
        if isinstance(event, RunStarted):
            self._plan = event
        elif isinstance(event, Finished):
            self._print(text.outcome(self._plan, event))
            if event.exit_code and self._resumable and self._plan:
                self._print(f"go on with {text.resume_command(self._plan.run_dir)}")
        elif isinstance(event, (Warned, RankLost, Failed)):
            self._show(event)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


class NotebookView(Sink):
    """Shows a run in the output of a cell. A front end without HTML shows the bar as text.

    Args:
        resumable: whether `lockstep resume` can go on with the run, should it be stopped.
        interval_s: least time between two drawings of the bar, in seconds.
    """

    def __init__(self, *, resumable: bool = True, interval_s: float = 0.5) -> None:
        # Plain text: for a notebook, rich would make a block of HTML of each line.
        plain = Console(force_jupyter=False, force_interactive=False, highlight=False)
        self._lines = ConsoleView(plain, resumable=resumable)
        self._interval_s = interval_s
        self._plan: RunStarted | None = None
        self._done: StepDone | None = None
        self._drawn_at = -float("inf")
        self._pace = Pace()
        self._bar: Any = None

    def wait(self, message: str) -> None:
        """Show nothing: the cell has a mark of its own while it runs."""

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self._pace.take(event)
        if isinstance(event, StepDone):
            self._done = event
            if time.monotonic() - self._drawn_at >= self._interval_s:
                self._draw()
            return
        if isinstance(event, RunStarted):
            self._plan = event
        if isinstance(event, (Finished, Failed)):
            self._draw()
        if not isinstance(event, Checkpointed):  # so many lines would fill the page
            self._lines(event)

    def close(self) -> None:
        """Draw the bar as it is in the end."""
        self._draw()
        self._lines.close()

    def _draw(self) -> None:
        done, plan = self._done, self._plan
        if done is None or plan is None:
            return
        from IPython import display

        total = plan.total_steps
        left_s = self._pace.left_s()
        text_of_bar = fitted(
            (
                Item(0, f"step {done.step:,}/{total:,}"),
                *text.progress(done),
                Item(0, "" if left_s is None else f"left {text.clock(left_s)}"),
            ),
            inf,
        )
        bar = f'<progress value="{done.step}" max="{total}"></progress>'
        shown = {
            "text/plain": text_of_bar,
            "text/html": f"<div>{bar} {html.escape(text_of_bar)}</div>",
        }
        if self._bar is None:
            make: Any = display.DisplayHandle  # it comes without types
            self._bar = make()
            self._bar.display(shown, raw=True)
        else:
            self._bar.update(shown, raw=True)
        self._drawn_at = time.monotonic()
