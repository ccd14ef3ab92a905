"""Ordered reduction: the sum over all microbatches along the canonical tree, on any transport.

Small gradients travel whole: one all-gather of every node, and each rank adds them up. Large ones
are cut into slices:

    all-to-all   every rank gets its slice of every node          P(W-1)/W
    tree-sum     on the slice, in canonical order                 local
    all-gather   the finished slices                              P(W-1)/W

which are the bytes of a ring all-reduce. Between the last two a sharded optimizer can step its
slice; then parameters are gathered instead. Ranks of one host need not send any of these bytes:
they read one another's memory (`shared_slices`). Where ranks share several hosts, what those of a
host can add up among themselves need not travel (`hosts/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lockstep.comm.shared_memory import SharedMemory
from lockstep.comm.transport import Transport
from lockstep.parallel.exchange import (
    Alone,
    Exchange,
    ExchangePlan,
    Leaves,
    Moment,
    Slices,
    WholeNodes,
    gather_slices,
)
from lockstep.parallel.fold import ArenaLayout, Fold, Row, rows_needed, slice_up
from lockstep.parallel.hosts import Hosts, Tried
from lockstep.parallel.hosts.exchange import NodesByHost, SlicesByHost, gather_slices_by_host
from lockstep.parallel.layout import Assigned, merges
from lockstep.parallel.layout import leaves as leaves_of
from lockstep.parallel.overlapped import OverlappedSlices
from lockstep.parallel.shared_slices import SharedSlices, shared_arena

SMALL_BYTES = 1 << 20
"""Up to this many bytes of all ranks' nodes, saved latency outweighs the doubled additions."""


HIERARCHICAL, MESSAGES, SHARED = "hierarchical", "messages", "shared memory"

_EARLY = "gradients travel while the last backward pass computes others"


class Way(NamedTuple):
    """How ranks exchange gradients.

    Attributes:
        name: `shared memory`, `messages` or `hierarchical`.
        reason: why in messages, or why host by host.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Ways:
    """The ways in which ranks may exchange gradients besides messages between all of them.

    Attributes:
        shares_memory: whether ranks read slices in one another's memory if they can; the same on
            all ranks.
        is_one_host: whether, as far as this rank knows, it may be that they can.
        hosts: hosts of the ranks, or why sums are not made host by host; the same on all ranks, but
            for the transport inside.
        is_measured: whether sums are made host by host only if that is measured to be quicker.
        overlaps: whether gradients may travel during the last backward pass, where the transport
            can do so; the same on all ranks.
    """

    shares_memory: bool = False
    is_one_host: bool = True
    hosts: Hosts | str = ""
    is_measured: bool = True
    overlaps: bool = False


class OrderedReduction:
    """Sums leaves (microbatches) of gradients and scalars over all ranks.

    For each step: `restart`, `leaf_sums.add` for each of this rank's microbatches, then `reduce`.

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
        leaves: Leaves,
        ranges: Sequence[Assigned],
        *,
        num_header: int,
        bucket_bytes: int,
        gather: bool = True,
        ways: Ways = Ways(),
        at: Callable[[Moment], None] = lambda moment: None,
    ) -> None:
        """Lay out the memory; talks to nobody.

        Args:
            transport: transport between the ranks.
            leaves: what is summed.
            ranges: range of microbatches of each rank, in order, without gaps.
            num_header: number of float64 values in each rank's header.
            bucket_bytes: greatest number of bytes of gradient to receive at a time.
            gather: whether every rank needs the whole sum, or just the slice it owns.
            ways: ways in which they may be exchanged.
            at: function that is called at each moment.
        """
        rank, size = transport.rank, transport.size
        hosts, device, num_microbatches = ways.hosts, leaves.device, leaves.num_microbatches
        self._transport, self._hosts = transport, hosts
        self.slices = slice_up(leaves.segments, size)

        # They depend on the ranges only: made once, they hold until ranks or ranges change.
        nodes = [merges(leaves_of(r), num_microbatches)[1] for r in ranges]
        layout = ArenaLayout(leaves.segments, leaves.num_scalars, num_header)
        num_rows = rows_needed(ranges[rank], num_microbatches)
        # A sharded optimizer (not `gather`) needs its slice only, so it never gets whole nodes.
        is_small = gather and sum(layout.num_bytes(len(n)) for n in nodes) <= SMALL_BYTES
        is_shared = ways.shares_memory and size > 1 and not is_small and device.type == "cpu"
        memory: SharedMemory | str = "no memory is shared"
        if is_shared:
            # Messages from shared memory are slower (`shared_arena`): only where it may serve.
            neighbours = ways.is_one_host or (isinstance(hosts, Hosts) and hosts.inside.size > 1)
            arena, memory = shared_arena(layout, num_rows, neighbours)
        else:
            _, [arena] = layout.allocate([num_rows], device)
        self.header = arena.header
        self.fold = Fold(arena.rows, leaves.specs, ranges[rank], num_microbatches)
        plan = ExchangePlan(
            transport, layout, arena, nodes, num_microbatches, self.slices, bucket_bytes, gather,
            device, at,
        )  # fmt: skip
        self._exchange: Exchange
        if size == 1:
            self._exchange = Alone(arena)
        elif is_small:
            self._exchange = WholeNodes(plan)
        elif ways.overlaps and gather and transport.runs_ahead(bucket_bytes):
            self._exchange = OverlappedSlices(plan, self.fold, leaves.specs)
        elif is_shared and not isinstance(hosts, Hosts):
            self._exchange = SharedSlices(plan, memory)
        else:
            self._exchange = Slices(plan)
        if not isinstance(hosts, Hosts):
            return
        by_host: Exchange
        if is_small:
            by_host = NodesByHost(plan, hosts, self._exchange.total)
        else:
            by_host = SlicesByHost(plan, hosts, memory)
        # Both give the same bits, so which one is taken may depend on a measurement.
        both = {HIERARCHICAL: by_host, MESSAGES: self._exchange}
        self._exchange = Tried(transport, both, by_host.total) if ways.is_measured else by_host

    @property
    def leaf_sums(self) -> Fold | OverlappedSlices:
        """What takes this rank's leaves."""
        return self._exchange if isinstance(self._exchange, OverlappedSlices) else self.fold

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

    @property
    def way(self) -> Way | None:
        """How ranks exchange gradients, once that is known; None where there is no choice."""
        exchange, hosts = self._exchange, self._hosts
        if isinstance(hosts, Hosts):
            where = f"the ranks are on {len(hosts.ranges)} hosts"
            if not isinstance(exchange, Tried):
                return Way(HIERARCHICAL, where)
            if not exchange.chosen:
                return None
            by_host, at_once = (1e3 * exchange.seconds[name] for name in (HIERARCHICAL, MESSAGES))
            took = f"an exchange took {by_host:.3g} ms host by host, {at_once:.3g} ms all at once"
            return Way(exchange.chosen, f"{where}; {took}")
        why = self.why_messages
        if why is None and not hosts:
            return None
        early = _EARLY if isinstance(exchange, OverlappedSlices) else ""
        reasons = "; ".join(filter(None, [why, early, hosts]))
        return Way(SHARED if why == "" else MESSAGES, reasons)

    def gather_slices(self, flat: Tensor, segment: int) -> None:
        """Give every rank the slices the others own, by the way of the sums; a collective.

        Args:
            flat: memory of a segment, [numel], in which the slice this rank owns is right.
            segment: number of the segment.
        """
        way = self.way
        if isinstance(self._hosts, Hosts) and way is not None and way.name == HIERARCHICAL:
            gather_slices_by_host(self._transport, self._hosts, flat, self.slices[segment])
        else:
            gather_slices(self._transport, flat, self.slices[segment])

    def restart(self) -> None:
        """Forget the leaves of a step."""
        self.fold.restart()

    def reduce(self) -> None:
        """Sum over all ranks into `total`."""
        self._exchange.run()

    def headers(self) -> Tensor:
        """Every rank's header as of the last `reduce`, float64 [world size, num_header]."""
        return self._exchange.headers()
