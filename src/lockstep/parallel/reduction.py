"""Ordered reduction: the sum over all microbatches along the canonical tree, on any transport.

Small gradients travel whole: one all-gather of every node, and each rank adds them up. Large ones
are cut into slices:

    all-to-all   every rank gets its slice of every node          P(W-1)/W
    tree-sum     on the slice, in canonical order                 local
    all-gather   the finished slices                              P(W-1)/W

which are the bytes of a ring all-reduce. Between the last two a sharded optimizer can step its
slice; then parameters are gathered instead. Ranks of one host need not send any of these bytes:
they read one another's memory (`shared_slices`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.comm.shared_memory import SharedMemory
from lockstep.comm.transport import Transport
from lockstep.parallel.arena import ArenaLayout, Row, Segment, slice_up
from lockstep.parallel.exchange import (
    Alone,
    Exchange,
    Slices,
    WholeNodes,
)
from lockstep.parallel.fold import Fold, rows_needed
from lockstep.parallel.layout import Dealt, leaves, merges
from lockstep.parallel.shared_slices import Moment, SharedSlices, shared_arena

SMALL_BYTES = 1 << 20
"""Up to this many bytes of all ranks' nodes, saved latency outweighs the doubled additions."""


def _nothing(moment: Moment) -> None:
    pass


class OrderedReduction:
    """Sums leaves (microbatches) of gradients and scalars over all ranks.

    For each step: `restart`, then `fold.add` for each of this rank's microbatches, then `reduce`.

    Attributes:
        fold: sum of this rank's leaves, to which they are added.
        header: values of this rank that every rank gets to see, float64 [num_header].
        total: after `reduce`, the sum over all microbatches (just the slices this rank owns, if not
            `gather`). The same tensors in every step.
        slices: for each segment, the range of elements each rank owns.
    """

    def __init__(
        self,
        transport: Transport,
        segments: Sequence[Segment],
        places: Sequence[Sequence[tuple[int, torch.Size]]],
        *,
        num_scalars: int,
        num_header: int,
        num_microbatches: int,
        ranges: Sequence[Dealt],
        device: torch.device,
        bucket_bytes: int,
        gather: bool = True,
        shares_memory: bool = False,
        is_one_host: bool = True,
        at: Callable[[Moment], None] = _nothing,
    ) -> None:
        """Lay out the memory; talks to nobody.

        Args:
            transport: transport between the ranks.
            segments: dtype and number of elements of each segment of the flat gradient, one for
                each dtype.
            places: for each segment, the (offset, shape) of each tensor of a leaf; offsets in
                elements.
            num_scalars: number of float64 sums beside the gradient.
            num_header: number of float64 values in each rank's header.
            num_microbatches: number of leaves of the tree.
            ranges: range of microbatches of each rank, in order, without gaps.
            device: device on which the gradients lie.
            bucket_bytes: greatest number of bytes of gradient to receive at a time.
            gather: whether every rank needs the whole sum, or just the slice it owns.
            shares_memory: whether ranks read slices in one another's memory if they can; the same
                on all ranks.
            is_one_host: whether, as far as this rank knows, it may be that they can.
            at: function that is called at each moment of that.
        """
        rank, size = transport.rank, transport.size
        self._transport = transport
        self.slices = slice_up(segments, size)

        # The plan depends on the ranges only: made once, it holds until ranks or ranges change.
        nodes = [merges(leaves(r), num_microbatches)[1] for r in ranges]
        num_nodes = [len(n) for n in nodes]
        plan, left = merges([node for part in nodes for node in part], num_microbatches)
        assert len(left) == 1, "the ranges of all ranks must make up the whole tree"

        layout = ArenaLayout(segments, num_scalars, num_header)
        num_rows = rows_needed(ranges[rank], num_microbatches)
        # A sharded optimizer (not `gather`) needs its slice only, so it never gets whole nodes.
        is_small = gather and sum(layout.num_bytes(n) for n in num_nodes) <= SMALL_BYTES
        is_shared = shares_memory and size > 1 and not is_small and device.type == "cpu"
        memory: SharedMemory | str = ""
        if is_shared:
            arena, memory = shared_arena(layout, num_rows, is_one_host)
        else:
            _, [arena] = layout.allocate([num_rows], device)
        self.header = arena.header
        self.fold = Fold(arena.rows, places, ranges[rank], num_microbatches)
        self._exchange: Exchange
        if size == 1:
            self._exchange = Alone(arena)
        elif is_small:
            self._exchange = WholeNodes(transport, layout, arena, num_nodes, plan, device)
        else:
            cut = (transport, layout, arena, num_nodes, plan, self.slices, bucket_bytes, gather)
            self._exchange = SharedSlices(*cut, memory, at) if is_shared else Slices(*cut, device)

    @property
    def total(self) -> Row:
        """The sum over all microbatches."""
        return self._exchange.total

    @property
    def why_messages(self) -> str | None:
        """Why ranks exchange messages, once that is known; empty if memory that they share.

        None where memory is not to be shared, and where there is one rank.
        """
        if isinstance(self._exchange, SharedSlices):
            return self._exchange.reason
        return self._transport.why_messages

    def restart(self) -> None:
        """Forget the leaves of a step."""
        self.fold.restart()

    def reduce(self) -> None:
        """Sum over all ranks into `total`."""
        self._exchange.run()

    def headers(self) -> Tensor:
        """Every rank's header as of the last `reduce`, float64 [world size, num_header]."""
        return self._exchange.headers()
