"""Live progress on a terminal, plain lines where there is none."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.engine.events import (
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


class ConsoleView(Sink):
    """Shows a run: a banner, progress with faults and checkpoints above it, a summary.

    On an interactive terminal progress is a bar that is drawn anew twice a second. Elsewhere
    (a pipe, a log file, `TERM=dumb`) it is a line for a `StepDone`, at most one each
    `interval_s`, and one for every other event.

    Args:
        console: console to show the run on; standard output by default.
        show_failure: whether to print the message of `Failed`; by default the live display only
            ends, because whoever catches the error prints it.
        interval_s: least time between two progress lines, in seconds.
        clock: function that returns seconds since any fixed time.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        show_failure: bool = False,
        interval_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or stdout_console()
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

    def __call__(self, event: Event) -> None:
        """Show one event."""
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
        live, self._live = self._live, None
        if live:
            live.stop()
        self._show_withheld()

    def _start(self, plan: RunStarted) -> None:
        if plan.continued and self._plan:
            return
        self.close()
        self._plan, self._announced = plan, False
        self._done = None
        self._started_at = self._progress_at = self._clock()

    def _announce(self) -> None:
        """Show the banner, once all ranks or any other event have come."""
        if self._announced or not self._plan:
            return
        self._print_block(text.banner(self._plan, self._joined))
        self._announced, self._joined = True, []
        if self._console.is_interactive:
            self._live = Live(get_renderable=self._bar, console=self._console, refresh_per_second=2)
            self._live.start(refresh=True)

    def _show(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._progress(event)
            return
        if isinstance(event, Finished):
            self.close()
            self._print_block(text.summary(self._plan, event))
            return
        if isinstance(event, Failed):
            self.close()
            if not self._show_failure:
                return
        self._print(text.line(event), _style(event))

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
        items = [f"step {self._done.step:,}{total}", *text.progress(self._done)]
        self._print("  ".join([*items, f"left {self._left()}"]))

    def _bar(self) -> RenderableType:
        """The live display: called from its own thread, so it only reads."""
        plan, done = self._plan, self._done
        total = plan.total_steps if plan else 0
        step = done.step if done else plan.step if plan else 0
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
            lines.append(self._styled("  ".join(text.progress(done))))
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
            self._print(f"{name:<11} {value}")

    def _print(self, line: str, style: str = "") -> None:
        # Not wrapped: paths can be copied, and a line of a log file is a line.
        self._console.print(self._styled(line, style), soft_wrap=True)

    def _styled(self, line: str, style: str = "") -> Text:
        """Text the console can encode, whatever a path or a metric's name holds."""
        encoding = self._console.encoding
        return Text(line.encode(encoding, "backslashreplace").decode(encoding), style)


class _SteadyConsole(Console):
    """A console whose reader may go away (`lockstep train | head`) without ending training."""

    def on_broken_pipe(self) -> None:
        """Print to nowhere from now on, instead of leaving the process as the base class does.

        Raises:
            BrokenPipeError: this once, for `Sinks` to make a warning of.
        """
        # Else what is still buffered would make the interpreter exit with an error.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.file.fileno())
        os.close(devnull)
        raise BrokenPipeError(errno.EPIPE, "whoever read the console's output is gone")


def stdout_console() -> Console:
    """A console on standard output: interactive only where that is a terminal.

    FORCE_COLOR gives colours to a log file too, but no progress bar.
    """
    capable = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return _SteadyConsole(force_interactive=sys.stdout.isatty() and capable, highlight=False)


def _style(event: Event) -> str:
    if isinstance(event, Failed):
        return "bold red"
    if isinstance(event, (Warned, RankLost)):
        return "yellow"
    return "green" if isinstance(event, Improved) else ""
