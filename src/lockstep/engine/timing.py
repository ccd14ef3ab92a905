"""Seconds that a rank spends, by kind of work."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple


class Times(NamedTuple):
    """Seconds that a rank has spent by kind of work; fields as in `Stopwatch`."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    data_s: float = 0.0
    checkpoint_s: float = 0.0

    def since(self, before: Times) -> Times:
        """The seconds spent since `before`."""
        return Times(*(now - then for now, then in zip(self, before, strict=True)))


class Stopwatch:
    """Adds up seconds by kind of work since the last `restart`.

    Attributes:
        compute_s: seconds in forward and backward passes, folding and the optimizer.
        communication_s: seconds in collectives, waiting for slower ranks included.
        data_s: seconds of waiting for batches.
        checkpoint_s: seconds in which training stood still for checkpoints.
    """

    __slots__ = ("checkpoint_s", "communication_s", "compute_s", "data_s", "now")

    def __init__(self) -> None:
        self.now = perf_counter()
        self.restart()

    def restart(self) -> None:
        """Set all sums to zero."""
        self.compute_s = self.communication_s = self.data_s = self.checkpoint_s = 0.0

    def start(self) -> None:
        """Begin to measure: the next `lap` counts from here."""
        self.now = perf_counter()

    def lap(self) -> float:
        """Seconds since the last `start` or `lap`."""
        before = self.now
        self.now = perf_counter()
        return self.now - before

    def times(self) -> Times:
        """All four sums."""
        return Times(self.compute_s, self.communication_s, self.data_s, self.checkpoint_s)
