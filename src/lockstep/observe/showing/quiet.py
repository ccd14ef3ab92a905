"""A console that keeps silent unless there is something to say."""

from __future__ import annotations

from lockstep.engine.events import Event, Failed, Finished, RankLost, RunStarted, Warned
from lockstep.observe import text
from lockstep.observe.showing.console import ConsoleView


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
