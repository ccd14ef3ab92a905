"""Ordered reduction in rounds: no rank keeps more of a sum than its slice.

In round j the W ranks compute the microbatches jW … jW+W-1. As soon as the gradients of a segment
are there, each rank sends every owner its slice of them, and owners fold the W leaves that arrive
along the canonical tree. So a gradient is whole for as long as it takes to send it, and

    bytes received by a rank in a step    about P for each round
    memory of sums                        P/W for each of log2 M rows

where P are the bytes of the flat gradient and M is the number of microbatches (ZeRO-2: Rajbhandari
et al. 2020, section 5.2; the order of the sum is that of `lockstep.parallel.layout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.mailbox import Started
from lockstep.comm.transport import Transport
from lockstep.parallel.exchange import Leaves
from lockstep.parallel.fold import (
    ArenaLayout,
    Fold,
    LateGradientError,
    Row,
    Segment,
    buckets,
    rows_needed,
    slice_up,
    views,
)
from lockstep.parallel.layout import Range, within

_NOTHING = torch.empty(0, dtype=torch.float64)


class _Bucket(NamedTuple):
    """Elements of a segment that are exchanged at a time."""

    parts: list[Range]
    """Of each rank, those of the slice it owns."""
    fold: Fold
    """Sum of those of this rank."""


class _Travelling(NamedTuple):
    """Leaves of a bucket that other ranks are sending."""

    started: Started
    received: Tensor
    """Memory for them, [leaves, elements]."""
    fold: Fold


class Rounds:
    """Sums leaves of gradients and scalars over all ranks, each of which keeps a slice.

    For each step: `restart`; then, for each round, `take` for each segment whose gradients are
    there already, and `add` for the rest. All ranks call the same methods in the same order, also
    those without a microbatch in a round.

    Attributes:
        transport: transport between the ranks.
        total: after the last round, the sum of the slices that this rank owns.
        slices: for each segment, the range of elements that each rank owns.
    """

    def __init__(
        self,
        transport: Transport,
        leaves: Leaves,
        *,
        num_replicas: int,
        bucket_bytes: int,
        order: Sequence[int] | None = None,
    ) -> None:
        """Lay out the memory.

        Args:
            transport: transport between the ranks.
            leaves: what is summed.
            num_replicas: number of ranks that compute microbatches: the first ones.
            bucket_bytes: greatest number of bytes of gradient to receive at a time.
            order: numbers of the segments in the order in which all ranks take them.
        """
        rank, device, num_microbatches = transport.rank, leaves.device, leaves.num_microbatches
        segments, specs = leaves.segments, leaves.specs
        self.transport, self._device = transport, device
        self._segments, self._specs = list(segments), specs
        self._num_microbatches, self._num_replicas = num_microbatches, num_replicas
        self._order = list(order or range(len(segments)))
        self.slices = slice_up(segments, transport.size)
        every = Range(0, num_microbatches)
        own = [Segment(s.dtype, len(of[rank])) for s, of in zip(segments, self.slices, strict=True)]
        layout = ArenaLayout(own, leaves.num_scalars, 0)
        _, [arena] = layout.allocate([rows_needed(every, num_microbatches)], device)
        self._arena = arena
        # Fresh memory for each segment would cost more time than the sum itself.
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}
        self.total: Row = arena.rows[0]
        rows = [Row([], row.scalars) for row in arena.rows]
        self._scalars = Fold(rows, [], every, num_microbatches)
        self._buckets = [self._cut(s, bucket_bytes) for s in range(len(segments))]
        firsts = accumulate(map(len, specs), initial=0)
        self._travelling: _Travelling | None = None
        self._tensors = [slice(first, last) for first, last in pairwise(firsts)]
        self.restart()

    def _cut(self, segment: int, bucket_bytes: int) -> list[_Bucket]:
        """The buckets of a segment: at least a block of each leaf."""
        slices, rank = self.slices[segment], self.transport.rank
        width = self._segments[segment].dtype.itemsize * self._num_replicas
        every = Range(0, self._num_microbatches)
        made = []
        for parts in buckets(slices, bucket_bytes, width):
            own = within(parts[rank], slices[rank])
            rows = [Row([row.segments[segment][own]], _NOTHING) for row in self._arena.rows]
            size = torch.Size([len(parts[rank])])
            made.append(_Bucket(parts, Fold(rows, [[(0, size)]], every, self._num_microbatches)))
        return made

    def use(self, transport: Transport) -> None:
        """Go on with another transport between the same ranks."""
        self.transport = transport
        # What the other one has left under way may still be written to memory it was given.
        self._scratch.clear()
        self._travelling = None

    def restart(self) -> None:
        """Forget the leaves of a step."""
        self._travelling = None
        self._round = 0
        self._taken: set[int] = set()
        self._scalars.restart()
        for bucket in [bucket for of_segment in self._buckets for bucket in of_segment]:
            bucket.fold.restart()

    def take(self, segment: int, tensors: Sequence[Tensor | None] | None) -> None:
        """Sum the gradients of a segment in this round; a collective.

        They may travel until the next segment is taken, or the round ends.

        Args:
            segment: number of the segment, which was not taken yet.
            tensors: its tensors; None counts as zeros. None for all: there is no microbatch.
        """
        assert segment == self._order[len(self._taken)], "all ranks take segments in one order"
        self._taken.add(segment)
        rank, num_leaves = self.transport.rank, self._num_leaves
        dtype, numel = self._segments[segment]
        runs_ahead = self.transport.runs_ahead(numel * dtype.itemsize)
        self._arrive()  # its memory is used again here
        leaf = self._leaf(segment, tensors)
        for parts, fold in self._buckets[segment]:
            self._arrive()
            length = len(parts[rank])
            received = self._memory("received", leaf.dtype, length * num_leaves)
            # A rank without a microbatch takes part too: a collective needs all ranks.
            sent = [len(p) if rank < num_leaves else 0 for p in parts]
            starts = [p.first for p in parts]
            counts = [length if r < num_leaves else 0 for r in range(self.transport.size)]
            leaves = received.view(num_leaves, length)
            if runs_ahead:
                if rank < num_leaves:
                    leaves[rank] = leaf[parts[rank].slice]
                started = self.transport.start(leaf, sent, starts, received, counts)
                self._travelling = _Travelling(started, leaves, fold)
            else:
                self.transport.all_to_all(leaf, sent, starts, received, counts)
                _add(leaves, fold)

    def _arrive(self) -> None:
        """Wait for what others are sending, and sum it."""
        if self._travelling is not None:
            started, received, fold = self._travelling
            started.wait()
            self._travelling = None
            _add(received, fold)

    def add(self, tensors: Sequence[Tensor | None] | None, scalars: Tensor) -> None:
        """Sum what is left of this round; a collective.

        Args:
            tensors: all tensors of the leaf, of which those of segments that were taken are None;
                None if this rank has no microbatch in this round.
            scalars: sums of the leaf's scalars, float64 [num_scalars]; any if it has none.

        Raises:
            LateGradientError: there is a tensor of a segment that was taken.
        """
        for segment in self._order:
            own = self._tensors[segment]
            theirs = None if tensors is None else tensors[own]
            if segment not in self._taken:
                self.take(segment, theirs)
                continue
            late = [n for n, tensor in enumerate(theirs or []) if tensor is not None]
            if late:
                raise LateGradientError(own.start + late[0])
        self._arrive()
        # Every rank folds the scalars of all leaves: they are few, and all ranks need the sums.
        size, num_leaves = self.transport.size, self._num_leaves
        everyone = scalars.new_empty(len(scalars) * size)
        self.transport.all_gather(scalars, everyone, [len(scalars)] * size)
        for row in everyone.view(size, len(scalars))[:num_leaves]:
            self._scalars.add([], row)
        self._round += 1
        self._taken.clear()

    @property
    def _num_leaves(self) -> int:
        """Number of ranks that have a microbatch in this round."""
        left = self._num_microbatches - self._round * self._num_replicas
        return min(self._num_replicas, left)

    def _leaf(self, segment: int, tensors: Sequence[Tensor | None] | None) -> Tensor:
        """The segment of this rank's leaf; nothing if it has none."""
        dtype, numel = self._segments[segment]
        if tensors is None:
            return torch.empty(0, dtype=dtype, device=self._device)
        leaf = self._memory("leaf", dtype, numel).zero_()
        for view, tensor in zip(views(leaf, self._specs[segment]), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return leaf

    def _memory(self, purpose: str, dtype: torch.dtype, numel: int) -> Tensor:
        """Memory for a purpose, of any content; until it is asked for again for the same one."""
        known = self._scratch.get((purpose, dtype))
        if known is None or known.numel() < numel:
            known = torch.empty(numel, dtype=dtype, device=self._device)
            self._scratch[purpose, dtype] = known
        return known[:numel]


def _add(leaves: Tensor, fold: Fold) -> None:
    # By rank: in a round that is the order of microbatches, and so that of the tree.
    for theirs in leaves:
        fold.add([theirs], _NOTHING)
