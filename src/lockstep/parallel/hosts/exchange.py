"""Adding up the nodes of all ranks host by host: whole nodes, or slices of them.

all-gather inside      the nodes of a host's ranks
sum                    the host's nodes, on its first rank
all-gather             of first ranks: every host's nodes              P (H-1) for each host
tree-sum               of all hosts' nodes, on each first rank
broadcast inside       the sum, and the headers of all ranks

small                  headers and scalars, by `NodesByHost`: all nodes are complete
    sum inside             each rank adds up its share of its host's nodes
    all-to-all             every rank gets its slice of every host's nodes       P (H-1)/W
    tree-sum               on the slice, in canonical order
    all-to-all             every rank gets the finished sums of its share        P (H-1)/W
    spread inside          every rank gets those of the others of its host

With one node for each host, these are the bytes that a sum over H hosts takes at least between
them: 2 P (H-1) in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.comm.shared_memory import SharedMemory
from lockstep.comm.transport import Transport, offsets
from lockstep.parallel.exchange import (
    FEW_NODES,
    Exchange,
    ExchangePlan,
    LevelSum,
    add_up,
    receive_nodes,
)
from lockstep.parallel.fold import Arena, ArenaLayout, Row, buckets
from lockstep.parallel.hosts import Cut, Hosts, Merged, cut, host_nodes, shares
from lockstep.parallel.hosts.inside import Inside, meet_inside, spread_inside
from lockstep.parallel.layout import Range, merges
from lockstep.parallel.shared_slices import shared_bytes


class NodesByHost(Exchange):
    """The first rank of each host gets the nodes of all hosts, and sends the others the sum.

    Attributes:
        total: as for all.
    """

    def __init__(self, plan: ExchangePlan, hosts: Hosts, total: Row) -> None:
        """Lay out the memory; talks to nobody.

        Args:
            plan: what is exchanged.
            hosts: the hosts that the ranks are on.
            total: memory for the sum, laid out as a row of the arena.
        """
        self.total = total
        self._transport, self._hosts, self._at = plan.transport, hosts, plan.at
        layout, rank, size = plan.layout, plan.transport.rank, plan.transport.size
        own = hosts.ranges[hosts.of_rank[rank]]
        num_nodes = plan.num_nodes[own.slice]
        self._outgoing = plan.arena.message(plan.num_nodes[rank])
        self._incoming, arenas = layout.allocate(num_nodes, plan.device)
        self._counts = [layout.num_bytes(num) for num in num_nodes]
        self._firsts = [ranks.first for ranks in hosts.ranges]
        self._first = _First(plan, hosts, arenas) if rank == own.first else None
        _, [self._result] = _with_headers_of(layout, size).allocate([1], plan.device)
        self._spread = self._result.message(1)
        self._nothing = self._spread[:0]

    def run(self) -> None:
        """Gather and add up inside, exchange between first ranks, and spread."""
        self._hosts.inside.all_gather(self._outgoing, self._incoming, self._counts)
        first = self._first
        if first is not None:
            first.add_up_own()
        self._at("between")
        if first is None:
            self._transport.gather_among(self._nothing, self._firsts, [0] * len(self._firsts))
        else:
            self._transport.gather_among(first.incoming, self._firsts, first.num_bytes)
            first.add_up_all(self._result)
        self._hosts.spread(self._spread)
        self.total.copy_(self._result.rows[0])

    def headers(self) -> Tensor:
        """The headers that came with the sum."""
        size = self._transport.size
        return self._result.header.view(size, self._result.header.numel() // size)


class _First:
    """What the first rank of a host does for the others.

    Attributes:
        incoming: headers and nodes of all hosts.
        num_bytes: of those of each host.
    """

    def __init__(self, plan: ExchangePlan, hosts: Hosts, arenas: Sequence[Arena]) -> None:
        of_hosts, self._plan = nodes_of_hosts(plan, hosts)
        self._own = of_hosts[hosts.of_rank[plan.transport.rank]]
        self._headers = [arena.header for arena in arenas]
        self._rows = [row for arena in arenas for row in arena.rows]
        layouts = [_with_headers_of(plan.layout, len(ranks)) for ranks in hosts.ranges]
        counts = [len(host.nodes) for host in of_hosts]
        self.num_bytes = [lay.num_bytes(n) for lay, n in zip(layouts, counts, strict=True)]
        self.incoming = torch.zeros(sum(self.num_bytes), dtype=torch.uint8, device=plan.device)
        parts = zip(layouts, torch.split(self.incoming, self.num_bytes), counts, strict=True)
        self._hosts = [Arena(*part) for part in parts]
        self._by_level: LevelSum | None = None
        if len(self._plan) > FEW_NODES:
            firsts = zip(offsets(self.num_bytes), layouts, counts, strict=True)
            starts = [
                first + lay.num_bytes(node) for first, lay, num in firsts for node in range(num)
            ]
            self._by_level = LevelSum(plan.layout, self.incoming, starts, self._plan)
        self._outbox = self._hosts[hosts.of_rank[plan.transport.rank]]

    def add_up_own(self) -> None:
        """Fill this host's part: the nodes of its ranks, as far as they add up."""
        torch.cat(self._headers, out=self._outbox.header)
        for row, run, plan in zip(self._outbox.rows, self._own.runs, self._own.plans, strict=True):
            row.copy_(add_up(self._rows[run.slice], plan))

    def add_up_all(self, result: Arena) -> None:
        """Add up `incoming` into the first row of an arena, whose header gets all headers."""
        torch.cat([host.header for host in self._hosts], out=result.header)
        if self._by_level is not None:
            self._by_level.run()
            result.rows[0].copy_(self._by_level.total)
            return
        rows = [row for host in self._hosts for row in host.rows]
        result.rows[0].copy_(add_up(rows, self._plan))


def _with_headers_of(layout: ArenaLayout, num_ranks: int) -> ArenaLayout:
    return ArenaLayout(layout.segments, layout.num_scalars, layout.num_header * num_ranks)


def nodes_of_hosts(plan: ExchangePlan, hosts: Hosts) -> tuple[list[Merged], list[int]]:
    """What the nodes of each host become, and how many additions follow each that is left."""
    merged = [
        host_nodes([node for rank in range(*ranks) for node in plan.nodes[rank]], plan.num_leaves)
        for ranks in hosts.ranges
    ]
    return merged, merges([node for host in merged for node in host.nodes], plan.num_leaves)[0]


class SlicesByHost(Exchange):
    """Every rank adds up its slice of what the hosts have added up, then all get the sum.

    The sum overwrites the rank's own first node. Without `gather`, only the slice this rank owns is
    right afterwards.
    """

    def __init__(self, plan: ExchangePlan, hosts: Hosts, memory: SharedMemory | str) -> None:
        """Lay out the memory; talks to nobody.

        Args:
            plan: what is exchanged, in host memory.
            hosts: the hosts that the ranks are on.
            memory: memory of the plan's arena, or why it cannot be shared.
        """
        self._plan, self._hosts, self._memory = plan, hosts, memory
        self.total = plan.arena.rows[0]
        rank = plan.transport.rank
        of_hosts, self._additions = nodes_of_hosts(plan, hosts)
        host = hosts.of_rank[rank]
        self._own_ranks, self._merged = hosts.ranges[host], of_hosts[host]
        self._num_inside = plan.num_nodes[self._own_ranks.slice]
        self._num_nodes = [len(merged.nodes) for merged in of_hosts]
        self._inside: Inside | None = None
        self._outbox = replace(plan.without_segments(), at=lambda moment: None)
        self._small = NodesByHost(self._outbox, hosts, Row([], self.total.scalars))
        segments = plan.layout.segments
        self._shares = [shares(of, hosts.ranges, self._own_ranks) for of in plan.slices]
        self._cuts = [
            [
                cut(parts, hosts.ranges, of, rank)
                for parts in buckets(of, plan.bucket_bytes, dtype.itemsize * len(self._additions))
            ]
            for of, (dtype, _) in zip(plan.slices, segments, strict=True)
        ]
        place = hosts.inside.rank
        owned = [sum(map(len, of_ranks[place])) for of_ranks in self._shares]
        self._moved = shared_bytes(segments, owned, self._num_inside, place, plan.gather)

    def run(self) -> None:
        """Exchange headers and scalars, then slices, bucket by bucket."""
        plan, hosts = self._plan, self._hosts
        if self._inside is None:
            self._inside = meet_inside(
                plan, hosts.inside, self._memory, self._num_inside, self._merged
            )
        self._outbox.arena.copy_small(plan.arena)
        self._small.run()
        for segment, cuts in enumerate(self._cuts):
            for part in cuts:
                self._sum(segment, self._inside, part)
                if plan.gather:
                    give_back(plan.transport, hosts, self.total.segments[segment], part)
        if plan.gather:
            self._inside.spread(self.total.segments, self._shares)
        plan.transport.traffic.add_shared(*self._moved)

    def headers(self) -> Tensor:
        """The headers that came with the scalars."""
        return self._small.headers()

    def _sum(self, segment: int, inside: Inside, part: Cut) -> None:
        """Add up a part of the slice that this rank owns, over all hosts."""
        transport, total = self._plan.transport, self.total.segments[segment]
        own_nodes = inside.host_nodes(segment, part.worked)
        counts = [len(r) for r in part.taken]
        self._plan.at("between")
        nodes = receive_nodes(
            transport,
            own_nodes,
            self._num_nodes,
            sent=counts,
            starts=offsets(counts),
            received=[len(r) for r in part.given],
            senders=self._hosts.of_rank,
            like=total,
        )
        if len(part.own):
            total[part.own.slice] = add_up(nodes, self._additions)


def give_back(transport: Transport, hosts: Hosts, flat: Tensor, part: Cut) -> None:
    """Give the ranks of other hosts what this one owns of their shares; a collective of all ranks.

    Args:
        transport: transport between the ranks.
        hosts: the hosts they are on.
        flat: one segment, [numel], in which the part that this rank owns is right.
        part: elements that are meant.
    """
    rank, host_of = transport.rank, hosts.of_rank
    is_other = [host != host_of[rank] for host in host_of]
    nothing = Range(0, 0)
    wanted = [r if other else nothing for r, other in zip(part.taken, is_other, strict=True)]
    counts = [len(r) for r in wanted]
    received = flat.new_empty(sum(counts))
    transport.all_to_all(
        flat,
        [len(r) if other else 0 for r, other in zip(part.given, is_other, strict=True)],
        [r.first for r in part.given],
        received,
        counts,
    )
    place = 0
    for start, last in filter(len, wanted):
        flat[start:last] = received[place : place + last - start]
        place += last - start


def gather_slices_by_host(
    transport: Transport, hosts: Hosts, flat: Tensor, slices: Sequence[Range]
) -> None:
    """What `exchange.gather_slices` does, with each slice sent once to each of the other hosts.

    Args:
        transport: transport between the ranks.
        hosts: the hosts they are on.
        flat: one segment, [numel], in which the slice this rank owns is right.
        slices: the elements that each rank owns.
    """
    own = hosts.ranges[hosts.of_rank[transport.rank]]
    give_back(transport, hosts, flat, cut(slices, hosts.ranges, slices, transport.rank))
    spread_inside(hosts.inside, flat, shares(slices, hosts.ranges, own))
