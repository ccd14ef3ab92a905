"""Exchanging gradients while a rank's last backward pass of a step still computes others.

A gradient is final when the last microbatch of the rank has been added to it. Backward passes end
with the first layers, so the flat gradient is cut into buckets that travel from its end to its
beginning, each as soon as all of it is final (Li et al. 2020, PyTorch Distributed, section 3.2.3).
A bucket is summed as in `Slices`, so the bits are the same.

    begin of bucket k    its nodes travel: every rank gets its part of them
    begin of bucket k+1  the nodes of bucket k are added up, and the finished parts travel

All ranks begin in this order, whenever their gradients are there, for messages between two ranks
are told apart by their order alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from lockstep.comm.mailbox import Started
from lockstep.parallel.exchange import (
    ExchangePlan,
    Slices,
    add_up,
    receive_nodes,
    start_gathering_slices,
)
from lockstep.parallel.fold import BLOCK, Fold, TensorSpecs, split_blocks
from lockstep.parallel.layout import Range


class _Bucket(NamedTuple):
    """Elements of a segment that travel together.

    Attributes:
        segment: number of the segment.
        range: the elements, whole blocks.
        parts: those that each rank adds up.
    """

    segment: int
    range: Range
    parts: list[Range]


class _Travelling(NamedTuple):
    """Nodes of a bucket under way to this rank."""

    bucket: _Bucket
    messages: list[Started]
    nodes: list[Tensor]


class OverlappedSlices(Slices):
    """As `Slices`, but begun in the last backward pass of this rank's microbatches.

    It takes this rank's leaves in the place of its `fold`.

    Attributes:
        waited_s: seconds that backward passes have spent in here; see the function `waited_s`.
    """

    def __init__(self, plan: ExchangePlan, fold: Fold, specs: TensorSpecs) -> None:
        """Cut the gradient into buckets; talks to nobody.

        Args:
            plan: who has which nodes; every rank needs the whole sum.
            fold: sum of this rank's leaves.
            specs: where the tensors of a leaf lie in each segment.
        """
        super().__init__(plan)
        assert plan.gather, "a sharded optimizer owns slices of the whole gradient, not of buckets"
        self._fold = fold
        self.waited_s = 0.0
        self._buckets: list[_Bucket] = []
        self._of_tensor: list[list[int]] = []
        for segment, of_segment in enumerate(specs):
            self._cut(segment, of_segment)
        self._sizes = Counter(bucket for of_tensor in self._of_tensor for bucket in of_tensor)
        self._times_final: Counter[int] = Counter()
        self._whole: set[int] = set()
        self._in_pieces: set[int] = set()
        self._begin_step()

    def _cut(self, segment: int, specs: Sequence[tuple[int, object]]) -> None:
        """Cut a segment into buckets, from its end to its beginning."""
        plan, size = self._plan, self._transport.size
        dtype, numel = plan.layout.segments[segment]
        received = dtype.itemsize * len(plan.additions)
        length = max(plan.bucket_bytes // received // BLOCK, 1) * BLOCK * size
        first_bucket = len(self._buckets)
        for last in range(numel, 0, -length):
            whole = Range(max(0, last - length), last)
            self._buckets.append(_Bucket(segment, whole, split_blocks(whole, size)))
        ends = [*(offset for offset, _ in specs[1:]), numel]
        for (first, _), last in zip(specs, ends, strict=True):
            self._of_tensor.append(
                [
                    number
                    for number, bucket in enumerate(self._buckets[first_bucket:], first_bucket)
                    if len(bucket.range.common(Range(first, last)))
                ]
            )

    def _begin_step(self) -> None:
        self._next = 0
        self._missing = dict(self._sizes)
        self._travelling: _Travelling | None = None
        self._gathering: list[Started] = []

    def add(self, tensors: Sequence[Tensor | None], scalars: Tensor) -> None:
        """Add the next leaf; see `Fold.add`."""
        self._fold.add(tensors, scalars)

    @contextmanager
    def watching(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Let gradients travel as soon as they are final, if a backward pass is the last one.

        Args:
            parameters: in the order of the leaf's tensors.
        """
        if not self._fold.is_last:
            yield
            return
        self._times_final.clear()
        hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._take, index)
            )
            for index, parameter in enumerate(parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        # Activations that are computed again may bring a parameter its gradient in pieces. So only
        # those leave early that have come whole before.
        self._in_pieces |= {n for n, times in self._times_final.items() if times > 1}
        self._whole = {*self._whole, *self._times_final} - self._in_pieces

    def _take(self, index: int, parameter: Tensor) -> None:
        """A gradient is there."""
        self._times_final[index] += 1
        if index not in self._whole:
            return
        started = perf_counter()
        assert parameter.grad is not None
        self._fold.add_early(index, parameter.grad)
        for bucket in self._of_tensor[index]:
            self._missing[bucket] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._begin_next()
        self.waited_s += perf_counter() - started

    def run(self) -> None:
        """Exchange what is left, then header and scalars."""
        while self._next < len(self._buckets):
            self._begin_next()
        self._sum()
        for gather in self._gathering:
            gather.wait()
        self._run_small()
        self._begin_step()

    def _begin_next(self) -> None:
        """Have the nodes of the next bucket travel, and the sum of the one before."""
        # At most three buckets are under way: over MPI, a thread calls the library for each.
        while len(self._gathering) > 1:
            self._gathering.pop(0).wait()
        bucket = self._buckets[self._next]
        self._next += 1
        travelling = self._start(bucket)
        self._sum()
        self._travelling = travelling

    def _start(self, bucket: _Bucket) -> _Travelling:
        plan, transport = self._plan, self._transport
        rank, own = transport.rank, bucket.parts[transport.rank]
        messages: list[Started] = []

        def move(
            node: Tensor,
            sent: list[int],
            starts: Sequence[int],
            incoming: Tensor,
            received: list[int],
        ) -> None:
            first = sum(received[:rank])
            incoming[first : first + received[rank]] = node[own.slice][: received[rank]]
            messages.append(transport.start(node, sent, starts, incoming, received))

        nodes = receive_nodes(
            transport,
            [row.segments[bucket.segment] for row in plan.arena.rows[: plan.num_nodes[rank]]],
            plan.num_nodes,
            sent=[len(part) for part in bucket.parts],
            starts=[part.first for part in bucket.parts],
            received=[len(own)] * transport.size,
            senders=range(transport.size),
            like=self.total.segments[bucket.segment],
            move=move,
        )
        return _Travelling(bucket, messages, nodes)

    def _sum(self) -> None:
        """Add up the nodes that have arrived, and have all ranks get the sum."""
        if self._travelling is None:
            return
        (segment, whole, parts), messages, nodes = self._travelling
        self._travelling = None
        for message in messages:
            message.wait()
        self._plan.at("summing")
        own, total = parts[self._transport.rank], self.total.segments[segment]
        if len(own):
            total[own.slice] = add_up(nodes, self._plan.additions)
        inside = [Range(p.first - whole.first, p.last - whole.first) for p in parts]
        self._gathering.append(start_gathering_slices(self._transport, total[whole.slice], inside))


def waited_s(sums: object) -> float:
    """Seconds that backward passes have spent in an exchange since the last call."""
    if not isinstance(sums, OverlappedSlices):
        return 0.0
    seconds, sums.waited_s = sums.waited_s, 0.0
    return seconds
