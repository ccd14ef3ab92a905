"""Where events go: the interface of a sink, and several sinks as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from lockstep.engine.events import Event, RunStarted, Warned
from lockstep.observe.text import count


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


class RowsLeftOut(OSError):
    """A file is written again, and lacks a number of rows for which there was no room."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(
            f"{path}: lacks {count(number, 'row')}, for which there was no room while it could not "
            "be written"
        )
        self.number = number


class Sinks(Sink):
    """Passes each event to several sinks.

    A full or failing disk must not end a training run. So an `OSError` of a sink becomes a `Warned`
    event for the others, once for each sink, which still receives events; that a file goes on
    without some rows is a further one, for all. All other exceptions are bugs and propagate.

    Args:
        sinks: sinks in the order in which they receive events and are closed. The one that shows
            warnings to the user comes last: it then also receives those about closing the others.

    Attributes:
        stored: step of the newest event that no sink still has to store; -1 if there is none.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        self._failing: list[Sink] = []
        self._step = 0
        self.stored = -1

    def __call__(self, event: Event) -> None:
        """Pass the event to all sinks."""
        self._step = event.step
        if isinstance(event, RunStarted) and not event.continued:
            self.stored = min(self.stored, event.step)  # later steps are done again
        stored = [self._pass(event, sink) for sink in tuple(self._sinks)]
        if all(stored):
            self.stored = event.step

    def close(self) -> None:
        """Close all sinks; what one of them loses is a `Warned` event for those still open."""
        while self._sinks:
            sink = self._sinks.pop(0)
            try:
                sink.close()
            except OSError as error:
                end = "" if isinstance(error, RowsLeftOut) else "; its end is missing"
                self(Warned(step=self._step, message=f"{_reason(error)}{end}"))

    def _pass(self, event: Event, sink: Sink) -> bool:
        """Pass an event to a sink; whether it has stored this one, and all before."""
        try:
            sink(event)
        except RowsLeftOut as error:
            self._warn(event.step, str(error))
            return False
        except OSError as error:
            if sink in self._failing:
                return False
            self._failing.append(sink)
            message = f"{_reason(error)}; training goes on, writing is tried again with each event"
            self._warn(event.step, message, without=sink)
            return False
        return True

    def _warn(self, step: int, message: str, without: Sink | None = None) -> None:
        for sink in tuple(self._sinks):
            if sink is not without:
                self._pass(Warned(step=step, message=message), sink)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason
