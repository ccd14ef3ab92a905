"""What a rank has spent: seconds by kind of work, and what the machine says of it."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from lockstep.comm.traffic import Traffic
from lockstep.engine.usage import UsageMeter


class Times(NamedTuple):
    """What a rank has spent; the first fields as in `Stopwatch`.

    Attributes:
        cpu_s: seconds that all its threads have computed.
        cores_s: seconds that anybody has computed on the cores that it may run on.
        faults: page faults that had to read from a disk.
        preemptions: how often it had to leave a core to somebody else.
        peak_bytes: the most memory that it has had so far.
        swapped_bytes: memory that is swapped out at the moment.
        num_calls: collectives, and messages sent or received; see `Traffic`.
        sent_bytes: bytes for other ranks.
        received_bytes: bytes from other ranks.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    data_s: float = 0.0
    checkpoint_s: float = 0.0
    cpu_s: float = 0.0
    cores_s: float = 0.0
    faults: float = 0.0
    preemptions: float = 0.0
    peak_bytes: float = 0.0
    swapped_bytes: float = 0.0
    num_calls: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0

    def plus(self, other: Times) -> Times:
        """Both together; of memory, the greater one."""
        both = Times(*(one + more for one, more in zip(self, other, strict=True)))
        return both._replace(
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            swapped_bytes=max(self.swapped_bytes, other.swapped_bytes),
        )

    def since(self, before: Times) -> Times:
        """What was spent since `before`; memory is what it is."""
        spent = Times(*(now - then for now, then in zip(self, before, strict=True)))
        return spent._replace(peak_bytes=self.peak_bytes, swapped_bytes=self.swapped_bytes)


class Stopwatch:
    """Adds up seconds by kind of work since the last `restart`.

    Attributes:
        compute_s: seconds in forward and backward passes, folding and the optimizer.
        communication_s: seconds in collectives, waiting for slower ranks included.
        data_s: seconds of waiting for batches.
        checkpoint_s: seconds in which training stood still for checkpoints.

    Args:
        traffic: counters of the transport of all ranks.
    """

    __slots__ = (
        "_before",
        "_before_traffic",
        "_meter",
        "_traffic",
        "checkpoint_s",
        "communication_s",
        "compute_s",
        "data_s",
        "now",
    )

    def __init__(self, traffic: Traffic | None = None) -> None:
        self.now = perf_counter()
        self._traffic = traffic or Traffic()
        self._meter = UsageMeter()
        self.restart()

    def restart(self) -> None:
        """Set all sums to zero."""
        self.compute_s = self.communication_s = self.data_s = self.checkpoint_s = 0.0
        self._before = self._meter.read()
        traffic = self._traffic
        self._before_traffic = (traffic.num_calls, traffic.sent_bytes, traffic.received_bytes)

    def start(self) -> None:
        """Begin to measure: the next `lap` counts from here."""
        self.now = perf_counter()

    def lap(self) -> float:
        """Seconds since the last `start` or `lap`."""
        before = self.now
        self.now = perf_counter()
        return self.now - before

    def times(self, is_exact: bool = True) -> Times:
        """All four sums, and what the process has used and said meanwhile.

        Args:
            is_exact: whether the process's counters are read now; else as `UsageMeter.read` says.
        """
        now, before = self._meter.read(is_exact), self._before
        traffic, (num_calls, sent_bytes, received_bytes) = self._traffic, self._before_traffic
        return Times(
            self.compute_s,
            self.communication_s,
            self.data_s,
            self.checkpoint_s,
            now.cpu_s - before.cpu_s,
            now.cores_s - before.cores_s,
            now.faults - before.faults,
            now.preemptions - before.preemptions,
            now.peak_bytes,
            now.swapped_bytes,
            traffic.num_calls - num_calls,
            traffic.sent_bytes - sent_bytes,
            traffic.received_bytes - received_bytes,
        )
