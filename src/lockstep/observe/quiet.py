"""A console that keeps silent unless there is something to say."""

from __future__ import annotations

from lockstep.engine.events import Event, Failed, Finished, RankLost, RunStarted, Warned
from lockstep.observe import text
from lockstep.observe.console import ConsoleView


class QuietView(ConsoleView):
    """Shows warnings, lost ranks, and how the run ended, one line each."""

    def __call__(self, event: Event) -> None:
        """Show one event, or nothing."""
        if isinstance(event, RunStarted):
            self._plan = event
        elif isinstance(event, Finished):
            self._print(text.outcome(self._plan, event))
        elif isinstance(event, (Warned, RankLost, Failed)):
            self._show(event)
