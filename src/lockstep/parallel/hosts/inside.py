"""What the ranks of a host do among themselves with slices: in memory they share, or by messages.

Each rank works on a share of the elements: it adds up the host's nodes there, and tells the others
the finished sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.comm.shared_memory import SharedMemory, map_all
from lockstep.comm.transport import Transport, offsets
from lockstep.parallel.exchange import add_up
from lockstep.parallel.fold import Arena, ArenaLayout
from lockstep.parallel.hosts.layout import Merged
from lockstep.parallel.layout import Range
from lockstep.parallel.shared_slices import BlockSum, Moment


class Inside(ABC):
    """The ranks of a host."""

    @abstractmethod
    def host_nodes(self, segment: int, worked: Sequence[Sequence[Range]]) -> list[Tensor]:
        """The host's nodes, of the elements that this rank works on, one range behind the other.

        Args:
            segment: number of a segment.
            worked: for each rank of the host, ranges of elements that it works on.
        """

    @abstractmethod
    def spread(self, totals: Sequence[Tensor], shares: Sequence[Sequence[Sequence[Range]]]) -> None:
        """Give every rank of the host what the others have finished.

        Args:
            totals: first row of each segment, in which this rank's share is right.
            shares: for each segment and rank of the host, ranges of elements that it works on; of
                all ranks together, those at a place of this list follow each other.
        """


class InMessages(Inside):
    """Ranks that send each other what they need."""

    def __init__(
        self, transport: Transport, arena: Arena, num_nodes: Sequence[int], merged: Merged
    ) -> None:
        """Prepare.

        Args:
            transport: transport between the ranks of the host.
            arena: arena of this rank.
            num_nodes: number of nodes of each rank.
            merged: what becomes of them.
        """
        self._transport, self._arena = transport, arena
        self._num_nodes, self._merged = num_nodes, merged

    def host_nodes(self, segment: int, worked: Sequence[Sequence[Range]]) -> list[Tensor]:
        """See `Inside.host_nodes`."""
        transport, rows = self._transport, [row.segments[segment] for row in self._arena.rows]
        counts = [sum(map(len, ranges)) for ranges in worked]
        length = counts[transport.rank]
        by_node: dict[tuple[int, int], Tensor] = {}
        for j in range(max(self._num_nodes)):
            holders = [r for r, n in enumerate(self._num_nodes) if j < n]
            received = rows[0].new_empty(length * len(holders))
            sending = j < self._num_nodes[transport.rank]
            packed = rows[0]
            if sending:
                packed = torch.cat([rows[j][a:b] for ranges in worked for a, b in ranges])
            transport.all_to_all(
                packed,
                [count if sending else 0 for count in counts],
                offsets(counts) if sending else [0] * len(counts),
                received,
                [length if r in holders else 0 for r in range(transport.size)],
            )
            for r, part in zip(holders, received.view(len(holders), length), strict=True):
                by_node[r, j] = part
        # By rank, then node: from left to right.
        nodes = [by_node[key] for key in sorted(by_node)]
        runs = zip(self._merged.runs, self._merged.plans, strict=True)
        return [add_up(nodes[run.slice], plan) for run, plan in runs]

    def spread(self, totals: Sequence[Tensor], shares: Sequence[Sequence[Sequence[Range]]]) -> None:
        """See `Inside.spread`."""
        for total, of_ranks in zip(totals, shares, strict=True):
            spread_inside(self._transport, total, of_ranks)


class InMemory(Inside):
    """Ranks that read one another's memory; see `shared_slices` for why that is safe."""

    def __init__(
        self,
        transport: Transport,
        layout: ArenaLayout,
        memories: Sequence[Tensor],
        num_nodes: Sequence[int],
        merged: Merged,
        at: Callable[[Moment], None],
    ) -> None:
        """Use memory that all ranks of the host have mapped.

        Args:
            transport: transport between the ranks of the host.
            layout: layout of every rank's arena.
            memories: memory of each rank.
            num_nodes: number of nodes of each rank.
            merged: what becomes of them.
            at: function that is called at each moment.
        """
        self._transport, self._at = transport, at
        arenas = [
            Arena(layout, memory, max(1, num))
            for memory, num in zip(memories, num_nodes, strict=True)
        ]
        self._first_rows = [arena.rows[0] for arena in arenas]
        held = zip(arenas, num_nodes, strict=True)
        nodes = [row for arena, num in held for row in arena.rows[:num]]
        runs = zip(merged.runs, merged.plans, strict=True)
        self._sums = [(BlockSum(plan, at), nodes[run.slice]) for run, plan in runs]
        self._arrived = torch.zeros(transport.size, dtype=torch.uint8)

    def host_nodes(self, segment: int, worked: Sequence[Sequence[Range]]) -> list[Tensor]:
        """See `Inside.host_nodes`."""
        # A collective that all ranks of the host were in has said that their nodes are complete.
        ranges = worked[self._transport.rank]
        length = sum(map(len, ranges))
        found = []
        for block_sum, rows in self._sums:
            nodes = [row.segments[segment] for row in rows]
            total = nodes[0].new_empty(length)
            parts = torch.split(total, [len(r) for r in ranges])
            for part, (first, last) in zip(parts, ranges, strict=True):
                block_sum.into(part, [node[first:last] for node in nodes])
            found.append(total)
        return found

    def spread(self, totals: Sequence[Tensor], shares: Sequence[Sequence[Sequence[Range]]]) -> None:
        """See `Inside.spread`."""
        self._wait()
        for segment, (total, of_ranks) in enumerate(zip(totals, shares, strict=True)):
            for rank, (row, ranges) in enumerate(zip(self._first_rows, of_ranks, strict=True)):
                if rank == self._transport.rank:
                    continue
                for first, last in ranges:
                    total[first:last] = row.segments[segment][first:last]
        self._at("copying")
        self._wait()

    def _wait(self) -> None:
        """Return when all ranks of the host have called this."""
        rank = self._transport.rank
        own = self._arrived[rank : rank + 1]
        self._transport.all_gather(own, self._arrived, [1] * self._transport.size)


def meet_inside(
    transport: Transport,
    layout: ArenaLayout,
    arena: Arena,
    memory: SharedMemory | str,
    num_nodes: Sequence[int],
    merged: Merged,
    at: Callable[[Moment], None],
) -> Inside:
    """How the ranks of a host reach each other's nodes: a collective of theirs.

    Args:
        transport: transport between the ranks of the host.
        layout: layout of every rank's arena.
        arena: arena of this rank.
        memory: memory of `arena`, or why it cannot be shared.
        num_nodes: number of nodes of each rank.
        merged: what becomes of them.
        at: function that is called at each moment.
    """
    found = map_all(transport, memory)
    if isinstance(found, str):
        return InMessages(transport, arena, num_nodes, merged)
    return InMemory(transport, layout, found, num_nodes, merged, at)


def spread_inside(transport: Transport, flat: Tensor, shares: Sequence[Sequence[Range]]) -> None:
    """Give every rank of a host what the others work on, by messages.

    Args:
        transport: transport between the ranks of the host.
        flat: one segment, [numel], in which the share of this rank is right.
        shares: for each rank of the host, ranges of elements that it works on; of all ranks
            together, those at a place of this list follow each other.
    """
    for of_host in zip(*shares, strict=True):
        own = of_host[transport.rank]
        region = flat[of_host[0].first : of_host[-1].last]
        transport.all_gather(flat[own.first : own.last], region, [len(r) for r in of_host])
