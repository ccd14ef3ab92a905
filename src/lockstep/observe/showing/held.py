"""An evaluation's line, which waits for what comes of the evaluation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.engine.events import Checkpointed, Evaluated, Event, Improved
from lockstep.observe import text


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


class HeldLine:
    """One line for an evaluation, that it was the best, and its checkpoint.

    It is held back until the checkpoint is on disk, for some seconds at most; a timer's thread
    prints it then.

    Args:
        write: function that prints a line in a style of `rich`.
        width: function that returns the columns of the console.
        lock: lock that is held while a line is printed by the timer's thread.
        wait_s: most seconds to wait.
    """

    def __init__(
        self,
        write: Callable[[str, str], None],
        width: Callable[[], int],
        lock: threading.RLock,
        wait_s: float,
    ) -> None:
        self._write = write
        self._width = width
        self._lock = lock
        self._wait_s = wait_s
        self._held: _Evaluation | None = None
        self._timer: threading.Timer | None = None
        self._late_error: OSError | None = None

    def raise_late(self) -> None:
        """Raise what the timer's thread has met, once.

        Raises:
            OSError: the line could not be printed.
        """
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def hold(self, event: Evaluated, loss: float | None) -> None:
        """Wait with an evaluation's line for what comes of it.

        Args:
            event: the evaluation.
            loss: training loss up to its step, if that is known.
        """
        self._held = _Evaluation(event, loss)
        self._timer = threading.Timer(self._wait_s, self._show_late, (event,))
        self._timer.daemon = True
        self._timer.start()

    def takes(self, event: Event) -> bool:
        """Whether an event only completes the line; it needs no line of its own then."""
        held = self._held
        if held is None or event.step != held.event.step:
            return False
        if isinstance(event, Improved):
            held.is_best = True
            return True
        if isinstance(event, Checkpointed):
            held.is_saved = True
            self.show()
            return True
        return False

    def show(self) -> None:
        """Print the line, if there is one."""
        held, self._held = self._held, None
        timer, self._timer = self._timer, None
        if timer:
            timer.cancel()
        if held:
            notes = ["best"] * held.is_best + ["saved"] * held.is_saved
            line = text.evaluation(held.event, held.loss, notes, self._width())
            self._write(line, "green" if held.is_best else "")

    def _show_late(self, event: Evaluated) -> None:
        """In the timer's thread: print an evaluation whose checkpoint takes long or is not made."""
        with self._lock:
            if self._held is None or self._held.event is not event:
                return
            try:
                self.show()
            except OSError as error:
                self._late_error = error  # for the thread that hands over the next event
