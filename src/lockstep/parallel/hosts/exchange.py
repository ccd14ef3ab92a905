"""Adding up the nodes of all ranks host by host: whole nodes, or slices of them.

all-gather inside      the nodes of a host's ranks
sum                    the host's nodes, on its first rank
all-to-all             of first ranks: every host's nodes              P (H-1) for each host
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

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lockstep.comm.shared_memory import SharedMemory
from lockstep.comm.transport import Transport, offsets
from lockstep.parallel.exchange import Exchange, add_up
from lockstep.parallel.fold import BLOCK, Arena, ArenaLayout, Row, Segment
from lockstep.parallel.hosts.inside import Inside, meet_inside, spread_inside
from lockstep.parallel.hosts.layout import Cut, Hosts, Merged, cut, host_nodes, parts_of, shares
from lockstep.parallel.layout import Node, Range, merges
from lockstep.parallel.shared_slices import Moment


class NodesByHost(Exchange):
    """The first rank of each host gets the nodes of all hosts, and tells the others the sum.

    Attributes:
        total: as for all.
    """

    def __init__(
        self,
        transport: Transport,
        hosts: Hosts,
        layout: ArenaLayout,
        arena: Arena,
        nodes: Sequence[Sequence[Node]],
        num_leaves: int,
        total: Row,
        at: Callable[[Moment], None],
        device: torch.device,
    ) -> None:
        """Lay out the memory; talks to nobody.

        Args:
            transport: transport between the ranks.
            hosts: the hosts they are on.
            layout: layout of every rank's arena.
            arena: arena of this rank.
            nodes: nodes of each rank.
            num_leaves: number of leaves of the whole tree.
            total: memory for the sum, laid out as a row of the arena.
            at: function that is called before a host's nodes go to others.
            device: device of the memory.
        """
        self.total = total
        self._transport, self._hosts, self._at = transport, hosts, at
        rank = transport.rank
        own = hosts.ranges[hosts.of_rank[rank]]
        num_nodes = [len(nodes[r]) for r in range(*own)]
        self._outgoing = arena.message(len(nodes[rank]))
        self._incoming, self._arenas = layout.allocate(num_nodes, device)
        self._counts = [layout.num_bytes(num) for num in num_nodes]
        self._first = None
        if rank == own.first:
            self._first = _First(hosts, own, layout, nodes, num_leaves, self._arenas, device)
        self._bytes_to, self._bytes_from = [0] * transport.size, [0] * transport.size
        if self._first is not None:
            for ranks, num_bytes in zip(hosts.ranges, self._first.num_bytes, strict=True):
                self._bytes_to[ranks.first] = len(self._first.message)
                self._bytes_from[ranks.first] = num_bytes
        spoken = _with_headers_of(layout, transport.size)
        _, [self._result] = spoken.allocate([1], device)
        self._spread = self._result.message(1)
        self._nothing = self._spread[:0]

    def run(self) -> None:
        """Gather and add up inside, exchange between first ranks, and spread."""
        self._hosts.inside.all_gather(self._outgoing, self._incoming, self._counts)
        first = self._first
        if first is not None:
            first.add_up_own()
        self._at("between")
        message, heard = self._nothing, self._nothing
        if first is not None:
            message, heard = first.message, first.heard
        # Called by all ranks, though most have nothing to say; these wait for nobody over MPI.
        zeros = [0] * self._transport.size
        self._transport.all_to_all(message, self._bytes_to, zeros, heard, self._bytes_from)
        if first is not None:
            first.add_up_all(self._result)
        self._hosts.spread(self._spread)
        _copy(self._result.rows[0], self.total)

    def headers(self) -> Tensor:
        """The headers that came with the sum."""
        size = self._transport.size
        return self._result.header.view(size, self._result.header.numel() // size)


class _First:
    """What the first rank of a host does for the others.

    Attributes:
        message: headers and nodes of this host.
        heard: those of all hosts.
        num_bytes: of the message of each host.
    """

    def __init__(
        self,
        hosts: Hosts,
        own: Range,
        layout: ArenaLayout,
        nodes: Sequence[Sequence[Node]],
        num_leaves: int,
        arenas: Sequence[Arena],
        device: torch.device,
    ) -> None:
        of_hosts = [
            host_nodes([node for rank in range(*ranks) for node in nodes[rank]], num_leaves)
            for ranks in hosts.ranges
        ]
        self._own: Merged = of_hosts[hosts.ranges.index(own)]
        self._headers = [arena.header for arena in arenas]
        self._rows = [row for arena in arenas for row in arena.rows]
        self._plan, _ = merges([node for host in of_hosts for node in host.nodes], num_leaves)
        layouts = [_with_headers_of(layout, len(ranks)) for ranks in hosts.ranges]
        counts = [len(host.nodes) for host in of_hosts]
        _, [self._spoken] = _with_headers_of(layout, len(own)).allocate(
            [len(self._own.nodes)], device
        )
        self.message = self._spoken.message(len(self._own.nodes))
        self.num_bytes = [lay.num_bytes(n) for lay, n in zip(layouts, counts, strict=True)]
        self.heard = torch.zeros(sum(self.num_bytes), dtype=torch.uint8, device=device)
        parts = zip(layouts, torch.split(self.heard, self.num_bytes), counts, strict=True)
        self._hosts = [Arena(*part) for part in parts]

    def add_up_own(self) -> None:
        """Make the message: the nodes of this host's ranks, as far as they add up."""
        torch.cat(self._headers, out=self._spoken.header)
        for row, run, plan in zip(self._spoken.rows, self._own.runs, self._own.plans, strict=True):
            _copy(add_up(self._rows[run.slice], plan), row)

    def add_up_all(self, result: Arena) -> None:
        """Add up what was heard into the first row of an arena, whose header gets all of them."""
        torch.cat([host.header for host in self._hosts], out=result.header)
        rows = [row for host in self._hosts for row in host.rows]
        _copy(add_up(rows, self._plan), result.rows[0])


def _with_headers_of(layout: ArenaLayout, num_ranks: int) -> ArenaLayout:
    return ArenaLayout(layout.segments, layout.num_scalars, layout.num_header * num_ranks)


def _copy(row: Row, to: Row) -> None:
    for mine, theirs in zip(to.segments, row.segments, strict=True):
        mine.copy_(theirs)
    to.scalars.copy_(row.scalars)


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
