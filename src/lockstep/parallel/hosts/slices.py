"""Slices, host by host.

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

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lockstep.comm.shared_memory import SharedMemory
from lockstep.comm.transport import Transport, offsets
from lockstep.parallel.arena import BLOCK, Arena, ArenaLayout, Row, Segment
from lockstep.parallel.exchange import Exchange, add_up
from lockstep.parallel.hosts.group import Hosts
from lockstep.parallel.hosts.inside import Inside, meet_inside, spread_inside
from lockstep.parallel.hosts.layout import Cut, cut, host_nodes, parts_of, shares
from lockstep.parallel.hosts.nodes import NodesByHost
from lockstep.parallel.layout import Node, Range, merges
from lockstep.parallel.shared_slices import Moment


def _nothing(moment: Moment) -> None:
    pass


class SlicesByHost(Exchange):
    """Every rank adds up its slice of what the hosts have added up, then all get the sum.

    The sum overwrites the rank's own first node. Without `gather`, only the slice this rank owns is
    right afterwards.
    """

    def __init__(
        self,
        transport: Transport,
        hosts: Hosts,
        layout: ArenaLayout,
        arena: Arena,
        nodes: Sequence[Sequence[Node]],
        num_leaves: int,
        slices: Sequence[Sequence[Range]],
        bucket_bytes: int,
        gather: bool,
        memory: SharedMemory | str,
        at: Callable[[Moment], None],
    ) -> None:
        """Lay out the memory; talks to nobody.

        Args:
            transport: transport between the ranks.
            hosts: the hosts they are on.
            layout: layout of every rank's arena.
            arena: arena of this rank, in host memory.
            nodes: nodes of each rank.
            num_leaves: number of leaves of the whole tree.
            slices: for each segment, the elements that each rank owns.
            bucket_bytes: about the most bytes of gradient that a rank receives at a time.
            gather: whether every rank needs the whole sum.
            memory: memory of `arena`, or why it cannot be shared.
            at: function that is called at each moment.
        """
        self._transport, self._hosts, self._layout = transport, hosts, layout
        self._own, self._memory, self._gather, self._at = arena, memory, gather, at
        self.total = arena.rows[0]
        self._host_of = hosts.of_rank
        rank = transport.rank
        own = hosts.ranges[self._host_of[rank]]
        of_hosts = [
            host_nodes([node for r in range(*ranks) for node in nodes[r]], num_leaves)
            for ranks in hosts.ranges
        ]
        self._merged = of_hosts[self._host_of[rank]]
        self._num_inside = [len(nodes[r]) for r in range(*own)]
        self._num_nodes = [len(merged.nodes) for merged in of_hosts]
        self._plan, _ = merges([node for merged in of_hosts for node in merged.nodes], num_leaves)
        self._inside: Inside | None = None

        device = torch.device("cpu")
        small = ArenaLayout((), layout.num_scalars, layout.num_header)
        scalars = Row([], self.total.scalars)
        _, [self._outbox] = small.allocate([len(nodes[rank])], device)
        self._small = NodesByHost(
            transport, hosts, small, self._outbox, nodes, num_leaves, scalars, _nothing, device
        )
        self._shares = [shares(of, hosts.ranges)[own.slice] for of in slices]
        self._cuts = [
            [cut(parts, hosts.ranges, of, rank) for parts in self._buckets(of, s, bucket_bytes)]
            for of, s in zip(slices, layout.segments, strict=True)
        ]
        self._moved = self._moved_bytes()

    def run(self) -> None:
        """Exchange headers and scalars, then slices, bucket by bucket."""
        if self._inside is None:
            self._inside = meet_inside(
                self._hosts.inside, self._layout, self._own, self._memory,
                self._num_inside, self._merged, self._at,
            )  # fmt: skip
        self._outbox.header.copy_(self._own.header)
        for mine, row in zip(self._outbox.rows, self._own.rows, strict=False):
            mine.scalars.copy_(row.scalars)
        self._small.run()
        for segment, cuts in enumerate(self._cuts):
            total = self.total.segments[segment]
            for part in cuts:
                self._sum(segment, self._inside, part)
                if self._gather:
                    give_back(self._transport, self._hosts, total, part)
        if self._gather:
            self._inside.spread(self.total.segments, self._shares)
        self._transport.traffic.add_shared(*self._moved)

    def headers(self) -> Tensor:
        """The headers that came with the scalars."""
        return self._small.headers()

    def _buckets(
        self, slices: Sequence[Range], segment: Segment, bucket_bytes: int
    ) -> Iterator[list[Range]]:
        """Parts of the slices that are exchanged at a time: whole blocks, at least one of each."""
        num_bytes = segment.dtype.itemsize * len(self._plan)
        length = max(bucket_bytes // num_bytes // BLOCK, 1) * BLOCK
        for start in range(0, max(map(len, slices)), length):
            yield parts_of(slices, start, length)

    def _sum(self, segment: int, inside: Inside, part: Cut) -> None:
        """Add up a part of the slice that this rank owns, over all hosts."""
        transport, rank, total = self._transport, self._transport.rank, self.total.segments[segment]
        own_nodes = inside.host_nodes(segment, part.worked)
        first = self._hosts.ranges[self._host_of[rank]].first
        counts = [len(r) for r in part.worked[rank - first]]
        length = len(part.own)
        by_node: dict[tuple[int, int], Tensor] = {}
        self._at("between")
        # A host that has no j-th node takes part with counts of 0: a collective needs all ranks.
        for j in range(max(self._num_nodes)):
            holders = [host for host, n in enumerate(self._num_nodes) if j < n]
            received = total.new_empty(length * len(holders))
            sending = j < len(own_nodes)
            transport.all_to_all(
                own_nodes[j] if sending else total,
                [count if sending else 0 for count in counts],
                offsets(counts) if sending else [0] * len(counts),
                received,
                [
                    len(r) if host in holders else 0
                    for host, r in zip(self._host_of, part.given, strict=True)
                ],
            )
            for host, theirs in zip(holders, received.view(len(holders), length), strict=True):
                by_node[host, j] = theirs
        if length:
            # By host, then node: hosts have contiguous ranges of leaves, from left to right.
            nodes = [by_node[key] for key in sorted(by_node)]
            total[part.own.first : part.own.last] = add_up(nodes, self._plan)

    def _moved_bytes(self) -> tuple[int, int]:
        """The bytes that others of the host read of this rank, and it of others."""
        place = self._hosts.inside.rank
        num_own, num_all = self._num_inside[place], sum(self._num_inside)
        others = self._hosts.inside.size - 1
        sent = received = 0
        for of_ranks, (dtype, numel) in zip(self._shares, self._layout.segments, strict=True):
            own = sum(map(len, of_ranks[place])) * dtype.itemsize
            rest = numel * dtype.itemsize - own
            sent += num_own * rest + self._gather * others * own
            received += (num_all - num_own) * own + self._gather * rest
        return sent, received


def give_back(transport: Transport, hosts: Hosts, flat: Tensor, part: Cut) -> None:
    """Give the ranks of other hosts what this one owns of their shares; a collective of all ranks.

    Args:
        transport: transport between the ranks.
        hosts: the hosts they are on.
        flat: one segment, [numel], in which the part that this rank owns is right.
        part: elements that are meant.
    """
    rank, host_of = transport.rank, hosts.of_rank
    first = hosts.ranges[host_of[rank]].first
    is_other = [host != host_of[rank] for host in host_of]
    wanted = [
        r if other else Range(r.first, r.first)
        for r, other in zip(part.worked[rank - first], is_other, strict=True)
    ]
    counts = [len(r) for r in wanted]
    received = flat.new_empty(sum(counts))
    transport.all_to_all(
        flat,
        [len(r) if other else 0 for r, other in zip(part.given, is_other, strict=True)],
        [r.first for r in part.given],
        received,
        counts,
    )
    for (start, last), theirs in zip(wanted, torch.split(received, counts), strict=True):
        flat[start:last] = theirs


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
    spread_inside(hosts.inside, flat, shares(slices, hosts.ranges)[own.slice])
