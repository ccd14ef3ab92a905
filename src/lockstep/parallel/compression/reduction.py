"""The sum of compressed gradients over all ranks: what every kind of compression has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.parallel.exchange import Leaves
from lockstep.parallel.fold import Fold, Row, Segment, TensorSpecs, laid_out, slice_up, views
from lockstep.parallel.layout import Assigned, Range
from lockstep.parallel.overlapped import OverlappedSlices
from lockstep.parallel.reduction import OrderedReduction, Way
from lockstep.parallel.rounds import Rounds


class LeafStates(Protocol):
    """What was cut off this rank's microbatches, and what all ranks have agreed on.

    Nobody changes any of these tensors once the step that has made them is summed.
    """

    @property
    def key(self) -> int:
        """Random key of the present step, the same on all ranks."""

    @property
    def agreed(self) -> Sequence[Tensor]:
        """What the sums of the step before have come to besides the gradient; on all ranks.

        Of integers, for each segment, the greatest exponents that any microbatch expects, int16
        [blocks]; of low rank, for each matrix, the right factor of its sum.
        """

    def agree(self, tensors: Sequence[Tensor]) -> None:
        """Note what the next step's `agreed` is, if this step is applied."""

    def of_leaf(self, microbatch: int) -> Sequence[Tensor]:
        """For each segment, what was cut off a microbatch's leaves and not sent; maybe nothing."""

    def make_leaf(self, microbatch: int, errors: Sequence[Tensor]) -> None:
        """Note what `of_leaf` gives after this step, if it is applied."""


BLOCK = 256
"""Elements of one tensor that have a scale in common; the last ones of a tensor are padded."""


class LeafMemory:
    """One flat tensor for each segment, zero wherever no tensor is: who writes there keeps it so.

    Attributes:
        segments: flat tensors, of one dimension.
    """

    def __init__(
        self, segments: Sequence[Segment], specs: TensorSpecs, device: torch.device
    ) -> None:
        self.segments = [torch.zeros(s.numel, dtype=s.dtype, device=device) for s in segments]
        pairs = zip(self.segments, specs, strict=True)
        self._views = [view for segment, of in pairs for view in views(segment, of)]

    def take(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy a leaf in here.

        Args:
            tensors: tensors of the leaf in the order of `specs`; None counts as zeros.
        """
        there = [tensor for tensor in tensors if tensor is not None]
        if len(there) < len(self._views):
            torch._foreach_zero_(self._views)
        pairs = zip(self._views, tensors, strict=True)
        views = [view for view, tensor in pairs if tensor is not None]
        if views:
            torch._foreach_copy_(views, there)

    def give(self, other: LeafMemory) -> None:
        """Copy all tensors to the same ones of another memory, wherever they lie there."""
        torch._foreach_copy_(other._views, self._views)


def in_blocks(
    segments: Sequence[Segment], specs: TensorSpecs
) -> tuple[list[Segment], list[list[tuple[int, torch.Size]]]]:
    """The same tensors, each at the beginning of a block, so that no block has parts of two."""
    return laid_out(segments, [[shape for _, shape in of] for of in specs], BLOCK)


Moment = Literal["factors"]
"""Between the sums of left and right factors."""


@dataclass(frozen=True)
class Summed:
    """What is to be summed, and by whom.

    Attributes:
        transport: transport between the ranks.
        leaves: gradients to compress.
        exact: what travels as it is, and comes last in a leaf.
        ranges: range of microbatches of each rank, in order, without gaps.
        num_header: number of float64 values in each rank's header.
        bucket_bytes: greatest number of bytes of gradient to receive at a time.
        feeds_back: whether what is cut off a leaf is added to the microbatch's next one.
        states: what compression keeps from step to step.
        at: function that is called at each moment of a sum.
    """

    transport: Transport
    leaves: Leaves
    exact: Leaves
    ranges: Sequence[Assigned]
    num_header: int
    bucket_bytes: int
    feeds_back: bool
    states: LeafStates
    at: Callable[[Moment], None] = lambda moment: None

    def ordered(
        self, segments: Sequence[Segment] = (), specs: TensorSpecs = (), more_header: int = 0
    ) -> OrderedReduction:
        """An ordered reduction of what travels as it is.

        Args:
            segments: segments to sum in front of the exact ones.
            specs: tensors of these.
            more_header: number of values behind each rank's header.
        """
        leaves = replace(
            self.exact,
            segments=[*segments, *self.exact.segments],
            specs=[*specs, *self.exact.specs],
        )
        return self._ordered(leaves, self.num_header + more_header)

    def ordered_of(self, segments: Sequence[Segment], specs: TensorSpecs) -> OrderedReduction:
        """An ordered reduction of these segments alone, over the same ranks."""
        return self._ordered(replace(self.leaves, segments=segments, specs=specs), 0)

    def _ordered(self, leaves: Leaves, num_header: int) -> OrderedReduction:
        return OrderedReduction(
            self.transport,
            leaves,
            self.ranges,
            num_header=num_header,
            bucket_bytes=self.bucket_bytes,
        )


class CompressedReduction(ABC):
    """Used in place of an `OrderedReduction`; a leaf is compressed as it is added.

    Loss, metrics and buffers are summed as without compression, by an ordered reduction, which also
    brings the headers.

    Attributes:
        fold: this reduction, which takes leaves itself.
        total: after `reduce`, the sum over all microbatches. The same tensors in every step.
        slices: for each segment, the range of elements each rank owns.
    """

    total: Row

    def __init__(
        self,
        summed: Summed,
        segments: Sequence[Segment],
        specs: TensorSpecs,
        exact: OrderedReduction,
    ) -> None:
        """Lay out the memory.

        Args:
            summed: what is to be summed.
            segments: segments in which a leaf lies while it is compressed.
            specs: its tensors in there.
            exact: sums what travels as it is.
        """
        self._summed = summed
        self._exact = exact
        self._num_tensors = sum(map(len, specs))
        self._leaf = LeafMemory(segments, specs, summed.leaves.device)
        every = [*summed.leaves.segments, *summed.exact.segments]
        self.slices = slice_up(every, summed.transport.size)
        self.leaf_sums: CompressedReduction = self
        self.restart()

    @property
    def header(self) -> Tensor:
        """Values of this rank that every rank gets to see, float64 [num_header]."""
        return self._exact.header[: self._summed.num_header]

    @property
    def way(self) -> Way | None:
        """See `OrderedReduction.way`."""
        return self._exact.way

    def headers(self) -> Tensor:
        """Every rank's header as of the last `reduce`, float64 [world size, num_header]."""
        return self._exact.headers()[:, : self._summed.num_header]

    def restart(self) -> None:
        """Forget the leaves of a step."""
        self._exact.restart()
        own = self._summed.ranges[self._summed.transport.rank]
        self._microbatches: Iterator[int] = iter(range(*own))

    def add(self, tensors: Sequence[Tensor | None], scalars: Tensor) -> None:
        """Compress and add the next leaf.

        Args:
            tensors: tensors of the leaf in the order of `specs`, the exact ones last; None counts
                as zeros.
            scalars: sums of the leaf's scalars, float64 [num_scalars].
        """
        microbatch = next(self._microbatches)
        self._leaf.take(tensors[: self._num_tensors])
        errors = self._summed.states.of_leaf(microbatch)
        # Before its first step a microbatch has none.
        for leaf, error in zip(self._leaf.segments, errors, strict=False):
            leaf.add_(error)
        made = self._take(tensors[self._num_tensors :], scalars)
        if made:
            self._summed.states.make_leaf(microbatch, made)

    def reduce(self) -> None:
        """Sum over all ranks into `total`."""
        self._exact.reduce()
        self._reduce()

    def _cut_off(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """What a leaf of which this was sent leaves to the next one; nothing without feedback."""
        if not self._summed.feeds_back:
            return []
        pairs = zip(self._leaf.segments, sent, strict=True)
        return [leaf - there for leaf, there in pairs]

    @abstractmethod
    def _take(self, exact: Sequence[Tensor | None], scalars: Tensor) -> Sequence[Tensor]:
        """Compress what `_leaf` holds, and take all of the leaf into this rank's sums.

        Args:
            exact: tensors of the leaf that travel as they are.
            scalars: sums of its scalars.

        Returns:
            For each segment, what was cut off; nothing without feedback.
        """

    @abstractmethod
    def _reduce(self) -> None:
        """Sum what was compressed over all ranks, into `total`."""


LeafSums = Fold | OverlappedSlices | Rounds | CompressedReduction
"""What takes the leaves of a rank's microbatches."""


def flat_totals(summed: Summed, exact: Row) -> tuple[LeafMemory, Row]:
    """Memory for the sum of gradients, and the whole sum, whose other parts are `exact`."""
    leaves = summed.leaves
    memory = LeafMemory(leaves.segments, leaves.specs, leaves.device)
    return memory, Row([*memory.segments, *exact.segments], exact.scalars)


def positions(segment: Sequence[tuple[int, torch.Size]]) -> list[Range]:
    """The elements of each tensor of a segment."""
    return [Range(offset, offset + shape.numel()) for offset, shape in segment]
