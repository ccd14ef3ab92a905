"""Timing calls on all ranks: they begin together, and a call takes as long as its slowest rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from lockstep.comm.transport import Transport

ENOUGH = 100
"""Calls after which the time of a size counts as known, if it has settled."""
LEAST = 3
"""Calls that are timed however long they take."""

_SETTLED = 0.03
"""Greatest relative difference between the medians of the first and the second half."""
_BLOCK_S = 0.05
_LARGEST_BLOCK = 100
_SHORT_S = 0.05
_MORE_WARM_UPS = 4


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Timed:
    """What a rank does to have a call timed; by default nothing, while others do.

    Attributes:
        call: what is timed.
        start: function that returns when this rank is to begin, with all of its group.
        counts: whether this rank's clock counts.
    """

    call: Callable[[], object] = _nothing
    start: Callable[[], object] = _nothing
    counts: bool = False


class Meter:
    """Times calls; all ranks make the same ones.

    How often is decided from what all ranks know of each other, so they decide alike.

    Args:
        world: transport of all ranks; those that take no part in a call wait in it.
        device: device that tensors are on.

    Attributes:
        elapsed_s: seconds since it was made, on the rank that is furthest; the same on all ranks.
    """

    def __init__(self, world: Transport, device: torch.device) -> None:
        self.elapsed_s = 0.0
        self._world = world
        self._device = device
        self._since = perf_counter()

    def times(self, timed: Timed, allowed_s: float) -> list[float]:
        """Seconds of calls, those of the slowest rank, after some that are not timed.

        Args:
            timed: what this rank calls.
            allowed_s: seconds after which no more calls are made than `LEAST`.
        """
        began_s = self.elapsed_s
        estimate_s = self._block(timed, 1)[0]
        if estimate_s < _SHORT_S:
            # The least, which no other process has made longer.
            estimate_s = min(self._block(timed, _MORE_WARM_UPS))
        seconds: list[float] = []
        while True:
            left_s = began_s + allowed_s - self.elapsed_s
            block_s = min(max(left_s, 0.0), _BLOCK_S)
            count = min(max(int(block_s / max(estimate_s, 1e-9)), LEAST), _LARGEST_BLOCK)
            seconds += self._block(timed, count)
            if self.elapsed_s >= began_s + allowed_s or _is_settled(seconds):
                return seconds
            estimate_s = min(seconds)

    def _block(self, timed: Timed, count: int) -> list[float]:
        """The times of some calls: for each, the greatest of all ranks."""
        own = torch.zeros(count + 1, dtype=torch.float64)
        for number in range(count):
            timed.start()
            self._settle()
            before = perf_counter()
            timed.call()
            self._settle()
            own[number] = perf_counter() - before
        if not timed.counts:
            own.zero_()
        own[count] = perf_counter() - self._since
        everyone = self._world.gather_host(own, [count + 1] * self._world.size)
        *seconds, self.elapsed_s = everyone.view(self._world.size, count + 1).amax(0).tolist()
        return seconds

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _is_settled(seconds: list[float]) -> bool:
    half = len(seconds) // 2
    if len(seconds) < ENOUGH:
        return False
    first, second = statistics.median(seconds[:half]), statistics.median(seconds[half:])
    return abs(first - second) <= _SETTLED * min(first, second)
