"""The microbatches and slices of a rank in a group of ranks, and the memory for both."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.config import TrainConfig
from lockstep.engine.passes.buffers import ForwardState
from lockstep.engine.places import Places
from lockstep.engine.runtime import Runtime
from lockstep.engine.step.flat import FlatTensors
from lockstep.parallel.layout import Range, stepped_slices
from lockstep.parallel.norm import (
    ScatteredNorms,
    block_norms,
    combined,
    global_norm,
    sharded_block_norms,
)
from lockstep.parallel.reduction import OrderedReduction


class Workspace:
    """Laid out anew when the group or the microbatches of its ranks change.

    Attributes:
        microbatches: range of microbatches that this rank computes.
        reduction: ordered sum over all ranks.
        gradients: summed gradient, laid out as the parameters; if sharded, just the slices to
            step are right.
        own_gradients: parts of it that this rank steps.
        buffer_sums: summed changes of buffers, one flat tensor for each segment.
        slices: range of elements of each rank, for each segment.
        owned: ranges of elements that this rank steps, for each segment.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        flat: FlatTensors,
        state: ForwardState,
        places: Places,
        ranges: Sequence[Range],
        *,
        num_scalars: int,
        num_header: int,
        with_buddy: bool,
    ) -> None:
        """Allocate.

        Args:
            runtime: the group of ranks.
            config: config of the run.
            flat: trainable parameters in flat memory.
            state: buffers that forward passes change.
            places: place of each rank on the mesh.
            ranges: range of microbatches of each rank.
            num_scalars: number of float64 sums beside the gradient.
            num_header: number of float64 values in a header.
            with_buddy: whether each rank steps the slice of the rank before it too.
        """
        self._transport = places.data
        self._places = places
        self._flat = flat
        self._sharded = config.optimizer.sharded
        self._with_buddy = with_buddy
        rank = self._transport.rank
        in_column = places.of_column(ranges)
        self.microbatches = in_column[rank]
        self.reduction = OrderedReduction(
            self._transport,
            [*flat.segments, *state.flat.segments],
            [*flat.places, *state.flat.places],
            num_scalars=num_scalars,
            num_header=num_header,
            num_microbatches=config.num_microbatches,
            ranges=in_column,
            device=runtime.device,
            bucket_bytes=config.bucket_bytes,
            gather=not self._sharded,
        )
        num_segments = len(flat.segments)
        self.gradients = self.reduction.total.segments[:num_segments]
        self.buffer_sums = self.reduction.total.segments[num_segments:]
        self._buffer_entries = [
            [(e, places.unit_of(e.name)) for e in state.flat.entries if e.segment == s]
            for s in range(len(state.flat.segments))
        ]
        self.slices = self.reduction.slices[:num_segments]
        self.owned = [[Range(0, s.numel)] for s in flat.segments]
        if self._sharded:
            self.owned = [stepped_slices(s, rank, with_buddy) for s in self.slices]
        parts = [(s, part) for s, owned in enumerate(self.owned) for part in owned]
        self.own_gradients = [self.gradients[s][part.first : part.last] for s, part in parts]
        self._own = [flat.flats[s][part.first : part.last] for s, part in parts]
        self._spares = [torch.empty_like(own) for own in self._own] if with_buddy else []
        holders = {part.unit: places.lowest_rank(part.unit) for part in flat.parts}
        self._norms = ScatteredNorms(flat.parts, holders, places.world.rank)

    def norm(self) -> float:
        """The norm of the summed gradient; a collective if sharded or split."""
        if not (self._sharded or self._places.is_split):
            return global_norm(self.gradients)
        norms = [block_norms(gradient) for gradient in self.gradients]
        if self._sharded:
            norms = sharded_block_norms(self._transport, self.gradients, self.slices)
        if self._places.is_split:
            norms = self._norms.gather(self._places.world, norms, self._flat.holds)
        return combined(norms)

    def spread_scalars(self) -> None:
        """Send every rank the sums of loss and metrics, which the last stage has; a collective."""
        if self._places.are_staged:
            self._places.world.broadcast(self.reduction.total.scalars, self._places.scoring)

    def spread_buffers(self) -> None:
        """Send every rank the sums of all buffers; a collective if sharded or in stages.

        What changes a buffer is computed by the stage of its block; every rank keeps all buffers.
        """
        places = self._places
        if self._sharded:
            for segment, sums in enumerate(self.buffer_sums, start=len(self.slices)):
                self.reduction.gather(segment, sums)
        if not places.are_staged:
            return
        for sums, entries in zip(self.buffer_sums, self._buffer_entries, strict=True):
            for column in range(0, places.mesh.num_columns, places.mesh.tp):
                of_stage = sums.clone()
                places.world.broadcast(of_stage, places.mesh.members(column)[0])
                for entry, unit in entries:
                    if places.held_by(column).has(unit):
                        own = slice(*entry.range)
                        sums[own] = of_stage[own]

    def exchange_slices(self) -> None:
        """Send every rank the gradients for its slices; a collective."""
        if self._with_buddy and self._transport.size > 1:
            for segment in range(len(self.slices)):
                self.reduction.copy_to_next(segment)

    def gather_parameters(self) -> None:
        """Send every rank the slices that others have stepped; a collective.

        If it is interrupted, `put_back` is needed: an all-gather in place may leave anything behind
        (Bruck's algorithm moves every rank's part), and two ranks alone have a slice.
        """
        for segment, flat in enumerate(self._flat.flats):
            self.reduction.gather(segment, flat)

    def keep_aside(self) -> None:
        """Keep a copy of the slices just stepped, if a buddy is to have them."""
        for own, spare in zip(self._own, self._spares, strict=False):
            spare.copy_(own)

    def put_back(self) -> None:
        """Undo what an interrupted `gather_parameters` has done to the slices of this rank."""
        for own, spare in zip(self._own, self._spares, strict=False):
            own.copy_(spare)
