"""Times calls that all ranks begin together; a call takes as long as its slowest rank."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from lockstep.cli.clusters.comm_profile_calls import filled
from lockstep.comm.shared_memory import are_on_one_host
from lockstep.comm.transport import Transport

_NUM_ROUND_TRIPS = 3
"""Round trips in which a rank gets the clock of rank 0; the quickest one counts."""
_COMPARED_FOR_S = 5.0
"""Seconds for which a comparison is valid: unsynchronised clocks drift by some 10 µs a second."""
_NUM_REMEMBERED = 8
"""Recent starts whose greatest delay decides how long the next one waits."""
_SPIN_S = 2e-4
"""Seconds before a start in which a rank spins: it might oversleep."""


def start_of(transport: Transport, device: torch.device) -> Callable[[], object]:
    """The function that a rank calls to start together with all others of its group; a collective.

    Inside a host messages arrive at once, so it is enough to wait until all ranks have arrived. Not
    by the transport's barrier: that of Lockstep's own launcher goes through its supervisor, which
    releases ranks one after the other.

    Args:
        transport: transport of the group.
        device: device that tensors are on.
    """
    if not are_on_one_host(transport):
        return AgreedStart(transport, device)
    everyone, counts = filled(transport.size, device), [1] * transport.size
    own = everyone[transport.rank : transport.rank + 1]
    return lambda: transport.all_gather(own, everyone, counts)


class AgreedStart:
    """Lets the ranks of several hosts start at a moment that they agree on.

    Ranks that start when they learn that all have arrived do so up to one network delay apart,
    which would count as a part of the timed call. So each rank compares its clock with that of rank
    0 by the quickest of some round trips, as NTP does (RFC 5905, section 8). The agreed moment is
    the arrival of the last rank plus the slowest recent delay of that message.

    Args:
        transport: transport of the group; making one is a collective.
        device: device that tensors are on.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport, self._device = transport, device
        self._ahead_s = 0.0
        self._last_s = self._compared_s = 0.0
        self._late_s = 0.0
        self._all_late_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._compare()
        for _ in range(_NUM_REMEMBERED):
            self()

    def __call__(self) -> None:
        """Return at the next agreed moment, or at once if it has passed."""
        # Decided by times that all ranks know, so that all compare, or none.
        if self._last_s > self._compared_s + _COMPARED_FOR_S:
            self._compare()
        self._exchange()
        self._wait_until(self._last_s + max(self._all_late_s))

    def _exchange(self) -> None:
        """Exchange the arrival of the last rank, and the greatest delay of the last exchange."""
        own = torch.tensor([self._now(), self._late_s], dtype=torch.float64)
        everyone = self._transport.gather_host(own, [len(own)] * self._transport.size)
        self._last_s, late_s = everyone.view(-1, len(own)).amax(0).tolist()
        self._all_late_s.append(late_s)
        self._late_s = self._now() - self._last_s

    def _compare(self) -> None:
        """Set how far the clock of rank 0 is ahead of this rank's; a collective."""
        own = self._transport.rank
        for rank in range(1, self._transport.size):
            if own == rank:
                self._ahead_s = min(self._round_trip() for _ in range(_NUM_ROUND_TRIPS))[1]
            elif own == 0:
                for _ in range(_NUM_ROUND_TRIPS):
                    self._answer(rank)
        self._exchange()
        self._compared_s = self._last_s

    def _round_trip(self) -> tuple[float, float]:
        """Seconds of a round trip to rank 0, and how far its clock is ahead according to it."""
        clock = torch.zeros(1, dtype=torch.float64, device=self._device)
        began_s = perf_counter()
        self._transport.send(clock, 0).wait()
        self._transport.receive(clock, 0)
        clock_s = clock.item()
        ended_s = perf_counter()
        return ended_s - began_s, clock_s - (began_s + ended_s) / 2

    def _answer(self, rank: int) -> None:
        """Send the time of this rank, which is rank 0, to another one."""
        clock = torch.zeros(1, dtype=torch.float64, device=self._device)
        self._transport.receive(clock, rank)
        clock.fill_(perf_counter())
        self._transport.send(clock, rank).wait()

    def _now(self) -> float:
        """Seconds on the clock of rank 0."""
        return perf_counter() + self._ahead_s

    def _wait_until(self, start_s: float) -> None:
        left_s = start_s - self._now()
        if left_s > _SPIN_S:
            time.sleep(left_s - _SPIN_S)
        while self._now() < start_s:
            pass


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
    """A rank's part in a timed call; by default nothing, while other ranks take part.

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

    The number of calls depends only on times that all ranks know, so all make the same number.

    Args:
        world: transport of all ranks; ranks that take no part in a call wait in it.
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
            # The least, which other processes have disturbed least.
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
        seconds_here = torch.zeros(count + 1, dtype=torch.float64)
        for number in range(count):
            timed.start()
            self._settle()
            before = perf_counter()
            timed.call()
            self._settle()
            seconds_here[number] = perf_counter() - before
        if not timed.counts:
            seconds_here.zero_()
        seconds_here[count] = perf_counter() - self._since
        everyone = self._world.gather_host(seconds_here, [count + 1] * self._world.size)
        *seconds, self.elapsed_s = everyone.view(self._world.size, count + 1).amax(0).tolist()
        return seconds

    def _settle(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _is_settled(seconds: list[float]) -> bool:
    half = len(seconds) // 2
    if len(seconds) < ENOUGH:
        return False
    first, second = statistics.median(seconds[:half]), statistics.median(seconds[half:])
    return abs(first - second) <= _SETTLED * min(first, second)
