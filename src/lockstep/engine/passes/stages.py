"""Which blocks of a pipeline each stage computes, and gradients of unfinished backward passes.

With interleaved stages, backward passes of other microbatches come between those of one. What each
has made is kept here until the rank's first stage, which comes last, has had its own.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config import TrainConfig
from lockstep.data.loader import BatchSource
from lockstep.engine.passes.buffers import KeptBuffers
from lockstep.engine.passes.compute import Compute
from lockstep.errors import ConfigError, TaskError
from lockstep.nn.module_row import ModuleRow
from lockstep.nn.row import Pipeline, Row, row_of
from lockstep.parallel.axes import balanced
from lockstep.parallel.layout import Range


def check_pipeline(model: nn.Module, config: TrainConfig) -> None:
    """Refuse more stages than a model has blocks, and blocks that cannot be parted.

    Raises:
        ConfigError: naming `mesh.pp` or `sharding`.
        TaskError: a module is in several blocks.
    """
    pp, row = config.mesh.pp, row_of(model)
    if pp > 1 and (row is None or not row.has_stages):
        raise ConfigError(
            f"mesh.pp={pp}: the model is a {type(model).__name__}, which is one block; name its "
            "row of blocks in build_model (lockstep.nn.stages), build it as a "
            "lockstep.nn.Pipeline, or set mesh.pp=1"
        )
    if config.shards_parameters and row is None:
        raise ConfigError(
            f"sharding=parameters: the model is a {type(model).__name__} without a ModuleList or "
            "Sequential of modules of one class, so its parameters would be whole all the time; "
            "name its units in build_model (lockstep.nn.units), build it as a "
            "lockstep.nn.Pipeline, or set sharding=gradients"
        )
    if isinstance(row, ModuleRow):
        _check_units(row, config)
    if isinstance(model, Pipeline):
        _check_blocks(model)
        check_number_of_stages(model, config)


def check_number_of_stages(row: Row, config: TrainConfig) -> None:
    """Refuse more stages than blocks.

    Raises:
        ConfigError: naming `mesh.pp`.
    """
    pp, num_stages, most = config.mesh.pp, config.mesh.num_stages, len(row.groups)
    if num_stages > most and row.has_stages:
        many = "" if num_stages == pp else f" mesh.interleave={config.mesh.interleave}"
        product = "mesh.pp x mesh.interleave" if many else "mesh.pp"
        raise ConfigError(
            f"mesh.pp={pp}{many}: each stage needs a block, and the {type(row.module).__name__} "
            f"can be cut into {most}; set {product} to at most {most}"
        )


def _check_units(row: ModuleRow, config: TrainConfig) -> None:
    """Refuse what would come to units in another order, or give other bits with other slices.

    Raises:
        ConfigError: naming the key.
    """
    if row.was_found and config.clip_norm is not None:
        raise ConfigError(
            f"sharding=parameters: clip_norm={config.clip_norm} needs a norm that is added up by "
            "the same units with any sharding; have build_model return lockstep.nn.units(model), "
            "or set sharding=gradients"
        )
    names = [name for name, _ in row.module.named_modules()]
    for pattern in config.activation_checkpointing:
        for name in fnmatch.filter((n for n in names if n), pattern):
            if any(unit.startswith(f"{name}.") for unit in row.units):
                raise ConfigError(
                    f"activation_checkpointing={pattern!r}: {name} has several units or blocks in "
                    f"it, such as {row.units[0]}; name these, or modules in them"
                )


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
    row = row_of(model)
    if row is None:
        return [Range(0, 1)]
    if config.mesh.pp == 1:
        return [Range(0, row.num_blocks)]
    check_number_of_stages(row, config)
    costs, groups = _costs(row, compute, loader), row.groups
    ranges = balanced([sum(costs[of.slice]) for of in groups], config.mesh.num_stages)
    return [Range(groups[r.first].first, groups[r.last - 1].last) for r in ranges]


def _costs(row: Row, compute: Compute, loader: BatchSource) -> list[float]:
    counter = FlopCounterMode(display=False)
    begun: list[tuple[int, int]] = []

    def note(block: int) -> None:
        begun.append((block, counter.get_total_flops()))

    buffers = KeptBuffers(row.module)
    row.entered = note
    try:
        with counter:
            compute.forward(0, 0, loader.microbatch(0, 0))
    finally:
        buffers.restore()
        row.entered = None
    blocks = range(row.num_blocks)
    costs = [float(sum(p.numel() for p in row.parameters_of(block))) for block in blocks]
    for (block, before), (_, after) in pairwise(begun):
        costs[block] += after - before
    return costs


class StagePart(NamedTuple):
    """What the pass of one stage has made of a leaf, beside gradients.

    Attributes:
        stage: number of the stage.
        deltas: changes of all buffers, of which those of its own blocks count.
        numbers: sums of loss and metrics, zeros if the stage has no loss, and what it has made of
            each counter; on a device float64 [numbers].
        num_scalars: number of those that are no counters.
    """

    stage: int
    deltas: list[Tensor]
    numbers: list[float] | Tensor
    num_scalars: int


class PartialLeaves:
    """Keeps gradients and parts by microbatch."""

    def __init__(self, row: Row, parameters: Sequence[Tensor], buffers: Sequence[str]) -> None:
        """Prepare for these tensors.

        Args:
            row: blocks of the model.
            parameters: tensors that get gradients; the copies of tied ones are known.
            buffers: name of the buffer of each delta.
        """
        self._row = row
        self._tensors = [*parameters, *(tie.copy for tie in row.ties)]
        self._blocks = [row.block_of(name) for name in buffers]
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
        axis = self._row.axis
        assert axis is not None, "there is one in a run"
        parts = [*self._parts.pop(microbatch, []), part]
        # Of each block's own stage, not their sum: 0.0 turns -0.0 into 0.0.
        by_stage = {one.stage: one.deltas for one in parts}
        deltas = [
            by_stage.get(axis.stage_of(block), part.deltas)[number]
            for number, block in enumerate(self._blocks)
        ]
        of_last, num = max(parts, key=lambda one: one.stage).numbers, part.num_scalars
        every = [one.numbers for one in parts]
        numbers: list[float] | Tensor
        if isinstance(of_last, Tensor):
            greatest = torch.stack([torch.as_tensor(one) for one in every]).amax(0)
            numbers = torch.cat([of_last[:num], greatest[num:]])
        else:
            counters = zip(*(one[num:] for one in every), strict=True)
            numbers = [*of_last[:num], *map(max, counters)]
        return StagePart(part.stage, deltas, numbers, num)

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
