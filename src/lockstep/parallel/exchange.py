"""Adding up the nodes of all ranks, in canonical order: whole nodes, or slices of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeVar

import torch
from torch import Tensor

from lockstep.comm.ahead import Started
from lockstep.comm.transport import Transport
from lockstep.parallel.fold import (
    Arena,
    ArenaLayout,
    Row,
    Segment,
    TensorSpecs,
    aligned_memory,
    buckets,
)
from lockstep.parallel.layout import Node, Range, levels, merges

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


FEW_NODES = 64
"""So many are added up one after another in less time than level by level."""


class LevelSum:
    """Adds up many rows of an arena's layout: all additions of a level of the tree at once.

    They are those of `add_up`, operand by operand. One after another they would take microseconds
    each, on every rank.

    Attributes:
        total: their sum.
    """

    def __init__(
        self, layout: ArenaLayout, memory: Tensor, starts: Sequence[int], plan: Sequence[int]
    ) -> None:
        """Prepare.

        Args:
            layout: layout of the rows.
            memory: memory that they are in, uint8.
            starts: where each begins, in bytes.
            plan: for each of them, the number of additions that follow it.
        """
        _, [arena] = layout.allocate([1], memory.device)
        self.total = arena.rows[0]
        self._levels = levels_on(memory.device, plan)
        rows = torch.tensor(starts, device=memory.device)[:, None]
        self._parts = []
        for offset, part in layout.parts(self.total):
            if not len(part):
                continue  # such as no scalars
            places = torch.arange(len(part), device=memory.device)
            first = (rows + offset) // part.itemsize
            self._parts.append((memory.view(part.dtype), (first + places).view(-1), part))

    def run(self) -> None:
        """Fill `total`."""
        for words, index, total in self._parts:
            rows = words.index_select(0, index).view(-1, len(total))
            total.copy_(sum_by_level(rows, self._levels))


Levels = Sequence[tuple[Tensor, Tensor]]
"""For each level of a tree, the places of left and of right operands."""


def levels_on(device: torch.device, plan: Sequence[int]) -> Levels:
    """`layout.levels` of a plan, as indices of tensors on a device."""
    return [
        (torch.tensor(left, device=device), torch.tensor(right, device=device))
        for left, right in (zip(*pairs, strict=True) for pairs in levels(plan))
    ]


def sum_by_level(rows: Tensor, levels: Levels) -> Tensor:
    """The sum of nodes [nodes, n], which are overwritten: [n]."""
    for left, right in levels:
        rows[left] = rows[left].add_(rows[right])
    return rows[0]


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
        self._counts = [layout.num_bytes(n) for n in plan.num_nodes]
        self._by_level: LevelSum | None = None
        if len(plan.additions) > FEW_NODES:
            self._incoming = aligned_memory(sum(self._counts), plan.device)
            firsts = list(accumulate(self._counts[:-1], initial=0))
            starts = [
                first + layout.num_bytes(node)
                for first, num in zip(firsts, plan.num_nodes, strict=True)
                for node in range(num)
            ]
            self._by_level = LevelSum(layout, self._incoming, starts, plan.additions)
            self.total = self._by_level.total
            words = torch.tensor(firsts, device=plan.device)[:, None] // 8
            self._words = words + torch.arange(layout.num_header, device=plan.device)
        else:
            self._incoming, self._arenas = layout.allocate(plan.num_nodes, plan.device)
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
        if self._by_level is not None:
            self._by_level.run()
        else:
            add_up(self._rows, self._plan.additions)

    def headers(self) -> Tensor:
        """The headers that came with the nodes."""
        if self._headers is not None:
            return self._headers
        if self._by_level is not None:
            return self._incoming.view(torch.float64)[self._words]
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
            [n if j < num_nodes[s] else 0 for n, s in zip(received, senders, strict=True)],
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
