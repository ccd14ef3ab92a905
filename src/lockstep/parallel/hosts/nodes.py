"""Whole nodes, host by host.

all-gather inside      the nodes of a host's ranks
sum                    the host's nodes, on its first rank
all-to-all             of first ranks: every host's nodes              P (H-1) for each host
tree-sum               of all hosts' nodes, on each first rank
broadcast inside       the sum, and the headers of all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.parallel.arena import Arena, ArenaLayout, Row
from lockstep.parallel.exchange import Exchange, add_up
from lockstep.parallel.hosts.group import Hosts
from lockstep.parallel.hosts.layout import Merged, host_nodes
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
