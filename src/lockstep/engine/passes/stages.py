"""Which blocks of a pipeline each stage computes, and gradients of unfinished backward passes.

With interleaved stages, backward passes of other microbatches come between those of one. What each
has made is kept here until the rank's first stage, which comes last, has had its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config import TrainConfig
from lockstep.data.loader import BatchSource
from lockstep.engine.passes.buffers import KeptBuffers
from lockstep.engine.passes.compute import Compute
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.pipeline import Pipeline
from lockstep.parallel.depth_axis import balanced
from lockstep.parallel.layout import Range


def check_pipeline(model: nn.Module, config: TrainConfig) -> None:
    """Refuse more stages than a model has blocks, and blocks that cannot be parted.

    Raises:
        ConfigError: naming `mesh.pp` or `sharding`.
        TaskError: a module is in several blocks.
    """
    pp = config.mesh.pp
    if pp > 1 and not isinstance(model, Pipeline):
        raise ConfigError(
            f"mesh.pp={pp}: the model is a {type(model).__name__}, which is one block; build it as "
            "a lockstep.nn.Pipeline of blocks, or set mesh.pp=1"
        )
    if config.shards_parameters and not isinstance(model, Pipeline):
        raise ConfigError(
            f"sharding=parameters: the model is a {type(model).__name__}, which is one block, so "
            "its parameters would be whole all the time; build it as a lockstep.nn.Pipeline of "
            "blocks, or set sharding=gradients"
        )
    num_stages = config.mesh.num_stages
    if isinstance(model, Pipeline) and num_stages > len(model):
        many = "" if num_stages == pp else f" mesh.interleave={config.mesh.interleave}"
        product = "mesh.pp x mesh.interleave" if many else "mesh.pp"
        raise ConfigError(
            f"mesh.pp={pp}{many}: the Pipeline has len {len(model)}, and each stage needs a block; "
            f"set {product} to at most {len(model)}"
        )
    if isinstance(model, Pipeline):
        _check_blocks(model)


def _check_blocks(model: Pipeline) -> None:
    homes: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not name or not (module._parameters or module._buffers):
            continue
        first = homes.setdefault(id(module), name)
        if model.block_of(first) != model.block_of(name):
            raise TaskError(
                f"build_model: {first} and {name} are one module in two blocks of the Pipeline; "
                "blocks may share parameters, but not modules: build two, and let one have the "
                "other's parameters (`b.weight = a.weight`)"
            )


def stages_of(
    model: nn.Module, compute: Compute, config: TrainConfig, loader: BatchSource
) -> list[Range]:
    """The range of blocks of each stage, such that they have about the same to compute.

    What counts is the number of floating point operations of each block for the first microbatch,
    which is the same on all ranks; of blocks without any, the number of their parameters.
    """
    if not isinstance(model, Pipeline):
        return [Range(0, 1)]
    if config.mesh.pp == 1:
        return [Range(0, len(model))]
    return balanced(_costs(model, compute, loader), config.mesh.num_stages)


def _costs(model: Pipeline, compute: Compute, loader: BatchSource) -> list[float]:
    counter = FlopCounterMode(display=False)
    before, costs = [0], [float(sum(p.numel() for p in block.parameters())) for block in model]

    def begin(block: nn.Module, inputs: Any) -> None:
        before[0] = counter.get_total_flops()

    handles = [block.register_forward_pre_hook(begin) for block in model]
    for number, block in enumerate(model):

        def end(block: nn.Module, inputs: Any, output: Any, number: int = number) -> None:
            costs[number] += counter.get_total_flops() - before[0]

        handles.append(block.register_forward_hook(end))
    buffers = KeptBuffers(model)
    try:
        with counter:
            compute.forward(0, 0, loader.microbatch(0, 0))
    finally:
        buffers.restore()
        for handle in handles:
            handle.remove()
    return costs


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
