"""What a rank has spent: seconds by kind of work, and what the machine says of it."""

from __future__ import annotations

from resource import RUSAGE_SELF, getrusage
from time import perf_counter
from typing import NamedTuple

_KIB = 1024
"""Bytes of the unit in which Linux counts memory."""


class Times(NamedTuple):
    """What a rank has spent; the first fields as in `Stopwatch`.

    Attributes:
        cpu_s: seconds that all its threads have computed.
        faults: page faults that had to read from a disk.
        preemptions: how often it had to leave a core to somebody else.
        peak_bytes: the most memory that it has had so far.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    data_s: float = 0.0
    checkpoint_s: float = 0.0
    cpu_s: float = 0.0
    faults: float = 0.0
    preemptions: float = 0.0
    peak_bytes: float = 0.0

    def since(self, before: Times) -> Times:
        """What was spent since `before`; the peak stays what it is."""
        spent = Times(*(now - then for now, then in zip(self, before, strict=True)))
        return spent._replace(peak_bytes=self.peak_bytes)


class Stopwatch:
    """Adds up seconds by kind of work since the last `restart`.

    Attributes:
        compute_s: seconds in forward and backward passes, folding and the optimizer.
        communication_s: seconds in collectives, waiting for slower ranks included.
        data_s: seconds of waiting for batches.
        checkpoint_s: seconds in which training stood still for checkpoints.
    """

    __slots__ = ("_before", "checkpoint_s", "communication_s", "compute_s", "data_s", "now")

    def __init__(self) -> None:
        self.now = perf_counter()
        self.restart()

    def restart(self) -> None:
        """Set all sums to zero."""
        self.compute_s = self.communication_s = self.data_s = self.checkpoint_s = 0.0
        self._before = _used()

    def start(self) -> None:
        """Begin to measure: the next `lap` counts from here."""
        self.now = perf_counter()

    def lap(self) -> float:
        """Seconds since the last `start` or `lap`."""
        before = self.now
        self.now = perf_counter()
        return self.now - before

    def times(self) -> Times:
        """All four sums, and what the process has used meanwhile."""
        kinds = Times(self.compute_s, self.communication_s, self.data_s, self.checkpoint_s)
        cpu_s, faults, preemptions, peak_bytes = _used()
        return kinds._replace(
            cpu_s=cpu_s - self._before[0],
            faults=faults - self._before[1],
            preemptions=preemptions - self._before[2],
            peak_bytes=peak_bytes,
        )


def _used() -> tuple[float, int, int, int]:
    """Seconds, faults, preemptions and peak bytes of this process since it began."""
    used = getrusage(RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime
    return cpu_s, used.ru_majflt, used.ru_nivcsw, used.ru_maxrss * _KIB
