"""Adding up the nodes of all ranks, in canonical order: whole nodes, or slices of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

import torch
from torch import Tensor

from lockstep.comm.mailbox import Started
from lockstep.comm.transport import Transport
from lockstep.parallel.fold import Arena, ArenaLayout, Row, Segment, TensorSpecs, buckets
from lockstep.parallel.layout import Node, Range, merges

_Sum = TypeVar("_Sum", Tensor, Row)

Moment = Literal["summing", "copying", "between"]
"""When a part of this rank's slice is summed; when it has slices of others; when what is left of a
host's nodes is about to go to other hosts."""


@dataclass(frozen=True)
class Leaves:
    """The leaves of a canonical tree, and what each of them holds.

    Attributes:
        segments: dtype and number of elements of each segment of the flat gradient, one for each
            dtype.
        specs: where the tensors of a leaf lie in each segment.
        num_scalars: number of float64 sums besides the gradient.
        num_microbatches: number of leaves.
        device: device on which they lie.
    """

    segments: Sequence[Segment]
    specs: TensorSpecs
    num_scalars: int
    num_microbatches: int
    device: torch.device


@dataclass(frozen=True)
class ExchangePlan:
    """Who has which nodes, and how they become one sum.

    Attributes:
        transport: transport between the ranks.
        layout: layout of every rank's arena.
        arena: arena of this rank.
        nodes: nodes of each rank; those of all ranks together are the whole tree.
        num_leaves: number of leaves of the tree.
        slices: for each segment, the elements that each rank owns.
        bucket_bytes: about the most bytes of gradient that a rank receives at a time.
        gather: whether every rank needs the whole sum, or just the slice it owns.
        device: device of the memory.
        at: function that is called at each moment.
    """

    transport: Transport
    layout: ArenaLayout
    arena: Arena
    nodes: Sequence[Sequence[Node]]
    num_leaves: int
    slices: Sequence[Sequence[Range]]
    bucket_bytes: int
    gather: bool
    device: torch.device
    at: Callable[[Moment], None]

    @cached_property
    def num_nodes(self) -> list[int]:
        """Number of nodes of each rank."""
        return [len(of_rank) for of_rank in self.nodes]

    @cached_property
    def additions(self) -> list[int]:
        """For each node of all ranks, the number of additions that follow it."""
        plan, left = merges([node for of_rank in self.nodes for node in of_rank], self.num_leaves)
        assert len(left) == 1, "the ranges of all ranks must make up the whole tree"
        return plan

    def without_segments(self) -> ExchangePlan:
        """The same exchange of headers and scalars alone, from an arena of their own."""
        layout = ArenaLayout((), self.layout.num_scalars, self.layout.num_header)
        _, [arena] = layout.allocate([self.num_nodes[self.transport.rank]], self.device)
        return replace(self, layout=layout, arena=arena)


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

    def __init__(self, plan: ExchangePlan) -> None:
        self._plan, transport, layout = plan, plan.transport, plan.layout
        self._outgoing = plan.arena.message(plan.num_nodes[transport.rank])
        self._incoming, self._arenas = layout.allocate(plan.num_nodes, plan.device)
        self._counts = [layout.num_bytes(n) for n in plan.num_nodes]
        self._rows = [row for a in self._arenas for row in a.rows]
        self.total = self._rows[0]
        self._headers: Tensor | None = None
        # With as many nodes of each rank, headers lie at even distances: one view has them all.
        if layout.num_header and len(set(plan.num_nodes)) == 1:
            of_ranks = self._incoming.view(transport.size, -1)
            self._headers = of_ranks[:, : 8 * layout.num_header].view(torch.float64)

    def run(self) -> None:
        """All-gather, then add up."""
        # All ranks make the same additions: more arithmetic, but one collective instead of three.
        self._plan.transport.all_gather(self._outgoing, self._incoming, self._counts)
        add_up(self._rows, self._plan.additions)

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

    def __init__(self, plan: ExchangePlan) -> None:
        self._plan, self._transport = plan, plan.transport
        self.total = plan.arena.rows[0]
        # Every rank needs all headers and scalars, but only a slice of each gradient: so these
        # travel separately.
        self._outbox = plan.without_segments()
        self._small = WholeNodes(self._outbox)

    def run(self) -> None:
        """Exchange header and scalars, then slices, bucket by bucket."""
        self._run_small()
        for segment, slices in enumerate(self._plan.slices):
            self._sum_own_slice(segment, slices)
            if self._plan.gather:
                gather_slices(self._transport, self.total.segments[segment], slices)

    def headers(self) -> Tensor:
        """The headers that came with the scalars."""
        return self._small.headers()

    def _run_small(self) -> None:
        self._outbox.arena.copy_small(self._plan.arena)
        self._small.run()
        self.total.scalars.copy_(self._small.total.scalars)

    def _sum_own_slice(self, segment: int, slices: Sequence[Range]) -> None:
        plan, rank, size = self._plan, self._transport.rank, self._transport.size
        rows = [row.segments[segment] for row in plan.arena.rows]
        width = rows[0].itemsize * len(plan.additions)
        for parts in buckets(slices, plan.bucket_bytes, width):
            own = parts[rank]
            nodes = receive_nodes(
                self._transport,
                rows[: plan.num_nodes[rank]],
                plan.num_nodes,
                sent=[len(p) for p in parts],
                starts=[p.first for p in parts],
                received=[len(own)] * size,
                senders=range(size),
                like=rows[0],
            )
            # Safe in place: the nodes are copies, and no later bucket sends these elements again.
            if len(own):
                rows[0][own.slice] = add_up(nodes, plan.additions)


def receive_nodes(
    transport: Transport,
    own: Sequence[Tensor],
    num_nodes: Sequence[int],
    *,
    sent: Sequence[int],
    starts: Sequence[int],
    received: Sequence[int],
    senders: Sequence[int],
    like: Tensor,
    move: Callable[[Tensor, list[int], Sequence[int], Tensor, list[int]], object] | None = None,
) -> list[Tensor]:
    """This rank's elements of the nodes of all senders, in canonical order; a collective.

    Args:
        transport: transport between the ranks.
        own: nodes of the sender that this rank belongs to.
        num_nodes: number of nodes of each sender.
        sent: number of elements of a node that each rank gets from here.
        starts: index of the first of them.
        received: number of elements of a node that each rank sends here.
        senders: number of the sender that each rank belongs to: itself, or its host.
        like: a tensor of the dtype of the nodes.
        move: `all_to_all` of the transport, or what begins one.
    """
    move = move or transport.all_to_all
    here = senders[transport.rank]
    length = sum(n for n, sender in zip(received, senders, strict=True) if sender == here)
    by_node: dict[tuple[int, int], Tensor] = {}
    # One node of each sender at a time, for nodes are not adjacent in memory. Who has no j-th node
    # takes part with counts of 0: a collective needs all ranks.
    for j in range(max(num_nodes)):
        sending = [s for s, n in enumerate(num_nodes) if j < n]
        incoming = like.new_empty(length * len(sending))
        is_sending = j < len(own)
        move(
            own[j] if is_sending else like,
            list(sent) if is_sending else [0] * transport.size,
            starts if is_sending else [0] * transport.size,
            incoming,
            [n if s in sending else 0 for n, s in zip(received, senders, strict=True)],
        )
        for sender, part in zip(sending, incoming.view(len(sending), length), strict=True):
            by_node[sender, j] = part
    # By sender, then node: senders have contiguous ranges of leaves, so this is from left to right.
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
    # An all-to-all with a single receiver each: not all transports can send to one rank.
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


def start_gathering_slices(transport: Transport, flat: Tensor, slices: Sequence[Range]) -> Started:
    """Begin to `gather_slices`, where the transport `runs_ahead`."""
    own = slices[transport.rank]
    counts = [len(s) for s in slices]
    return transport.start(
        flat, [len(own)] * transport.size, [own.first] * transport.size, flat, counts
    )
