"""Leaves of microbatches that have been through some of this rank's stages, but not through all.

With interleaved stages, backward passes of other microbatches come between those of one. What each
has made is kept here until the rank's first stage, which comes last, has had its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lockstep.nn.pipeline import Pipeline


class StagePart(NamedTuple):
    """What the pass of one stage has made of a leaf, beside gradients.

    Attributes:
        stage: number of the stage.
        deltas: changes of all buffers, of which those of its own blocks count.
        scalars: sums of loss and metrics; zeros if the stage has no loss.
        counters: what it has made of each counter.
    """

    stage: int
    deltas: list[Tensor]
    scalars: list[float]
    counters: list[float]


class PartialLeaves:
    """Keeps gradients and parts by microbatch."""

    def __init__(
        self, pipeline: Pipeline, parameters: Sequence[Tensor], buffers: Sequence[str]
    ) -> None:
        """Prepare for these tensors.

        Args:
            pipeline: model.
            parameters: tensors that get gradients; the copies of tied ones are known.
            buffers: name of the buffer of each delta.
        """
        self._pipeline = pipeline
        self._tensors = [*parameters, *(tie.copy for tie in pipeline.ties)]
        self._blocks = [pipeline.block_of(name) for name in buffers]
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._parts: dict[int, list[StagePart]] = {}

    def keep(self, microbatch: int, part: StagePart) -> None:
        """Take the gradients that parameters have now, and what the pass has made else."""
        self._put_back(microbatch)
        self._gradients[microbatch] = [tensor.grad for tensor in self._tensors]
        self._parts.setdefault(microbatch, []).append(part)

    def joined(self, microbatch: int, part: StagePart) -> StagePart:
        """All parts as one, of which `part` is the last; gradients are the parameters' again."""
        self._put_back(microbatch)
        axis = self._pipeline.axis
        assert axis is not None, "there is one in a run"
        parts = [*self._parts.pop(microbatch, []), part]
        # Of each block's own stage, not their sum: 0.0 turns -0.0 into 0.0.
        by_stage = {one.stage: one.deltas for one in parts}
        deltas = [
            by_stage.get(axis.stage_of(block), part.deltas)[number]
            for number, block in enumerate(self._blocks)
        ]
        last = max(parts, key=lambda one: one.stage)
        counters = [max(values) for values in zip(*(one.counters for one in parts), strict=True)]
        return StagePart(part.stage, deltas, last.scalars, counters)

    def forget(self) -> None:
        """Forget microbatches that were given up."""
        self._gradients.clear()
        self._parts.clear()

    def _put_back(self, microbatch: int) -> None:
        kept = self._gradients.pop(microbatch, None)
        if kept is None:
            return
        for tensor, earlier in zip(self._tensors, kept, strict=True):
            if earlier is not None:
                tensor.grad = earlier if tensor.grad is None else earlier + tensor.grad
