"""Live progress on a terminal, plain lines where there is none."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lockstep.engine.events import (
    Checkpointed,
    Evaluated,
    Event,
    Failed,
    Finished,
    Improved,
    Joined,
    RankLost,
    RunStarted,
    StepDone,
    Warned,
)
from lockstep.observe import text
from lockstep.observe.sink import Sink
from lockstep.observe.terminal import stdout_console


@dataclass
class _Evaluation:
    """An evaluation whose line may still be completed by what comes of it.

    Attributes:
        event: the evaluation.
        loss: training loss up to its step, if that is known.
        is_best: whether the watched metric was better than ever.
        is_saved: whether a checkpoint of its step is on disk.
    """

    event: Evaluated
    loss: float | None
    is_best: bool = False
    is_saved: bool = False

    def line(self, width: int) -> str:
        """All that is known, for a console of so many columns."""
        notes = ["best"] * self.is_best + ["saved"] * self.is_saved
        return text.evaluation(self.event, self.loss, notes, width)


class ConsoleView(Sink):
    """Shows a run: a banner, progress with evaluations and faults above it, a summary.

    On an interactive terminal progress is a bar that is drawn anew several times a second, and
    lines are broken between words where they are longer than the terminal is wide. Elsewhere (a
    pipe, a log file, `TERM=dumb`) it is a line for a `StepDone`, at most one each `interval_s`, and
    one for every other event, none of them broken.

    An evaluation, that it was the best, and its checkpoint share a line. It is held back until the
    checkpoint is on disk, for at most `interval_s`.

    Args:
        console: console to show the run on; standard output by default.
        resumable: whether `lockstep resume` can go on with the run, should it be stopped.
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
        show_failure: bool = False,
        interval_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or stdout_console()
        self._resumable = resumable
        self._show_failure = show_failure
        self._interval_s = interval_s
        self._clock = clock
        self._joined: list[Joined] = []
        self._plan: RunStarted | None = None
        self._announced = True
        self._done: StepDone | None = None
        self._withheld = False
        self._printed_at = -float("inf")
        self._started_at = clock()
        self._progress_at = self._started_at
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._evaluation: _Evaluation | None = None
        # The line of an evaluation that is held back is printed by a timer's thread.
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._late_error: OSError | None = None

    def wait(self, message: str) -> None:
        """Show that something is being waited for, until the first event; on terminals only."""
        self._spinner.update(text=self._styled(text.printable(message)))
        self._start_live()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        with self._lock:
            error, self._late_error = self._late_error, None
            if error is not None:
                raise error
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, Joined) and not (self._plan and self._announced):
            self._joined.append(event)
        else:
            self._announce()
            self._show(event)
        if self._plan and len(self._joined) >= self._plan.world_size:
            self._announce()

    def close(self) -> None:
        """End the live display and give the cursor back; nothing if that is done."""
        with self._lock:
            self._show_evaluation()
            live, self._live = self._live, None
            if live:
                if self._plan is None:  # a spinner, of which nothing is to be left
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

    def _announce(self) -> None:
        """Show the banner, once all ranks or any other event have come."""
        if self._announced or not self._plan:
            return
        banner = text.banner(self._plan, self._joined)
        self._announced, self._joined = True, []
        if self._live:
            self._live.refresh()  # the bar in place of the spinner
        self._print_block(banner)
        self._start_live()

    def _start_live(self) -> None:
        if self._live is None and self._console.is_interactive:
            self._live = Live(
                get_renderable=self._bar,
                console=self._console,
                refresh_per_second=5,
                # What goes to a file must not come to the terminal instead.
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start(refresh=True)

    def _show(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._progress(event)
            return
        if self._is_about_evaluation(event):
            return
        self._show_evaluation()
        if isinstance(event, Evaluated):
            self._hold(event)
            return
        if isinstance(event, Finished):
            self.close()
            self._print_block(text.summary(self._plan, event, self._resumable))
            return
        if isinstance(event, Failed):
            self.close()
            if not self._show_failure:
                return
        self._print(text.line(event), _style(event))

    def _hold(self, event: Evaluated) -> None:
        """Wait with an evaluation's line for what comes of it."""
        loss = None
        if event.split == "val" and self._done and self._done.step == event.step:
            loss, self._withheld = self._done.loss, False
        self._evaluation = _Evaluation(event, loss)
        self._timer = threading.Timer(self._interval_s, self._show_late, (event,))
        self._timer.daemon = True
        self._timer.start()

    def _is_about_evaluation(self, event: Event) -> bool:
        """Whether an event only completes the line that is held back."""
        held = self._evaluation
        if held is None or event.step != held.event.step:
            return False
        if isinstance(event, Improved):
            held.is_best = True
            return True
        if isinstance(event, Checkpointed):
            held.is_saved = True
            self._show_evaluation()
            return True
        return False

    def _show_evaluation(self) -> None:
        """Print the line that is held back, if there is one."""
        held, self._evaluation = self._evaluation, None
        timer, self._timer = self._timer, None
        if timer:
            timer.cancel()
        if held:
            self._print(held.line(self._console.width), "green" if held.is_best else "")

    def _show_late(self, event: Evaluated) -> None:
        """In the timer's thread: print an evaluation whose checkpoint takes long or is not made."""
        with self._lock:
            if self._evaluation is None or self._evaluation.event is not event:
                return
            try:
                self._show_evaluation()
            except OSError as error:
                self._late_error = error  # for the thread that hands over the next event

    def _progress(self, done: StepDone) -> None:
        self._done, self._progress_at = done, self._clock()
        if self._live:
            return
        self._withheld = True
        if self._progress_at - self._printed_at >= self._interval_s:
            self._show_withheld()

    def _show_withheld(self) -> None:
        """Print the last progress, if it came too soon after the one before."""
        if not (self._withheld and self._done):
            return
        self._withheld, self._printed_at = False, self._progress_at
        total = f"/{self._plan.total_steps:,}" if self._plan else ""
        head, tail = f"step {self._done.step:,}{total}", f"left {self._left()}"
        self._print(text.fitted(head, text.progress(self._done), tail, self._console.width))

    def _bar(self) -> RenderableType:
        """The live display: called from its own thread, so it only reads."""
        plan, done = self._plan, self._done
        if plan is None or not self._announced:
            return self._spinner
        total = plan.total_steps
        step = done.step if done else plan.step
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            self._styled(f"step {step:,}/{total:,}", "bold"),
            ProgressBar(total=max(total, 1), completed=step),
            self._styled(f"{text.clock(self._clock() - self._started_at)} left {self._left()}"),
        )
        lines: list[RenderableType] = [bar]
        if done:
            width = self._console.width
            lines.append(self._styled(text.fitted("", text.progress(done), "", width)))
        return Group(*lines)

    def _left(self) -> str:
        """Time to the last step at this sitting's pace, all its pauses included."""
        plan, done = self._plan, self._done
        if not plan or not done or done.step <= plan.step:
            return "-:--:--"
        pace = (self._progress_at - self._started_at) / (done.step - plan.step)
        return text.clock(pace * max(plan.total_steps - done.step, 0))

    def _print_block(self, pairs: text.Pairs) -> None:
        for name, value in pairs:
            self._write(text.row(name, text.printable(value), self._width_to_fit()))

    def _print(self, message: str, style: str = "") -> None:
        width = self._width_to_fit()
        lines = text.printable(message).split("\n")
        self._write("\n".join(text.wrapped(line, width) for line in lines), style)

    def _width_to_fit(self) -> float:
        """Columns of a terminal; a line of a pipe or a log file may be of any length."""
        return self._console.width if self._console.is_terminal else inf

    def _write(self, lines: str, style: str = "") -> None:
        # rich would break lines inside paths and digests, which could not be copied then.
        self._console.print(self._styled(lines, style), soft_wrap=True)

    def _styled(self, line: str, style: str = "") -> Text:
        """Text the console can encode, whatever a path or a metric's name holds."""
        encoding = self._console.encoding
        return Text(line.encode(encoding, "backslashreplace").decode(encoding), style)


def _style(event: Event) -> str:
    if isinstance(event, Failed):
        return "bold red"
    if isinstance(event, (Warned, RankLost)):
        return "yellow"
    return "green" if isinstance(event, Improved) else ""
