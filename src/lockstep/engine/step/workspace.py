"""The microbatches and slices of a rank in a group of ranks, and the memory for both."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.ahead import Started
from lockstep.comm.transport import LocalTransport, Transport
from lockstep.engine.faults import Moment
from lockstep.engine.flat_tensors import FlatTensors, Slice
from lockstep.nn.row import row_of
from lockstep.parallel.compression.reduction import (
    CompressedReduction,
    LeafStates,
    LeafSums,
    Summed,
)
from lockstep.parallel.compression.sums import compressed_reduction
from lockstep.parallel.exchange import Leaves, copy_to_next, gather_slices, start_gathering_slices
from lockstep.parallel.layout import Assigned, Range, stepped_slices
from lockstep.parallel.norm import (
    NormPart,
    ScatteredNorms,
    block_norms,
    combined,
    few,
    global_norm,
    in_blocks,
    norm_of_mean,
    sharded_block_norms,
)
from lockstep.parallel.reduction import OrderedReduction, Way, Ways
from lockstep.parallel.rounds import Rounds

if TYPE_CHECKING:
    from lockstep.engine.passes.passes import StepParts


class Workspace:
    """Memory and plan of a step; rebuilt when the group or the assignment of microbatches changes.

    Attributes:
        microbatches: microbatches that this rank computes; those of rounds that it has none in are
            numbers too high.
        passes: the forward and backward passes of these, in order.
        reduction: ordered sum over all ranks.
        leaves: what takes those of this rank: in rounds, they are summed over all ranks at once.
        stepped: for each segment, the slices that this rank steps: its own one first.
        every_slice: those of all segments.
        slices: range of elements that each rank owns, for each segment.
        buffer_sums: summed changes of buffers, one flat tensor for each segment.
    """

    def __init__(
        self,
        parts: StepParts,
        flat: FlatTensors,
        ranges: Sequence[Assigned],
        *,
        num_scalars: int,
        num_header: int,
        with_buddy: bool,
        leaf_states: LeafStates | None = None,
    ) -> None:
        """Allocate.

        Args:
            parts: what the step works on.
            flat: trainable parameters in flat memory, all of it.
            ranges: microbatches of each rank.
            num_scalars: number of float64 sums besides the gradient.
            num_header: number of float64 values in a header.
            with_buddy: whether each rank steps the slice of the rank before it too.
            leaf_states: what compression keeps from step to step; None if gradients travel as they
                are.
        """
        runtime, config, state, placement = (
            parts.runtime, parts.config, parts.state, parts.placement,
        )  # fmt: skip
        self._transport = placement.storage
        self._placement = placement
        self._flat = flat
        self._sharded = config.shards_optimizer
        self._in_slices = config.shards_parameters
        rank = self._transport.rank
        in_column = placement.of_column(ranges)
        self.microbatches = placement.mesh.rounds(in_column[rank])
        self.passes = placement.passes(self.microbatches)
        leaves = Leaves(
            [*flat.segments, *state.flat.segments],
            [*flat.specs, *state.flat.specs],
            num_scalars,
            config.num_microbatches,
            runtime.device,
        )

        row = row_of(parts.model)
        # Gradients of tied parameters come together after a backward pass only.
        has_ties = row is not None and bool(row.ties)

        def at(moment: Moment) -> None:
            runtime.at(moment, placement.step)

        self.reduction: OrderedReduction | Rounds | CompressedReduction
        if config.shards_gradients:
            self.reduction = Rounds(
                self._transport,
                leaves,
                num_replicas=len(placement.mesh.replicas),
                bucket_bytes=config.bucket_bytes,
                order=_last_block_first(flat, len(leaves.segments), placement.late_blocks),
            )
        elif leaf_states is not None:
            summed = Summed(
                self._transport,
                replace(leaves, segments=flat.segments, specs=flat.specs, num_scalars=0),
                replace(leaves, segments=state.flat.segments, specs=state.flat.specs),
                in_column,
                num_header=num_header,
                bucket_bytes=config.bucket_bytes,
                feeds_back=config.compression.error_feedback,
                states=leaf_states,
                at=at,
            )
            kind = config.compression
            self.reduction = compressed_reduction(summed, kind.name, kind.ratio, kind.rank)
        else:
            self.reduction = OrderedReduction(
                self._transport,
                leaves,
                in_column,
                num_header=num_header,
                bucket_bytes=config.bucket_bytes,
                gather=not self._sharded,
                ways=Ways(
                    shares_memory=config.exchange != "messages",
                    is_one_host=runtime.is_one_host,
                    hosts=placement.hosts,
                    is_measured=config.exchange == "auto",
                    overlaps=placement.are_apart and not placement.are_coupled and not has_ties,
                ),
                at=at,
            )
        self.leaves: LeafSums = (
            self.reduction if isinstance(self.reduction, Rounds) else self.reduction.leaf_sums
        )
        num_segments = len(flat.segments)
        self.slices = self.reduction.slices[:num_segments]
        self._buffer_slices = self.reduction.slices[num_segments:]
        self._buffer_entries = [
            [(e, placement.unit_of(e.name)) for e in state.flat.entries if e.segment == s]
            for s in range(len(state.flat.segments))
        ]
        self.buffer_sums = self.reduction.total.segments[num_segments:]
        if isinstance(self.reduction, Rounds):
            self.buffer_sums = [torch.zeros_like(f) for f in state.flat.flats]
        self.stepped = [self._stepped(s, rank, with_buddy) for s in range(num_segments)]
        self._fetched: list[float] | None = None
        self._ahead: float | None = None
        self._blocks = [in_blocks(of_segment[0].gradient) for of_segment in self.stepped]
        self._with_buddy = with_buddy and self._transport.size > 1
        self.every_slice = [own for of_segment in self.stepped for own in of_segment]
        # Parameters in slices have memory of their own, which no gather overwrites.
        keeps_aside = with_buddy and not self._in_slices
        self._spares = [torch.empty_like(own.parameters) for own in self.every_slice if keeps_aside]
        self.take_slices()
        norm_parts = [NormPart(flat.segments[p.segment].dtype, *p) for p in flat.parts]
        holders = {part.unit: placement.lowest_rank(part.unit) for part in flat.parts}
        self._norms = ScatteredNorms(norm_parts, holders, placement.world.rank)

    def _stepped(self, segment: int, rank: int, with_buddy: bool) -> list[Slice]:
        """The slices of a segment that this rank steps, and the memory of each."""
        flat, total = self._flat.flats[segment], self.reduction.total.segments[segment]
        ranges = [Range(0, len(flat))]
        if self._sharded:
            ranges = stepped_slices(self.slices[segment], rank, with_buddy)
        made = []
        for number, (first, last) in enumerate(ranges):
            parameters = flat.new_empty(last - first) if self._in_slices else flat[first:last]
            # Rounds sum into memory of this rank's slice; other reductions into whole segments.
            gradient = total
            if not isinstance(self.reduction, Rounds):
                gradient = total[first:last]
            elif number > 0:
                gradient = torch.zeros_like(parameters)
            made.append(Slice(Range(first, last), parameters, gradient))
        return made

    def use(self, transport: Transport) -> None:
        """Go on with another transport between the same ranks."""
        self._transport = transport
        if isinstance(self.reduction, Rounds):
            self.reduction.use(transport)

    @property
    def way(self) -> Way | None:
        """See `OrderedReduction.way`; None in rounds, whose sums are sent."""
        return None if isinstance(self.reduction, Rounds) else self.reduction.way

    def take_slices(self) -> None:
        """With parameters in slices, keep those of the parameters as they are in flat memory."""
        if self._in_slices:
            is_drawn = self._flat.draws is None
            for segment, of_segment in enumerate(self.stepped):
                if not is_drawn:
                    self._flat.draw(segment)
                for (first, last), parameters, _ in of_segment:
                    parameters.copy_(self._flat.flats[segment][first:last])
                if not is_drawn:
                    self._flat.close(segment)
            self._flat.draws = None

    def open(self, segment: int) -> None:
        """Give a segment memory, in which what this rank keeps of it is right."""
        self._flat.open(segment)
        for (first, last), parameters, _ in self.stepped[segment]:
            self._flat.flats[segment][first:last] = parameters

    def gather(self, segment: int) -> None:
        """Have a segment of parameters in slices whole; a collective of the column."""
        self.open(segment)
        gather_slices(self._transport, self._flat.flats[segment], self.slices[segment])

    def start_gathering(self, segment: int) -> Started:
        """Begin to `gather`, where the transport `runs_ahead`."""
        self.open(segment)
        flat, slices = self._flat.flats[segment], self.slices[segment]
        return start_gathering_slices(self._transport, flat, slices)

    @property
    def gradient_memory(self) -> list[Tensor]:
        """Tensors in all memory that sums of gradients have."""
        header = () if isinstance(self.reduction, Rounds) else (self.reduction.header,)
        return [*(own.gradient for own in self.every_slice), *header]

    def runs_ahead(self, num_bytes: int) -> bool:
        """Whether to begin early to gather so many bytes."""
        return self._transport.runs_ahead(num_bytes)

    def scalars(self) -> list[float]:
        """The sums of loss and metrics over the global batch."""
        if self._fetched is None:
            return list(self.reduction.total.scalars.tolist())
        fetched, self._fetched = self._fetched, None
        return fetched

    def fetch(self, also: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Fetch values from a device, and with them what `scalars` and `norm` will say.

        Each message would be a wait.

        Args:
            also: these values, float64.
        """
        scalars, norms = self.reduction.total.scalars, list[Tensor]()
        if not (self._sharded or self._placement.is_split):
            norms = [few(block_norms(blocks)).double() for blocks in self._blocks]
        values = torch.cat([also.flatten(), scalars, *norms]).numpy(force=True)
        num, rest = also.numel(), also.numel() + len(scalars)
        self._fetched = values[num:rest].tolist()
        self._ahead = math.hypot(*values[rest:].tolist()) if norms else None
        return values[:num].reshape(also.shape)

    def own_norm(self) -> float:
        """The norm of the mean gradient of this rank's microbatches; 0 if they are not kept."""
        if not isinstance(self.reduction, OrderedReduction) or self._transport.size == 1:
            return 0.0
        return norm_of_mean(self.reduction.fold.summed, len(self.slices))

    def norm(self) -> float:
        """The norm of the summed gradient; a collective if sharded or split."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead
        # Every rank has all blocks then, and computes the same number without a message.
        if not (self._sharded or self._placement.is_split):
            return global_norm(self._blocks)
        norms = [block_norms(blocks) for blocks in self._blocks]
        if self._sharded:
            own = [of_segment[0].gradient for of_segment in self.stepped]
            norms = sharded_block_norms(self._transport, own, self.slices)
        world = self._placement.world if self._placement.is_split else LocalTransport()
        observer = self._transport.observer
        observer.wait()  # on a device for what comes in its stream (`Transport.in_stream`)
        try:
            return combined(self._norms.gather(world, norms, self._flat.holds))
        finally:
            observer.go()

    def spread_scalars(self) -> None:
        """Send every rank the sums of loss and metrics, which the last stage has; a collective."""
        if self._placement.are_staged:
            self._placement.world.broadcast(self.reduction.total.scalars, self._placement.scoring)

    def own_buffer_sums(self) -> list[Tensor]:
        """The sums of buffers that this rank has before they are spread."""
        totals = self.reduction.total.segments[len(self.slices) :]
        if isinstance(self.reduction, Rounds):
            return totals
        ranges = [of_segment[self._transport.rank] for of_segment in self._buffer_slices]
        return [t[first:last] for t, (first, last) in zip(totals, ranges, strict=True)]

    def spread_buffers(self) -> None:
        """Send every rank the sums of all buffers; a collective if sharded or in stages.

        What changes a buffer is computed by the stage of its block; every rank keeps all buffers.
        """
        placement = self._placement
        if self._sharded:
            own = self.reduction.total.segments[len(self.slices) :]
            for sums, total, slices in zip(self.buffer_sums, own, self._buffer_slices, strict=True):
                if isinstance(self.reduction, Rounds):
                    first, last = slices[self._transport.rank]
                    sums[first:last] = total
                gather_slices(self._transport, sums, slices)
        if not placement.are_staged:
            return
        for sums, entries in zip(self.buffer_sums, self._buffer_entries, strict=True):
            for column in range(0, placement.mesh.num_columns, placement.mesh.tp):
                # A copy: the broadcast overwrites all of it, and only one stage's buffers count.
                of_stage = sums.clone()
                placement.world.broadcast(of_stage, placement.mesh.members(column)[0])
                for entry, unit in entries:
                    if placement.held_by(column).has(unit):
                        own_part = entry.range.slice
                        sums[own_part] = of_stage[own_part]

    def exchange_slices(self) -> None:
        """Send every rank the gradients for its slices; a collective."""
        if self._with_buddy:
            for slices, (own, buddy) in zip(self.slices, self.stepped, strict=True):
                copy_to_next(self._transport, own.gradient, buddy.gradient, slices)

    def gather_parameters(self) -> None:
        """Send every rank the slices that others have stepped; a collective.

        Parameters in slices need no such thing: the next forward pass gathers those of each block.

        If it is interrupted, `put_back` is needed: an all-gather in place may leave anything behind
        (Bruck's algorithm moves every rank's part), and two ranks alone have a slice.
        """
        if self._in_slices:
            return
        for segment, (flat, slices) in enumerate(zip(self._flat.flats, self.slices, strict=True)):
            if isinstance(self.reduction, OrderedReduction):
                self.reduction.gather_slices(flat, segment)
            else:
                gather_slices(self._transport, flat, slices)

    def keep_aside(self) -> None:
        """Keep a copy of the slices just stepped, for `put_back`, where there are buddies."""
        for own, spare in zip(self.every_slice, self._spares, strict=False):
            spare.copy_(own.parameters)

    def put_back(self) -> None:
        """Restore the slices of this rank after an interrupted `gather_parameters`."""
        for own, spare in zip(self.every_slice, self._spares, strict=False):
            own.parameters.copy_(spare)


def _last_block_first(flat: FlatTensors, num_segments: int, late: Set[int]) -> list[int]:
    """Segments in the order in which backward passes are done with them.

    Args:
        flat: trainable parameters in flat memory.
        num_segments: number of segments, those of buffers, which come last, included.
        late: blocks whose gradients are there at the end of a backward pass only.
    """
    early = [s for s, block in enumerate(flat.blocks) if block not in late]
    early.sort(key=lambda segment: -flat.blocks[segment])
    order = [*early, *(s for s in range(num_segments) if s not in early)]
    return [s for s in order if s >= len(flat.segments) or flat.segments[s].numel]
