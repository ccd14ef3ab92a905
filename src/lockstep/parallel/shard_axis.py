"""The axis of features: which shards a rank computes, and sums over all shards.

A shard is a fixed part of a layer's features, as a microbatch is of a batch. Which rank computes a
shard changes nothing: sums over shards go along the canonical tree of `layout`, whose leaves are
the shards 0..num_shards-1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.transport import LocalTransport, Transport
from lockstep.errors import TaskError
from lockstep.parallel.layout import Range, leaves, merges, split


class ShardAxis:
    """The ranks that compute one microbatch together, each some of the shards.

    Attributes:
        num_shards: number of shards of each layer.
        ranges: range of shards of each rank.
        own: range of shards of this rank.
        closed: why there must be no sums now, as not all ranks take part; empty if they do.
    """

    closed = ""

    def __init__(self, num_shards: int, transport: Transport | None = None) -> None:
        """Assign the shards to ranks.

        Args:
            num_shards: number of shards of each layer, at least the number of ranks.
            transport: transport between the ranks; without one, this process computes all shards.
        """
        self._transport = transport or LocalTransport()
        self.num_shards = num_shards
        self.ranges = split(num_shards, self._transport.size)
        self.own: Range = self.ranges[self._transport.rank]
        self._local, _ = merges(leaves(self.own), num_shards)
        nodes = [merges(leaves(r), num_shards)[1] for r in self.ranges]
        self._counts = [len(of_rank) for of_rank in nodes]
        self._plan, _ = merges([node for of_rank in nodes for node in of_rank], num_shards)

    @property
    def is_local(self) -> bool:
        """Whether this process computes all shards."""
        return self._transport.size == 1

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all shards, the same bits on every rank; a collective.

        Args:
            parts: tensors of this rank's shards, of one shape and dtype on all ranks.

        Raises:
            GroupBroken: a rank was lost.
            TaskError: the axis is closed.
        """
        self._check_open()
        nodes = _folded(parts, self._local)
        if not self.is_local:
            nodes = _folded(self._exchanged(nodes, self._counts), self._plan)
        return nodes[0]

    def maximum(self, parts: Sequence[Tensor]) -> Tensor:
        """The element-wise maximum over all shards, the same on every rank; a collective.

        Args:
            parts: tensors of this rank's shards, of one shape and dtype on all ranks.
        """
        self._check_open()
        greatest = functools.reduce(torch.maximum, parts)
        if self.is_local:
            return greatest
        return functools.reduce(torch.maximum, self._exchanged([greatest], [1] * len(self.ranges)))

    def all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of all shards, in order; a collective.

        Args:
            parts: tensors of this rank's shards, of one shape and dtype on all ranks.
        """
        self._check_open()
        if self.is_local:
            return list(parts)
        return self._exchanged(parts, [len(r) for r in self.ranges])

    def _check_open(self) -> None:
        if self.closed:
            raise TaskError(self.closed)

    def _exchanged(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Every rank's tensors, all of one shape, of which each rank has `counts[rank]`."""
        first = tensors[0]
        size = first.numel()
        out = first.new_empty((sum(counts), size))
        start = sum(counts[: self._transport.rank])
        for row, tensor in enumerate(tensors, start):
            out[row] = tensor.reshape(-1)
        own = out[start : start + len(tensors)]
        flat = out.view(-1)
        if size:
            # As bytes: transports move them, whatever the dtype.
            raw = flat.view(torch.uint8)
            width = size * first.element_size()
            self._transport.all_gather(
                own.reshape(-1).view(torch.uint8), raw, [count * width for count in counts]
            )
        return [row.view(first.shape) for row in out]


def _folded(parts: Sequence[Tensor], plan: Sequence[int]) -> list[Tensor]:
    """What is left of tensors after the additions of `layout.merges`; none is overwritten."""
    stack: list[Tensor] = []
    is_new: list[bool] = []
    for part, count in zip(parts, plan, strict=True):
        stack.append(part)
        is_new.append(False)
        for _ in range(count):
            right = stack.pop()
            is_new.pop()
            # Only sums that were made here may be added to in place.
            stack[-1] = stack[-1].add_(right) if is_new[-1] else stack[-1] + right
            is_new[-1] = True
    return stack
