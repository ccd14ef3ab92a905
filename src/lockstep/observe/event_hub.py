"""The listener of a run on every rank: one shows and stores events, the others are ready to."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.engine.events import Event, Failed, Finished, Joined, RunStarted
from lockstep.observe.costs import Predicted
from lockstep.observe.sink import Sinks
from lockstep.observe.step_meter import StepMeter


class EventHub:
    """Shows and stores events where it is open, on rank 0; remembers the newest ones elsewhere.

    So when rank 0 is lost, the next one can write what may not have been written yet. Sinks don't
    write again what has been. What steps cost it follows everywhere, and says so before the end.

    Args:
        open_sinks: function that opens everything that shows and stores events.
    """

    def __init__(self, open_sinks: Callable[[], Sinks]) -> None:
        self._open_sinks = open_sinks
        self._sinks: Sinks | None = None
        self._recent: list[Event] = []
        self._meter = StepMeter()

    def open(self) -> None:
        """Show and store events from now on; no-op if it already does."""
        if self._sinks is None:
            self._sinks = self._open_sinks()

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self._meter.take(event)
        if isinstance(event, (Finished, Failed)):
            self._hand(self._meter.measured(event.step))
        self._hand(event)

    def _hand(self, event: Event) -> None:
        """Show and store an event, or remember it."""
        if self._sinks is None:
            if isinstance(event, Predicted):  # only the meter needs it: it is of the start
                return
            if isinstance(event, RunStarted) and not event.continued:
                self._recent.clear()  # of a run that goes back, these are steps to be done again
            # Ranks are never more than one step apart.
            if not self._recent or event.step != self._recent[-1].step:
                self._recent = [e for e in self._recent if e.step >= event.step - 1]
            self._recent.append(event)
            return
        self._sinks(event)
        if isinstance(event, RunStarted):
            recent, self._recent = self._recent, []
            for missed in recent:
                if not isinstance(missed, (RunStarted, Joined)):
                    self._sinks(missed)

    def close(self) -> None:
        """Store what is still kept."""
        if self._sinks is not None:
            self._sinks.close()
            self._sinks = None
