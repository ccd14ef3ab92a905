"""What the ranks of a host do among themselves with slices: in memory they share, or by messages.

Each rank works on a share of the elements: it adds up the host's nodes there, and gives the others
the finished sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.comm.shared_memory import SharedMemory, map_all
from lockstep.comm.transport import Transport, offsets
from lockstep.parallel.exchange import ExchangePlan, Moment, add_up, receive_nodes
from lockstep.parallel.fold import Arena
from lockstep.parallel.hosts import Merged
from lockstep.parallel.layout import Range
from lockstep.parallel.shared_slices import BlockSum, Neighbours


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
            merged: how they are added up.
        """
        self._transport, self._arena = transport, arena
        self._num_nodes, self._merged = num_nodes, merged

    def host_nodes(self, segment: int, worked: Sequence[Sequence[Range]]) -> list[Tensor]:
        """See `Inside.host_nodes`."""
        rank, size = self._transport.rank, self._transport.size
        rows = [row.segments[segment] for row in self._arena.rows]
        counts = [sum(map(len, ranges)) for ranges in worked]
        nodes = receive_nodes(
            self._transport,
            [
                torch.cat([row[:0], *(row[a:b] for ranges in worked for a, b in ranges)])
                for row in rows[: self._num_nodes[rank]]
            ],
            self._num_nodes,
            sent=counts,
            starts=offsets(counts),
            received=[counts[rank]] * size,
            senders=range(size),
            like=rows[0],
        )
        runs = zip(self._merged.runs, self._merged.plans, strict=True)
        return [add_up(nodes[run.slice], plan) for run, plan in runs]

    def spread(self, totals: Sequence[Tensor], shares: Sequence[Sequence[Sequence[Range]]]) -> None:
        """See `Inside.spread`."""
        for total, of_ranks in zip(totals, shares, strict=True):
            spread_inside(self._transport, total, of_ranks)


class InMemory(Inside):
    """Ranks that read one another's memory; see `shared_slices` for why that is safe."""

    def __init__(
        self, rank: int, ranks: Neighbours, merged: Merged, at: Callable[[Moment], None]
    ) -> None:
        """Prepare.

        Args:
            rank: number of this rank among those of the host.
            ranks: the ranks of the host.
            merged: how their nodes are added up.
            at: function that is called at each moment.
        """
        self._rank, self._ranks, self._at = rank, ranks, at
        runs = zip(merged.runs, merged.plans, strict=True)
        self._sums = [(BlockSum(plan, at), ranks.nodes[run.slice]) for run, plan in runs]

    def host_nodes(self, segment: int, worked: Sequence[Sequence[Range]]) -> list[Tensor]:
        """See `Inside.host_nodes`."""
        # A collective that all ranks of the host were in has said that their nodes are complete.
        ranges = worked[self._rank]
        found = []
        for block_sum, rows in self._sums:
            nodes = [row.segments[segment] for row in rows]
            total = nodes[0].new_empty(sum(map(len, ranges)))
            parts = torch.split(total, [len(r) for r in ranges])
            for part, (first, last) in zip(parts, ranges, strict=True):
                block_sum.into(part, [node[first:last] for node in nodes])
            found.append(total)
        return found

    def spread(self, totals: Sequence[Tensor], shares: Sequence[Sequence[Sequence[Range]]]) -> None:
        """See `Inside.spread`."""
        self._ranks.wait()
        for segment, (total, of_ranks) in enumerate(zip(totals, shares, strict=True)):
            rows = zip(self._ranks.first_rows, of_ranks, strict=True)
            for rank, (row, ranges) in enumerate(rows):
                for first, last in ranges if rank != self._rank else ():
                    total[first:last] = row.segments[segment][first:last]
        self._at("copying")
        self._ranks.wait()


def meet_inside(
    plan: ExchangePlan,
    transport: Transport,
    memory: SharedMemory | str,
    num_nodes: Sequence[int],
    merged: Merged,
) -> Inside:
    """How the ranks of a host reach each other's nodes; a collective of these ranks.

    Args:
        plan: exchange of all ranks.
        transport: transport between the ranks of the host.
        memory: memory of the plan's arena, or why it cannot be shared.
        num_nodes: number of nodes of each rank of the host.
        merged: how they are added up.
    """
    found = map_all(transport, memory)
    if isinstance(found, str):
        return InMessages(transport, plan.arena, num_nodes, merged)
    ranks = Neighbours(transport, plan.layout, found, num_nodes)
    return InMemory(transport.rank, ranks, merged, plan.at)


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
