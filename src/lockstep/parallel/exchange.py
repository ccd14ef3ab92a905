"""Adding up the nodes of all ranks, in canonical order: whole nodes, or slices of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.parallel.fold import BLOCK, Arena, ArenaLayout, Row
from lockstep.parallel.layout import Range

_Sum = TypeVar("_Sum", Tensor, Row)


def add_up(nodes: Sequence[_Sum], plan: Sequence[int]) -> _Sum:
    """Sum the nodes into the first, in the order of `layout.merges`.

    Args:
        nodes: the nodes of all ranks, from left to right; their memory is overwritten.
        plan: for each node, the number of additions that follow it.

    Returns:
        The first node, which then holds the sum.
    """
    # Floating-point sums depend on their order. This one follows from the tree, not from ranks.
    stack: list[_Sum] = []
    for node, count in zip(nodes, plan, strict=True):
        stack.append(node)
        for _ in range(count):
            right = stack.pop()
            stack[-1].add_(right)
    return stack[0]


class Exchange(ABC):
    """Turns the nodes in every rank's arena into one sum.

    Attributes:
        total: sum of all nodes; the same tensors in every step.
    """

    total: Row

    @abstractmethod
    def run(self) -> None:
        """Fill `total`."""

    @abstractmethod
    def headers(self) -> Tensor:
        """Every rank's header, float64 [world size, num_header]."""


class Alone(Exchange):
    """One rank: its fold is the sum."""

    def __init__(self, arena: Arena) -> None:
        self._header = arena.header[None]
        self.total = arena.rows[0]

    def run(self) -> None:
        """Nothing to do."""

    def headers(self) -> Tensor:
        """The only header."""
        return self._header


class WholeNodes(Exchange):
    """Every rank gets all nodes: one collective, for gradients of up to about a megabyte."""

    def __init__(
        self,
        transport: Transport,
        layout: ArenaLayout,
        arena: Arena,
        num_nodes: Sequence[int],
        plan: Sequence[int],
        device: torch.device,
    ) -> None:
        self._transport = transport
        self._plan = plan
        self._outgoing = arena.message(num_nodes[transport.rank])
        self._incoming, self._arenas = layout.allocate(num_nodes, device)
        self._counts = [layout.num_bytes(n) for n in num_nodes]
        self._rows = [row for a in self._arenas for row in a.rows]
        self.total = self._rows[0]
        self._headers: Tensor | None = None
        if len(set(num_nodes)) == 1:  # headers lie at even distances: there is one tensor of them
            of_ranks = self._incoming.view(transport.size, -1)
            self._headers = of_ranks[:, : 8 * layout.num_header].view(torch.float64)

    def run(self) -> None:
        """All-gather, then add up."""
        # All ranks make the same additions: more arithmetic, but one collective instead of three.
        self._transport.all_gather(self._outgoing, self._incoming, self._counts)
        add_up(self._rows, self._plan)

    def headers(self) -> Tensor:
        """The headers that came with the nodes."""
        if self._headers is not None:
            return self._headers
        return torch.stack([a.header for a in self._arenas])


class Slices(Exchange):
    """Every rank adds up its slice of the gradient, then all get the finished slices.

    With aligned ranges this moves the bytes of a ring all-reduce. The sum overwrites the rank's own
    first node. Without `gather`, only the slice this rank owns is right afterwards.
    """

    def __init__(
        self,
        transport: Transport,
        layout: ArenaLayout,
        arena: Arena,
        num_nodes: Sequence[int],
        plan: Sequence[int],
        slices: Sequence[Sequence[Range]],
        bucket_bytes: int,
        gather: bool,
        device: torch.device,
    ) -> None:
        self._transport = transport
        self._num_nodes = num_nodes
        self._plan = plan
        self._slices = slices
        self._gather = gather
        self._own = arena
        self.total = arena.rows[0]
        # Every rank needs all headers and scalars, but only a slice of each gradient: so these
        # travel by themselves, from an arena without segments.
        small = ArenaLayout((), layout.num_scalars, layout.num_header)
        rank = transport.rank
        _, [self._outbox] = small.allocate([num_nodes[rank]], device)
        self._outgoing = self._outbox.message(num_nodes[rank])
        self._incoming, self._inbox = small.allocate(num_nodes, device)
        self._small_counts = [small.num_bytes(n) for n in num_nodes]
        self._small_rows = [row for a in self._inbox for row in a.rows]
        self._bucket_bytes = bucket_bytes

    def run(self) -> None:
        """Exchange header and scalars, then slices, bucket by bucket."""
        self._run_small()
        for segment, slices in enumerate(self._slices):
            self._sum_own_slice(segment, slices)
            if self._gather:
                gather_slices(self._transport, self.total.segments[segment], slices)

    def headers(self) -> Tensor:
        """The headers that came with the scalars."""
        return torch.stack([a.header for a in self._inbox])

    def _run_small(self) -> None:
        self._outbox.header.copy_(self._own.header)
        for mine, row in zip(self._outbox.rows, self._own.rows, strict=False):
            mine.scalars.copy_(row.scalars)
        self._transport.all_gather(self._outgoing, self._incoming, self._small_counts)
        self.total.scalars.copy_(add_up(self._small_rows, self._plan).scalars)

    def _sum_own_slice(self, segment: int, slices: Sequence[Range]) -> None:
        rows = [row.segments[segment] for row in self._own.rows]
        rank = self._transport.rank
        num_nodes = len(self._plan)
        # Whole blocks, the unit of all cuts; at least one of each node, however small the bucket.
        per_rank = max(self._bucket_bytes // (rows[0].itemsize * num_nodes) // BLOCK, 1) * BLOCK
        longest = max(len(s) for s in slices)
        for start in range(0, longest, per_rank):
            parts = [
                Range(min(s.first + start, s.last), min(s.first + start + per_rank, s.last))
                for s in slices
            ]
            nodes = self._receive(rows, parts)
            # Safe in place: the nodes are copies, and no later bucket sends these elements again.
            if len(parts[rank]):
                rows[0][parts[rank].first : parts[rank].last] = add_up(nodes, self._plan)

    def _receive(self, rows: Sequence[Tensor], parts: Sequence[Range]) -> list[Tensor]:
        """This rank's part of every node of every rank, in canonical order."""
        rank = self._transport.rank
        length = len(parts[rank])
        by_node: dict[tuple[int, int], Tensor] = {}
        # One node of each rank at a time, for rows are not adjacent in memory. A rank that has no
        # j-th node takes part with counts of 0: a collective needs all ranks.
        for j in range(max(self._num_nodes)):
            holders = [r for r, n in enumerate(self._num_nodes) if j < n]
            received = rows[0].new_empty(length * len(holders))
            sending = j < self._num_nodes[rank]
            self._transport.all_to_all(
                rows[j] if sending else rows[0],
                [len(p) if sending else 0 for p in parts],
                [p.first for p in parts],
                received,
                [length if r in holders else 0 for r in range(self._transport.size)],
            )
            for r, part in zip(holders, received.view(len(holders), length), strict=True):
                by_node[r, j] = part
        # By rank, then node: ranks have contiguous ranges of leaves, so this is from left to right.
        return [by_node[key] for key in sorted(by_node)]


def copy_to_next(transport: Transport, own: Tensor, other: Tensor, slices: Sequence[Range]) -> None:
    """Give the next rank, and the last one's to rank 0, the slice this rank owns.

    Args:
        transport: transport between the ranks.
        own: slice that this rank owns.
        other: memory for that of the rank before this one.
        slices: the elements that each rank owns.
    """
    rank, size = transport.rank, transport.size
    # An all-to-all with a single receiver each: a transport has no send and receive.
    send, receive = [0] * size, [0] * size
    send[(rank + 1) % size] = len(slices[rank])
    receive[rank - 1] = len(slices[rank - 1])
    transport.all_to_all(own, send, [0] * size, other, receive)


def gather_slices(transport: Transport, flat: Tensor, slices: Sequence[Range]) -> None:
    """Give every rank the slices the others own.

    Args:
        transport: transport between the ranks.
        flat: one segment, [numel], in which the slice this rank owns is right.
        slices: the elements that each rank owns.
    """
    # In place. If it is interrupted, `flat` may hold anything (`Transport.all_gather`).
    own = slices[transport.rank]
    transport.all_gather(flat[own.first : own.last], flat, [len(s) for s in slices])
