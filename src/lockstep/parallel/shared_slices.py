"""Adding up the nodes of ranks that read one another's memory.

What `exchange.Slices` sends, ranks of one host read where it lies:

    all-gather   headers and scalars: all nodes of all ranks are complete
    tree-sum     this rank's slice of every node, into its own first one
    wait         all slices are finished
    copy         the others' finished slices
    wait         no rank reads this one's memory any longer

The additions are those of `exchange.add_up`, so the bits are, too. A rank writes into its own
memory only: one that dies leaves the nodes of others as they were, and what it had half written is
never used, since the others do not get beyond the next wait.

A wait is a collective of the transport, which also orders memory. What a rank has written before it
sends a message, another sees when it has got that: a library orders the bytes of its message in the
same way, by the system's calls or by a release and an acquire (on ARM a barrier; x86 keeps stores
in order by itself). And what a rank has read by then is not what another writes later: it has been
added or copied to memory, and a store comes after the loads that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.shared_memory import SharedMemory, allocate, map_all
from lockstep.comm.transport import Transport
from lockstep.parallel.exchange import ExchangePlan, Moment, Slices
from lockstep.parallel.fold import Arena, ArenaLayout, Segment
from lockstep.parallel.layout import Range

BLOCK_BYTES = 1 << 19
"""Bytes of each node that are added at a time, so that sums in between stay in a core's cache.

Measured with four nodes of 20 MB: half the time of one block, and more for less than 256 KiB.
"""


class Addition(NamedTuple):
    """One addition, of operands by number: the nodes, then scratch memory, then the sum."""

    left: int
    right: int
    to: int


def additions(plan: Sequence[int]) -> tuple[list[Addition], int]:
    """What `exchange.add_up` does, without overwriting nodes.

    Args:
        plan: for each node, the number of additions that follow it.

    Returns:
        The additions, of which the last one gives the sum (none for a single node), and the number
        of scratch operands.
    """
    num_nodes = len(plan)
    made: list[Addition] = []
    stack: list[int] = []
    free: list[int] = []
    num_scratch = 0
    for node, count in enumerate(plan):
        stack.append(node)
        for _ in range(count):
            right, left = stack.pop(), stack.pop()
            held = [operand for operand in (left, right) if operand >= num_nodes]
            if not held and not free:
                free.append(num_nodes + num_scratch)
                num_scratch += 1
            to = held[0] if held else free.pop()
            free += held[1:]
            made.append(Addition(left, right, to))
            stack.append(to)
    if made:
        made[-1] = made[-1]._replace(to=num_nodes + num_scratch)
    return made, num_scratch


class BlockSum:
    """Adds up nodes where they lie, block by block, without overwriting them."""

    def __init__(self, plan: Sequence[int], at: Callable[[Moment], None]) -> None:
        """Prepare.

        Args:
            plan: for each node, the number of additions that follow it.
            at: function that is called after each block.
        """
        self._additions, num_scratch = additions(plan)
        self._scratch = torch.empty((num_scratch, BLOCK_BYTES), dtype=torch.uint8)
        self._at = at

    def into(self, total: Tensor, nodes: Sequence[Tensor]) -> None:
        """Add up the nodes into `total`, which may be one of them."""
        scratch = self._scratch.view(total.dtype)
        # What needs no memory in between may come at once.
        length = BLOCK_BYTES // total.itemsize if len(scratch) else max(len(total), 1)
        for start in range(0, len(total), length):
            end = min(start + length, len(total))
            # The sum may lie where a node of this rank is: so the last addition alone writes there.
            operands = [
                *(node[start:end] for node in nodes),
                *(row[: end - start] for row in scratch),
                total[start:end],
            ]
            for left, right, to in self._additions:
                torch.add(operands[left], operands[right], out=operands[to])
            if not self._additions:
                operands[-1].copy_(operands[0])
            self._at("summing")


class Neighbours:
    """The arenas of ranks that read one another's memory.

    Attributes:
        nodes: the nodes of all of them, from left to right.
        first_rows: the first row of each, in which its part of the sum will be.
    """

    def __init__(
        self,
        transport: Transport,
        layout: ArenaLayout,
        memories: Sequence[Tensor],
        num_nodes: Sequence[int],
    ) -> None:
        """Use memory that all ranks have mapped.

        Args:
            transport: transport between the ranks.
            layout: layout of every rank's arena.
            memories: memory of each rank.
            num_nodes: number of nodes of each rank.
        """
        pairs = list(zip(memories, num_nodes, strict=True))
        # A spare has a first row too, for its slice of the sum.
        arenas = [Arena(layout, memory, max(1, num)) for memory, num in pairs]
        self.first_rows = [arena.rows[0] for arena in arenas]
        # Ranks have contiguous ranges of leaves.
        self.nodes = [
            row for arena, num in zip(arenas, num_nodes, strict=True) for row in arena.rows[:num]
        ]
        self._transport = transport
        self._arrived = torch.zeros(transport.size, dtype=torch.uint8)

    def wait(self) -> None:
        """Return when all ranks have called this."""
        # Of one byte each, since an all-gather of nothing waits for nobody. A barrier would be that
        # of the supervisor in an elastic group, which takes longer.
        rank = self._transport.rank
        own = self._arrived[rank : rank + 1]
        self._transport.all_gather(own, self._arrived, [1] * self._transport.size)


def shared_bytes(
    segments: Sequence[Segment],
    owned: Sequence[int],
    num_nodes: Sequence[int],
    rank: int,
    gather: bool,
) -> tuple[int, int]:
    """The bytes that others read of a rank, and it of others: as many as `Slices` sends.

    Args:
        segments: segments of an arena.
        owned: elements of each of them that this rank adds up.
        num_nodes: number of nodes of each rank.
        rank: this rank.
        gather: whether the others get its part of the sum, and it theirs.
    """
    num_own, others = num_nodes[rank], len(num_nodes) - 1
    sent = received = 0
    for (dtype, numel), count in zip(segments, owned, strict=True):
        own, rest = count * dtype.itemsize, (numel - count) * dtype.itemsize
        sent += num_own * rest + gather * others * own
        received += (sum(num_nodes) - num_own) * own + gather * rest
    return sent, received


class SharedSlices(Slices):
    """`Slices` of ranks that read one another's memory; where one of them cannot, `Slices`.

    Attributes:
        total: as for `Slices`.
        reason: why ranks exchange messages: empty where they need not, None before the first run.
    """

    def __init__(self, plan: ExchangePlan, memory: SharedMemory | str) -> None:
        """Prepare as `Slices`; talks to nobody, for ranks may lay out memory at other times.

        Args:
            plan: what is exchanged; headers have at least one value.
            memory: memory of the plan's arena, or why it cannot be shared.
        """
        super().__init__(plan)
        assert plan.layout.num_header, "ranks wait for one another's headers"
        self.reason: str | None = None
        self._memory = memory
        self._sum = BlockSum(plan.additions, plan.at)
        rank = plan.transport.rank
        owned = [len(slices[rank]) for slices in plan.slices]
        self._moved = shared_bytes(plan.layout.segments, owned, plan.num_nodes, rank, plan.gather)

    def run(self) -> None:
        """Exchange headers and scalars, then add up and copy slices where they lie."""
        plan = self._plan
        if self.reason is None:
            found = map_all(self._transport, self._memory)
            self.reason = found if isinstance(found, str) else ""
            if not isinstance(found, str):
                self._ranks = Neighbours(self._transport, plan.layout, found, plan.num_nodes)
        if self.reason:
            super().run()
            return
        self._run_small()
        for segment in range(len(plan.slices)):
            self._add_up(segment)
        # Nobody may copy a slice that its owner is still adding up,
        self._ranks.wait()
        if plan.gather:
            for segment, slices in enumerate(plan.slices):
                self._copy(segment, slices)
            plan.at("copying")
            # nor step parameters in memory that others are still copying.
            self._ranks.wait()
        self._transport.traffic.add_shared(*self._moved)

    def _add_up(self, segment: int) -> None:
        """Add up this rank's slice of every node into its own first row."""
        own = self._plan.slices[segment][self._transport.rank].slice
        nodes = [row.segments[segment][own] for row in self._ranks.nodes]
        self._sum.into(self.total.segments[segment][own], nodes)

    def _copy(self, segment: int, slices: Sequence[Range]) -> None:
        """Take the slices that others have finished."""
        total = self.total.segments[segment]
        for rank, (first, last) in enumerate(slices):
            if rank != self._transport.rank:
                total[first:last] = self._ranks.first_rows[rank].segments[segment][first:last]


def shared_arena(
    layout: ArenaLayout, num_rows: int, is_one_host: bool
) -> tuple[Arena, SharedMemory | str]:
    """An arena in memory that other ranks can map, or in other memory and why that is so.

    Args:
        layout: layout of the arena.
        num_rows: number of its rows.
        is_one_host: whether all ranks seem to be on one host. Memory that is shared is in small
            pages on most systems, and messages from it take longer (measured: 1.6 times, 20 MB).
    """
    memory = allocate(layout.num_bytes(num_rows)) if is_one_host else "there are several hosts"
    if isinstance(memory, SharedMemory):
        return Arena(layout, memory.tensor, num_rows), memory
    _, [arena] = layout.allocate([num_rows], torch.device("cpu"))
    return arena, memory
