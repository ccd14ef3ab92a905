"""Values that each rank sends to all others in every step, beside its part of the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.engine.timing import Times

STOP_REASONS = ("", "interrupted", "terminated", "preempted")
"""Why a run may be asked to end, by rising urgency; empty if it is not asked to."""

_NUM_FLAGS = 3
_NUM_FIXED = _NUM_FLAGS + len(Times._fields)


class Header(NamedTuple):
    """One rank's header. It travels with the sums, so it costs no message of its own."""

    has_failed: bool
    """Whether the task's code raised an exception on this rank."""
    stop_reason: str
    """Reason for which this rank was asked to end, one of `STOP_REASONS`."""
    grows: bool
    """Whether this rank knows of a new process that waits to be taken in."""
    times: Times
    """Seconds that this rank has spent so far, by kind of work."""
    counters: tuple[float, ...]
    """Integer buffers after this rank's microbatches; -inf where it computed none."""

    def pack(self) -> list[float]:
        """As float64 values, `num_values` of them."""
        flags = (float(self.has_failed), STOP_REASONS.index(self.stop_reason), float(self.grows))
        return [*flags, *self.times, *self.counters]

    @classmethod
    def unpack(cls, values: Sequence[float]) -> Header:
        """The inverse of `pack`."""
        has_failed, stop, grows = values[:_NUM_FLAGS]
        times = Times(*values[_NUM_FLAGS:_NUM_FIXED])
        counters = tuple(values[_NUM_FIXED:])
        return cls(bool(has_failed), STOP_REASONS[int(stop)], bool(grows), times, counters)


def num_values(num_counters: int) -> int:
    """The number of float64 values of a header.

    Args:
        num_counters: number of integer buffers that forward passes change.
    """
    return _NUM_FIXED + num_counters
