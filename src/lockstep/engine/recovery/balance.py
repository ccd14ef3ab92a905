"""Giving slow ranks fewer microbatches; the result does not depend on who computes which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.engine.timing import Times
from lockstep.parallel.layout import Dealt, share

_LEAST_GAIN = 0.1
"""Part of a step's time that new ranges must save: less may be noise, and moving has its price."""


class Proposal(NamedTuple):
    """Ranges of microbatches, and why."""

    ranges: Sequence[Dealt]
    slowest: int
    """The rank that takes longest for one microbatch."""
    slowdown: float
    """Time of the slowest rank as a multiple of that of the fastest."""


class Balancer:
    """Watches how long ranks take, and proposes ranges of microbatches that suit them.

    It sees what all ranks see, so all come to the same proposal.

    Args:
        every: number of steps to watch before each proposal; 0 makes none.
        ranges: present range of microbatches of each rank.

    Attributes:
        ranges: present range of microbatches of each rank.
    """

    def __init__(self, every: int, ranges: Sequence[Dealt]) -> None:
        self._every = every
        self.restart(ranges)

    def restart(self, ranges: Sequence[Dealt]) -> None:
        """Watch a new group from now on, with these ranges."""
        self._each: dict[int, float] = {}
        self.use(ranges)

    def use(self, ranges: Sequence[Dealt]) -> None:
        """Watch the same group with other ranges."""
        self.ranges = list(ranges)
        self._before: list[float] | None = None
        self._num_steps = 0

    @property
    def is_idle(self) -> bool:
        """Whether it never proposes anything."""
        return not self._every or len(self.ranges) == 1

    def propose(self, times: Sequence[Times]) -> Proposal | None:
        """Count a step in; better ranges if there are any.

        Args:
            times: seconds that each rank has spent so far, by kind of work.
        """
        if self.is_idle:
            return None
        # Without communication, in which the fast ranks wait for the slow ones.
        spent = [t.compute_s + t.data_s for t in times]
        if self._before is None:
            self._before = spent
            return None
        self._num_steps += 1
        if self._num_steps < self._every:
            return None
        for rank, r in enumerate(self.ranges):
            seconds = (spent[rank] - self._before[rank]) / self._num_steps
            if len(r) and seconds > 0:
                self._each[rank] = seconds / len(r)
        self._before, self._num_steps = spent, 0
        return better(self.ranges, self._each)


def better(ranges: Sequence[Dealt], each: Mapping[int, float]) -> Proposal | None:
    """Ranges by measured speed, if the slowest rank would be done sooner by a tenth.

    Args:
        ranges: present range of microbatches of each rank.
        each: seconds that each rank took for one microbatch.
    """
    if len(each) < 2:
        return None
    # Who has never computed is taken to be like the others.
    usual = sorted(each.values())[(len(each) - 1) // 2]
    costs = [each.get(rank, usual) for rank in range(len(ranges))]
    proposed = share(ranges[-1].last, [1 / cost for cost in costs])
    now = max(len(r) * cost for r, cost in zip(ranges, costs, strict=True))
    then = max(len(r) * cost for r, cost in zip(proposed, costs, strict=True))
    if then >= (1 - _LEAST_GAIN) * now:
        return None
    slowest = max(each, key=each.__getitem__)
    return Proposal(proposed, slowest, each[slowest] / min(each.values()))
