"""What becomes of the seconds that the calls of one operation took."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.planning.profile.operations import Operation

_TAIL = 0.99


@dataclass(frozen=True)
class Point:
    """One size of one operation.

    Attributes:
        num_bytes: its size, see `Operation.meaning`; 0 where it has none.
        num_samples: number of calls that were timed.
        min_s: seconds of the fastest call. Those of a call are the slowest rank's.
        median_s: their median.
        p99_s: the least number of seconds that 99 % of the calls did not exceed.
        max_s: seconds of the slowest call.
        algorithm_bytes_per_s: size over median; 0 where there is no size.
        bus_bytes_per_s: what went in or out of the busiest rank, over the median.
    """

    num_bytes: int
    num_samples: int
    min_s: float
    median_s: float
    p99_s: float
    max_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float


def summarised(
    operation: Operation, num_ranks: int, num_bytes: int, seconds: Sequence[float]
) -> Point:
    """The statistics of some calls.

    Args:
        operation: what was called.
        num_ranks: number of ranks that took part.
        num_bytes: its size.
        seconds: time of each call, at least one.
    """
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    tail = ordered[math.ceil(_TAIL * len(ordered)) - 1]
    speed = num_bytes / median
    bus = speed * operation.factor(num_ranks)
    return Point(num_bytes, len(ordered), ordered[0], median, tail, ordered[-1], speed, bus)
