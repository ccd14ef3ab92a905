"""Values that each rank sends to all others in every step, beside its part of the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.engine.timing import Times

DIRECTORY_LOST = "the run directory is gone"
STOP_REASONS = ("", "interrupted", "hung up", "terminated", "preempted", DIRECTORY_LOST)
"""Why a run may be asked to end, by rising urgency; empty if it is not asked to."""

_NUM_OWN = 8
_NUM_FIXED = _NUM_OWN + len(Times._fields)


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
    carry_length: int = 0
    """Number of elements of what this rank's microbatches carry, packed."""
    asked: int = 0
    """What code has asked of the run's length on this rank (`Asked.bits`)."""
    is_suspicious: bool = False
    """Whether this rank's passes have changed state, so that the step has to be done again."""
    settings: int = 0
    """Digest of the learning rates of this step and of the optimizer's other settings."""
    order: int = 0
    """Digest of the order of the epoch's samples, if the task gives it; 0 where it was not used."""

    def pack(self) -> list[float]:
        """As float64 values, `num_values` of them."""
        stop = STOP_REASONS.index(self.stop_reason)
        own = (
            *(self.has_failed, stop, self.grows, self.carry_length, self.asked),
            *(self.is_suspicious, self.settings, self.order),
        )
        return [*map(float, own), *self.times, *self.counters]

    @classmethod
    def unpack(cls, values: Sequence[float]) -> Header:
        """The inverse of `pack`."""
        has_failed, stop, grows, length, asked, is_suspicious, *digests = values[:_NUM_OWN]
        times = Times(*values[_NUM_OWN:_NUM_FIXED])
        counters = tuple(values[_NUM_FIXED:])
        reason = STOP_REASONS[int(stop)]
        own = bool(has_failed), reason, bool(grows), times, counters
        return cls(*own, int(length), int(asked), bool(is_suspicious), *map(int, digests))


def num_values(num_counters: int) -> int:
    """The number of float64 values of a header.

    Args:
        num_counters: number of integer buffers that forward passes change.
    """
    return _NUM_FIXED + num_counters
