"""Where a rank's time goes."""

from __future__ import annotations

from time import perf_counter


class Stopwatch:
    """Adds up seconds by kind of work since the last `restart`.

    Attributes:
        compute_s: forward, backward, folding and the optimizer.
        communication_s: in collectives, waiting for slower ranks included.
        data_s: waiting for batches.
        checkpoint_s: standing still for checkpoints.
    """

    __slots__ = ("checkpoint_s", "communication_s", "compute_s", "data_s", "now")

    def __init__(self) -> None:
        self.now = perf_counter()
        self.restart()

    def restart(self) -> None:
        """Set all sums to zero."""
        self.compute_s = self.communication_s = self.data_s = self.checkpoint_s = 0.0

    def start(self) -> None:
        """What follows is measured from here."""
        self.now = perf_counter()

    def lap(self) -> float:
        """Seconds since the last `start` or `lap`."""
        before = self.now
        self.now = perf_counter()
        return self.now - before

    def values(self) -> list[float]:
        """All four sums."""
        return [self.compute_s, self.communication_s, self.data_s, self.checkpoint_s]
