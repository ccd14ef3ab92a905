"""Where events go: the interface of a sink, several sinks as one, and the hub on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from lockstep.engine.events import Event, Failed, Finished, Joined, RunStarted, Warned
from lockstep.observe.step_costs import Predicted, StepMeter


class Sink(ABC):
    """Takes events, in order, and shows or stores them."""

    @abstractmethod
    def __call__(self, event: Event) -> None:
        """Take one event.

        Raises:
            OSError: it could not be stored now. A sink keeps what it can and tries again with
                the next event.
        """

    @abstractmethod
    def close(self) -> None:
        """Store what is still kept, and release files and the terminal; no-op if closed.

        Raises:
            OSError: something could not be stored and is lost.
        """


class Sinks(Sink):
    """Passes each event to several sinks.

    A full or failing disk must not end a training run. So an `OSError` of a sink becomes a `Warned`
    event for the others, once for each sink, which still receives events. All other exceptions are
    bugs and propagate.

    Args:
        sinks: sinks in the order in which they receive events and are closed. The one that shows
            warnings to the user comes last: it then also receives those about closing the others.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        self._failing: list[Sink] = []
        self._step = 0

    def __call__(self, event: Event) -> None:
        """Pass the event to all sinks."""
        self._step = event.step
        for sink in tuple(self._sinks):
            self._pass(event, sink)

    def close(self) -> None:
        """Close all sinks; what one of them loses is a `Warned` event for those still open."""
        while self._sinks:
            sink = self._sinks.pop(0)
            try:
                sink.close()
            except OSError as error:
                self(Warned(step=self._step, message=f"{_reason(error)}; its end is missing"))

    def _pass(self, event: Event, sink: Sink) -> None:
        try:
            sink(event)
        except OSError as error:
            if sink in self._failing:
                return
            self._failing.append(sink)
            message = f"{_reason(error)}; training goes on, writing is tried again with each event"
            for other in tuple(self._sinks):
                if other is not sink:
                    self._pass(Warned(step=event.step, message=message), other)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


class EventHub:
    """Shows and stores events where it is open, on rank 0; elsewhere it keeps the newest ones.

    So if rank 0 is lost, the next one can store what may not have been stored yet; sinks do not
    store an event twice. On the first rank of a host with a run directory of its own it is open,
    too, and only stores. Every hub measures what steps cost, and emits it before the end.

    Args:
        open_sinks: function that opens everything that stores events, and what shows them if its
            argument says so.
    """

    def __init__(self, open_sinks: Callable[[bool], Sinks]) -> None:
        self._open_sinks = open_sinks
        self._sinks: Sinks | None = None
        self._shows = False
        self._recent: list[Event] = []
        self._meter = StepMeter()

    def open(self, shows: bool = True) -> None:
        """Store events from now on, and show them if `shows`; no-op if it does."""
        if self._shows != shows:
            self.close()
        if self._sinks is None:
            self._sinks, self._shows = self._open_sinks(shows), shows

    def __call__(self, event: Event) -> None:
        """Take one event."""
        self._meter.take(event)
        if isinstance(event, (Finished, Failed)):
            self._take(self._meter.measured(event.step))
        self._take(event)

    def _take(self, event: Event) -> None:
        """Show and store an event, or keep it."""
        if self._sinks is None:
            if isinstance(event, Predicted):  # only the meter needs it
                return
            if isinstance(event, RunStarted) and not event.continued:
                self._recent.clear()  # a run that goes back to a checkpoint repeats these steps
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
