"""The loss of one microbatch, or of one batch of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.data.attributes import AttributeGuard
from lockstep.data.random import IdleGenerators, Stream, global_state, random_key, seed_all
from lockstep.engine.carry import Carries, Carry
from lockstep.engine.passes.batch_loss import WHERE, BatchLoss, WholeLoss
from lockstep.engine.passes.local_steps import LocalSteps
from lockstep.engine.passes.loss_checks import check_has_gradient, check_loss, pair_of, place
from lockstep.engine.passes.phases import Phases
from lockstep.engine.passes.precision import NOTHING, autocast
from lockstep.engine.passes.rows import Gathered, Rows
from lockstep.engine.tables.run_tables import Lookups
from lockstep.engine.task import Loss, Number, Phase, Task, has_batch_loss, has_carry
from lockstep.errors import TaskError
from lockstep.nn.row import row_of
from lockstep.nn.sparse_embedding import Fetched


class Compute:
    """Runs the task's loss on microbatches.

    Attributes:
        task: task that defines the loss.
        phases: which loss each step has.
        watched: generators that the task's loss must not draw from.
        guard: notices attributes that one pass sets and another one reads.
        has_carry: whether microbatches carry state from step to step.
        local: steps of workers between two exchanges; None if gradients are exchanged.
        batch_loss: loss over the whole batch; None if each microbatch has a loss of its own.
        lookups: tables of the model, and which rows of them a batch looks up.
    """

    def __init__(self, task: Task, model: nn.Module, config: TrainConfig, device: torch.device):
        self.task = task
        self._model = model
        self._seed = config.seed
        self._autocast = partial(autocast, config.precision, device)
        self.phases = Phases(task)
        self._metrics: dict[str, tuple[str, ...]] = {}
        self.local = LocalSteps(task, model, config) if config.local.steps > 1 else None
        self.batch_loss: BatchLoss | None = None
        if has_batch_loss(task):
            self.batch_loss = BatchLoss(task, model, self._autocast)
        self.has_carry = has_carry(task) or self.local is not None
        self.lookups = Lookups(task, model, device)
        self.watched = IdleGenerators({})
        self.guard = AttributeGuard()

    def wanted(
        self, step: int, microbatch: int, batch: Any, carries: Carries | None
    ) -> dict[str, Tensor]:
        """The rows of each table that a microbatch looks up; the arguments are `forward`'s.

        Raises:
            TaskError: the task did not say.
        """
        seed_all(self.key(step, microbatch))
        if not self.has_carry:
            return self.lookups.wanted(batch)
        carry = self._carry(microbatch, batch, carries or Carries())
        return carry.read(lambda tree: self.lookups.wanted(batch, tree), "Task.lookups")

    def wanted_to_evaluate(self, chunk: int, batch: Any) -> dict[str, Tensor]:
        """The rows of each table that an evaluation batch looks up.

        Raises:
            TaskError: the task did not say.
        """
        seed_all(random_key(self._seed, Stream.EVALUATION, chunk))
        return self.lookups.wanted(batch, *self._fresh_carry(batch))

    def forward(
        self,
        step: int,
        microbatch: int,
        batch: Any,
        carries: Carries | None = None,
        fetched: Mapping[str, Fetched] | None = None,
    ) -> Loss:
        """The loss of a microbatch, with random state that depends on its number only.

        Args:
            step: number of the step.
            microbatch: number of the microbatch.
            batch: its samples.
            carries: has what the microbatch carries from the step before, and takes what it carries
                to the next. Without it, or if it has nothing, the microbatch starts fresh.
            fetched: rows of each table that it looks up; without, as before the first step.

        Raises:
            TaskError: the loss did not return what it must.
            StageDone: this rank does not compute the last block of a pipeline.
        """
        phase = self.phases.at(step)
        self.guard.enter((step, microbatch))
        if self.lookups.tables:
            if fetched is None:
                wanted = self.wanted(step, microbatch, batch, carries)
                fetched = self.lookups.at_start(wanted, trains=True)
            self.lookups.fetch(fetched)
        seed_all(self.key(step, microbatch))
        loss: Loss
        if self.local is not None:
            loss = self._stepped(self.local, phase, microbatch, batch, carries or Carries())
            self.watched.check()
            return loss
        if self.batch_loss is not None:
            loss = self._alone(self.batch_loss, step, microbatch, batch)
            self._check_metrics(phase, loss)
            return loss
        if not self.has_carry:
            return self._loss(phase, batch)
        with self._open(), self._autocast():
            loss = self._carried_on(phase, microbatch, batch, carries or Carries())
        self._check(phase, loss)
        return loss

    def loss(self, step: int, batch: Any) -> Loss:
        """The loss of a microbatch that carries nothing, with the random state that there is.

        Raises:
            TaskError: the loss did not return what it must.
            StageDone: this rank does not compute the last block of a pipeline.
        """
        return self._loss(self.phases.at(step), batch)

    def _loss(self, phase: Phase, batch: Any) -> Loss:
        with self._open(), self._autocast():
            loss: Loss = phase.loss(self._model, batch)
        self._check(phase, loss)
        return loss

    def enter_forward(self, step: int, microbatch: int) -> None:
        """Set the random state of a microbatch's forward pass."""
        self.guard.enter((step, microbatch))
        seed_all(self.key(step, microbatch))

    def key(self, step: int, microbatch: int) -> int:
        """The seed of a microbatch's forward pass, 63 bits."""
        return random_key(self._seed, Stream.FORWARD, step, microbatch)

    def steady_loss(self, batch: Any) -> Loss:
        """The loss of a batch in the first step, without autocast.

        Raises:
            TaskError: it draws random numbers.
        """
        seed_all(0)
        before = global_state()
        with self._open():
            loss: Loss = self.phases.at(0).loss(self._model, batch)
        if global_state() != before:
            raise TaskError("Task.loss: draws random numbers")
        return loss

    def rows(self, batch_loss: BatchLoss, step: int, microbatch: int, batch: Any) -> Rows:
        """What a microbatch gives the loss over the whole batch, with random state as `forward`.

        Args:
            batch_loss: what `batch_loss` of this object is.
            step: number of the step.
            microbatch: number of the microbatch.
            batch: its samples.

        Raises:
            TaskError: the outputs are not what they must be.
        """
        self.guard.enter((step, microbatch))
        seed_all(self.key(step, microbatch))
        with self._open(), self._autocast():
            rows = batch_loss.rows(batch)
        self.watched.check()
        return rows

    def over_batch(
        self, batch_loss: BatchLoss, step: int, gathered: Gathered, loss_scale: float
    ) -> WholeLoss:
        """The loss over the whole batch, with random state that depends on the step only.

        Args:
            batch_loss: what `batch_loss` of this object is.
            step: number of the step.
            gathered: rows of all microbatches.
            loss_scale: factor of the loss in the backward pass, 1 for none.

        Raises:
            TaskError: the loss is not what it must be.
        """
        self.guard.enter((step, WHERE))
        seed_all(random_key(self._seed, Stream.BATCH_LOSS, step))
        whole = batch_loss.whole(gathered, loss_scale)
        self.watched.check()
        self._check_metrics(self.phases.at(step), whole.loss)
        return whole

    def enter_backward(self, step: int, microbatch: int) -> None:
        """Set the random state of a backward pass that does not follow its forward pass at once."""
        self.guard.enter((step, microbatch))
        seed_all(random_key(self._seed, Stream.BACKWARD, step, microbatch))

    def _alone(self, batch_loss: BatchLoss, step: int, microbatch: int, batch: Any) -> Loss:
        """The loss over one microbatch as if it were the whole batch."""
        rows = self.rows(batch_loss, step, microbatch, batch)
        self.guard.enter((step, WHERE))
        loss = batch_loss.alone(rows)
        self.watched.check()
        return loss

    def _check(self, phase: Phase, loss: Loss) -> None:
        """Refuse a loss that is not what it must be, or has other metrics than earlier ones.

        Raises:
            TaskError: it is.
        """
        where = place(phase)
        self.watched.check()
        self._check_stage(where)
        check_loss(where, loss)
        check_has_gradient(where, loss)
        self._check_metrics(phase, loss)

    def _check_metrics(self, phase: Phase, loss: Loss) -> None:
        found = tuple(sorted(loss.metrics))
        names = self._metrics.setdefault(phase.name, found)
        if found != names:
            where = place(phase) if self.batch_loss is None else WHERE
            raise TaskError(
                f"Task.{where}: returned metrics {list(found)}, earlier it returned "
                f"{list(names)}; every batch must have the same"
            )

    def targets(self, step: int) -> list[Tensor] | None:
        """What a backward pass after `forward` makes gradients of; None for all that there is."""
        parameters = self.phases.parameters(step)
        if parameters is None:
            return None
        fetched = [table.fetched for table in self.lookups.tables.values()]
        return [*parameters, *(one.rows for one in fetched if one is not None)]

    def _stepped(
        self, local: LocalSteps, phase: Phase, microbatch: int, batch: Any, carries: Carries
    ) -> Loss:
        """The loss of a worker's steps, whose gradient is how far it has come."""

        def loss_of(model: nn.Module, part: Any) -> Loss:
            with self._autocast():
                loss: Loss = phase.loss(model, part)
            self._check(phase, loss)
            return loss

        carry = carries.of(microbatch)
        loss, after = local.run(loss_of, batch, carry and carry.tree)
        carries.make(microbatch, Carry.of(after, "the optimizer of a worker"))
        return loss

    def _carried_on(self, phase: Phase, microbatch: int, batch: Any, carries: Carries) -> Loss:
        """The loss of a microbatch that goes on from the step before."""
        carry = self._carry(microbatch, batch, carries)
        returned = phase.loss(self._model, batch, carry.tree)
        where = place(phase)
        loss: Loss
        loss, after = pair_of(where, returned)
        carries.make(microbatch, Carry.of(after, f"Task.{where}: the carry"))
        return loss

    def _carry(self, microbatch: int, batch: Any, carries: Carries) -> Carry:
        """What a microbatch carries into a step; the first one if it has nothing yet."""
        carry = carries.of(microbatch)
        if carry is None:
            with torch.no_grad():
                carry = Carry.of(self.task.carry(self._model, batch), "Task.carry")
        return carry

    def _fresh_carry(self, batch: Any) -> tuple[Any, ...]:
        """What a batch of an evaluation begins with, if microbatches carry anything."""
        if not has_carry(self.task):
            return ()
        with torch.no_grad():
            return (self.task.carry(self._model, batch),)

    def _open(self) -> AbstractContextManager[None]:
        row = row_of(self._model)
        return NOTHING if row is None else row.open()

    def _check_stage(self, where: str) -> None:
        """Refuse a loss that was computed without the model, where other ranks count on that."""
        row = row_of(self._model)
        if row is None or row.axis is None:
            return
        if not row.axis.is_last:
            how = "stages (mesh.pp): a stage has some of its blocks only"
        elif row.storage is not None and not row.num_calls:
            how = "slices (sharding=parameters): ranks gather its blocks together"
        else:
            return
        raise TaskError(
            f"Task.{where}: did not call the model it was given, which is in {how}, so call the "
            "whole model, once"
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the task's metrics; those of a phase once `forward` has been called in it."""
        return self.phases.metric_names(self._metrics)

    def evaluate(
        self, chunk: int, batch: Any, fetched: Mapping[str, Fetched] | None = None
    ) -> tuple[dict[str, tuple[float, float]], Mapping[str, Any]]:
        """Loss and metrics of an evaluation batch, each as (sum, weight), and `Loss.updates`.

        Args:
            chunk: number of the batch.
            batch: its samples.
            fetched: rows of each table that it looks up; without, all rows of this rank, or if it
                has none, rows as before the first step.

        Raises:
            TaskError: the loss did not return what it must.
            StageDone: this rank does not compute the last block of a pipeline.
        """
        if self.lookups.tables:
            if fetched is None and not self.lookups.are_whole:
                wanted = self.wanted_to_evaluate(chunk, batch)
                fetched = self.lookups.at_start(wanted, trains=False)
            self.lookups.fetch(fetched)
        seed_all(random_key(self._seed, Stream.EVALUATION, chunk))
        with torch.no_grad(), self._open(), self._autocast():
            loss = self.task.evaluate(self._model, batch)
        self._check_stage("evaluate")
        check_loss("evaluate", loss)
        pairs = {"loss": (loss.sum, loss.weight), **loss.metrics}
        values = copied([v for pair in pairs.values() for v in pair])()
        sums = dict(zip(pairs, zip(values[::2], values[1::2], strict=True), strict=True))
        return sums, loss.updates

    def scalars(self, step: int, loss: Loss) -> list[Number]:
        """Loss and `metrics` as [sum, weight, sum, weight, …]; those of other phases are 0."""
        values: list[Number] = [loss.sum, loss.weight]
        if not self.phases.are_several:
            for name in sorted(loss.metrics):
                values += loss.metrics[name]
            return values
        phase = self.phases.at(step).name
        named = {"loss": (loss.sum.detach(), loss.weight), **loss.metrics}
        pairs = {f"{phase}_{name}": pair for name, pair in named.items()}
        for name in self.metrics:
            values += pairs.get(name, (0.0, 0.0))
        return values


def numbers_on(device: torch.device, values: Sequence[Number]) -> list[float] | Tensor:
    """Numbers as they are now; if this rank computes on a device, there: float64 [numbers]."""
    return copied(values)() if device.type == "cpu" else stacked(device, values)


def stacked(device: torch.device, values: Sequence[Number]) -> Tensor:
    """Numbers as they are now, on a device: float64 [numbers]."""
    return torch.stack([
        v.detach().double()
        if isinstance(v, Tensor) and v.device == device
        else torch.full((), float(v), dtype=torch.float64, device=device)
        for v in values
    ])  # fmt: skip


def copied(values: Sequence[Number]) -> Callable[[], list[float]]:
    """Copy numbers as they are now; what is returned gives them.

    Those on a GPU are copied there, and come with one message when they are asked for. So nobody
    waits for the GPU before it has been given more to do.
    """
    here: list[float] = []
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_cpu:
                break
            value = value.item()
        here.append(float(value))
    else:
        return lambda: here
    there = [v.detach().double() for v in values if isinstance(v, Tensor) and not v.is_cpu]
    stacked = torch.stack(there)
    rest = [None if isinstance(v, Tensor) and not v.is_cpu else float(v) for v in values]

    def fetch() -> list[float]:
        fetched = iter(stacked.tolist())
        return [next(fetched) if v is None else v for v in rest]

    return fetch
