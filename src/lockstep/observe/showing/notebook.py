"""Progress in a notebook's cell: a bar that is redrawn, beside the lines of the console."""

from __future__ import annotations

import html
import sys
import time
from math import inf
from typing import Any

from rich.console import Console

from lockstep.engine.events import Checkpointed, Event, Failed, Finished, RunStarted, StepDone
from lockstep.observe import text
from lockstep.observe.showing.console import ConsoleView
from lockstep.observe.showing.live import Pace
from lockstep.observe.sink import Sink
from lockstep.observe.text import Item, fitted


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
