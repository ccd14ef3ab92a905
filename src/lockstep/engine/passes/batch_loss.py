"""A loss over the whole global batch, of what the model makes of each sample.

Each microbatch has a forward pass. The rows of all of them come together on every rank
(`rows.gather`), every rank computes `Task.batch_loss` of them, alike, and each microbatch goes
backward with the gradients of its rows. Its leaf is then one like any other: the bits do not depend
on ranks. Value, weight and metrics of the loss belong to the first microbatch with samples, the
others add zeros.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.data.random import kept_generators
from lockstep.engine.passes.local_steps import with_gradients
from lockstep.engine.passes.loss_checks import check_has_gradient, check_loss, described
from lockstep.engine.passes.rows import BatchStructure, Gathered, Rows, flattened, paths, plain
from lockstep.engine.task import Loss, Task, has_batch_loss, has_carry
from lockstep.engine.task_config import has_lookups
from lockstep.errors import ConfigError, TaskError
from lockstep.parallel.layout import Range

WHERE = "batch_loss"
"""What messages call the loss."""


def check_batch_loss_fits(task: Task, config: TrainConfig) -> None:
    """Refuse what does not go with a loss over the whole batch.

    Raises:
        TaskError: the task has other parts that do not.
        ConfigError: a key does not.
    """
    if not has_batch_loss(task):
        return
    kind = type(task).__name__
    other = ""
    if has_carry(task):
        other = "carry, which belongs to a microbatch, and its loss sees the whole batch"
    elif has_lookups(task):
        other = "lookups, whose rows come for one microbatch at a time"
    if other:
        raise TaskError(f"{kind}.batch_loss: does not go with {kind}.{other}; leave one out")
    sizes = {"mesh.pp": config.mesh.pp, "mesh.tp": config.mesh.tp}
    for key, value in sizes.items():
        if value > 1:
            raise ConfigError(
                f"{key}={value}: {kind}.batch_loss needs the outputs of whole models, one on each "
                f"rank; set {key}=1"
            )
    if config.shards_gradients:
        raise ConfigError(
            f"sharding={config.sharding}: sums the gradient of a block while others are computed, "
            f"and {kind}.batch_loss comes between forward and backward passes; set "
            "sharding=optimizer"
        )
    if config.local.steps > 1:
        raise ConfigError(
            f"local.steps={config.local.steps}: a worker steps by itself, and {kind}.batch_loss "
            "needs the samples of all; set local.steps=1"
        )


class WholeLoss(NamedTuple):
    """The loss of a whole batch.

    Attributes:
        loss: its value, without a graph, its weight and metrics.
        gradients: of each tensor of the outputs, [samples, …]; None where it has none.
        places: where the rows of each microbatch are.
        num_rows: number of samples.
    """

    loss: Loss
    gradients: list[Tensor | None]
    places: dict[int, Range]
    num_rows: int

    def of(self, microbatch: int, outputs: Sequence[Tensor]) -> Tensor | None:
        """A scalar whose backward pass is that of a microbatch; None if there is none to make.

        Args:
            microbatch: number of the microbatch.
            outputs: its outputs, with their graph.
        """
        place = self.places[microbatch]
        pairs = [
            (tensor, gradient[place.slice])
            for tensor, gradient in zip(outputs, self.gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if not pairs:
            return None
        zero = torch.zeros((), device=outputs[0].device)
        return with_gradients(zero, [g for _, g in pairs], [t for t, _ in pairs])

    def share(self, microbatch: int) -> float:
        """The part of the samples that a microbatch has, with which its buffers' changes count."""
        return len(self.places[microbatch]) / self.num_rows

    @property
    def bearer(self) -> int:
        """The microbatch whose leaf has value, weight and metrics."""
        return min(self.places)


class BatchLoss:
    """Computes a task's outputs and its loss over the whole batch.

    Attributes:
        names: what messages call the tensors that are gathered; none before the first pass.
    """

    def __init__(
        self, task: Task, model: nn.Module, autocast: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Prepare to compute.

        Args:
            task: task that has `outputs` and `batch_loss`.
            model: model on its device.
            autocast: context of forward passes.
        """
        self._task, self._model, self._autocast = task, model, autocast
        self._structure: BatchStructure | None = None

    @property
    def names(self) -> list[str]:
        """See the class."""
        return self._structure.names if self._structure is not None else []

    def kept_bytes(self, batch_size: int) -> int:
        """The most that a rank needs for the rows of a whole batch: as sent, whole, and gradients.

        Args:
            batch_size: samples of the global batch.
        """
        kinds = self._structure.kinds if self._structure is not None else []
        return 3 * sum(kind.num_bytes(batch_size) for kind in kinds)

    def rows(self, batch: Any) -> Rows:
        """Forward pass of a microbatch, in the context of one.

        Raises:
            TaskError: the outputs are not what they must be.
        """
        outputs = self._task.outputs(self._model, batch)
        _check_outputs(outputs, batch)
        if self._structure is None:
            with kept_generators():
                self._structure = BatchStructure(outputs, batch, self._task.batch_loss)
        return self._structure.rows(outputs, batch)

    def alone(self, rows: Rows) -> Loss:
        """The loss over one microbatch, as if it were the whole batch, with a graph."""
        tensors = [plain(t) for t in rows.all]
        whole = self.whole(Gathered(tensors, {0: Range(0, len(tensors[0]))}))
        loss = whole.of(0, rows.outputs)
        value = whole.loss.sum
        total = value if loss is None else value + loss
        return Loss(total, whole.loss.weight, whole.loss.metrics)

    def whole(self, gathered: Gathered, loss_scale: float = 1.0) -> WholeLoss:
        """The loss over the whole batch, and the gradients of all rows.

        Args:
            gathered: rows of all microbatches.
            loss_scale: factor of the loss in the backward pass, 1 for none.

        Raises:
            TaskError: the loss is not what it must be, or reads a parameter.
        """
        assert self._structure is not None, "the trial has computed outputs"
        outputs, batch = self._structure.trees(gathered.tensors)
        with self._autocast():
            loss: Loss = self._task.batch_loss(outputs, batch)
        check_loss(WHERE, loss)
        check_has_gradient(WHERE, loss)
        torch.autograd.backward(loss.sum * loss_scale)
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                raise TaskError(
                    f"Task.batch_loss: reads parameter {name} itself, so its gradient would count "
                    "once for each rank; return it from Task.outputs, once for each sample: "
                    "`parameter.expand(len(batch), …)`"
                )
        made = [t.grad for t in gathered.tensors[: self._structure.num_outputs]]
        value = Loss(loss.sum.detach(), loss.weight, loss.metrics)
        return WholeLoss(value, made, gathered.places, gathered.num_rows)


def _check_outputs(outputs: Any, batch: Any) -> None:
    """Refuse outputs that are no tensors with a row for each sample.

    Raises:
        TaskError: naming one.
    """
    leaves, _ = flattened(outputs)
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.dim():
            raise TaskError(
                f"Task.outputs: {paths(outputs, 'outputs')[number]} is {described(leaf)}; it must "
                "return tensors whose first dimension is the samples, or dicts, lists and tuples "
                "of them"
            )
        if len(leaf) != len(leaves[0]):
            raise TaskError(
                f"Task.outputs: {paths(outputs, 'outputs')[number]} has {len(leaf)} rows, others "
                f"have {len(leaves[0])}; each must have a row for each sample"
            )
    if not leaves:
        raise TaskError("Task.outputs: returned no tensors; return what Task.batch_loss needs")
    parts, _ = flattened(batch)
    sizes = {len(part) for part in parts if isinstance(part, Tensor) and part.dim()}
    if sizes and len(leaves[0]) not in sizes:
        raise TaskError(
            f"Task.outputs: returned {len(leaves[0])} rows for a batch of "
            f"{' or '.join(map(str, sorted(sizes)))} samples; each tensor must have a row for each "
            "sample: return several views of a sample as several tensors"
        )


def digest(values: list[float] | Tensor) -> int | Tensor:
    """A digest of some numbers, which is not 0; on a device there, a whole number in float64."""
    if not isinstance(values, Tensor):
        return zlib.crc32(struct.pack(f"{len(values)}d", *values)) | 1
    factors = torch.arange(1, 2 * len(values), 2, device=values.device) * 0x2545F4914F6CDD1D
    return ((values.view(torch.int64) * factors).sum() >> 12 | 1).double()
