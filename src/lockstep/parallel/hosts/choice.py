"""Which of two ways to exchange is the quicker one: both are tried."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.parallel.arena import Row
from lockstep.parallel.exchange import Exchange

TRIALS = 3
"""How often each way is tried; the first time it allocates, and meets others."""


class Tried(Exchange):
    """Takes the ways in turn in its first runs, then the one that took least.

    All give the same bits. A run counts as long as on the rank where it was longest, from a barrier
    on; of the runs of a way the shortest counts.

    Attributes:
        total: as for all.
        seconds: what a run of each way takes; empty until all are tried.
    """

    def __init__(self, transport: Transport, ways: Mapping[str, Exchange], total: Row) -> None:
        """Take nothing in advance; talks to nobody.

        Args:
            transport: transport between the ranks.
            ways: exchanges by name, which all fill `total`.
            total: the sum.
        """
        self.total = total
        self.seconds: dict[str, float] = {}
        self._transport, self._ways = transport, dict(ways)
        self._spent: list[float] = []
        self._newest = next(iter(self._ways.values()))

    @property
    def chosen(self) -> str:
        """Name of the way that takes least; empty until all are tried."""
        return min(self.seconds, key=self.seconds.__getitem__, default="")

    def run(self) -> None:
        """Fill `total`, in one of the ways."""
        names = list(self._ways)
        if not self.seconds and len(self._spent) == TRIALS * len(names):
            # The same numbers on all ranks, so they choose alike.
            everyone = self._transport.gather_json(self._spent)
            slowest = [max(spent) for spent in zip(*everyone, strict=True)]
            self.seconds = {name: min(slowest[i :: len(names)]) for i, name in enumerate(names)}
        if self.seconds:
            self._newest = self._ways[self.chosen]
            self._newest.run()
            return
        self._newest = self._ways[names[len(self._spent) % len(names)]]
        # So that nobody's wait for a slow microbatch counts.
        self._transport.barrier()
        start = perf_counter()
        self._newest.run()
        self._spent.append(perf_counter() - start)

    def headers(self) -> Tensor:
        """Those of the newest run."""
        return self._newest.headers()
