"""The loss of one microbatch, or of one batch of an evaluation, and what it must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.data.generators import IdleGenerators
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.engine.carry.carries import Carries
from lockstep.engine.carry.tree import Carry
from lockstep.engine.passes.phases import Phases
from lockstep.engine.passes.precision import autocast
from lockstep.engine.tables.lookups import Lookups
from lockstep.engine.task import Loss, Number, Phase, Task, has_carry
from lockstep.errors import TaskError, shared
from lockstep.nn.pipeline import Pipeline
from lockstep.nn.tables.sparse_embedding import Lent


class Compute:
    """Runs the task's loss on microbatches.

    Attributes:
        task: task that defines the loss.
        phases: which loss each step has.
        watched: generators that the task's loss must not draw from.
        has_carry: whether microbatches carry state from step to step.
        lookups: tables of the model, and which rows of them a batch looks up.
    """

    def __init__(self, task: Task, model: nn.Module, config: TrainConfig, device: torch.device):
        self.task = task
        self._model = model
        self._seed = config.seed
        self._autocast: Callable[[], Any] = nullcontext
        if config.precision.dtype != "fp32":
            self._autocast = lambda: autocast(config.precision, device)
        self.phases = Phases(task)
        self._metrics: dict[str, tuple[str, ...]] = {}
        self.has_carry = has_carry(task)
        self.lookups = Lookups(task, model, device)
        self.watched = IdleGenerators({})

    def wanted(
        self, step: int, microbatch: int, batch: Any, carries: Carries | None
    ) -> dict[str, Tensor]:
        """The rows of each table that a microbatch looks up; the arguments are `forward`'s.

        Raises:
            TaskError: the task did not say.
        """
        seed_all(random_key(self._seed, Stream.FORWARD, step, microbatch))
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
        lent: Mapping[str, Lent] | None = None,
    ) -> Loss:
        """The loss of a microbatch, with random state that depends on its number only.

        Args:
            step: number of the step.
            microbatch: number of the microbatch.
            batch: its samples.
            carries: has what the microbatch carries from the step before, and takes what it carries
                to the next. Without it, or if it has nothing, the microbatch begins anew.
            lent: rows of each table that it looks up; without, as they are before the first step.

        Raises:
            TaskError: the loss did not return what it must.
            StageDone: this rank does not compute the last block of a pipeline.
        """
        phase = self.phases.at(step)
        if self.lookups.tables:
            if lent is None:
                wanted = self.wanted(step, microbatch, batch, carries)
                lent = self.lookups.at_start(wanted, trains=True)
            self.lookups.lend(lent)
        seed_all(random_key(self._seed, Stream.FORWARD, step, microbatch))
        with self._open(), self._autocast():
            loss: Loss
            if self.has_carry:
                loss = self._carried_on(phase, microbatch, batch, carries or Carries())
            else:
                loss = phase.loss(self._model, batch)
        self.watched.check()
        where = _place(phase)
        self._check_stage(where)
        _check(where, loss)
        if not loss.sum.requires_grad:
            raise TaskError(
                f"Task.{where}: Loss.sum has no gradient; it must depend on the model's parameters"
            )
        names = self._metrics.setdefault(phase.name, tuple(sorted(loss.metrics)))
        if tuple(sorted(loss.metrics)) != names:
            raise TaskError(
                f"Task.{where}: returned metrics {sorted(loss.metrics)}, earlier it returned "
                f"{list(names)}; every batch must have the same"
            )
        return loss

    def targets(self, step: int) -> list[Tensor] | None:
        """What a backward pass after `forward` makes gradients of; None for all that there is."""
        parameters = self.phases.parameters(step)
        if parameters is None:
            return None
        lent = [table.lent for table in self.lookups.tables.values()]
        return [*parameters, *(one.rows for one in lent if one is not None)]

    def _carried_on(self, phase: Phase, microbatch: int, batch: Any, carries: Carries) -> Loss:
        """The loss of a microbatch that goes on from the step before."""
        carry = self._carry(microbatch, batch, carries)
        returned = phase.loss(self._model, batch, carry.tree)
        where = _place(phase)
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise TaskError(
                f"Task.{where}: must return (lockstep.Loss, carry), since there is a Task.carry; "
                f"returned {_described(returned)}"
            )
        loss: Loss
        loss, after = returned
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
        if not self.has_carry:
            return ()
        with torch.no_grad():
            return (self.task.carry(self._model, batch),)

    def _open(self) -> AbstractContextManager[None]:
        return self._model.open() if isinstance(self._model, Pipeline) else nullcontext()

    def _check_stage(self, where: str) -> None:
        """Refuse a loss that was computed without the model, where other ranks count on that."""
        if not isinstance(self._model, Pipeline) or self._model.axis is None:
            return
        if not self._model.axis.is_last:
            how = "stages (mesh.pp): a stage has some of its blocks only"
        elif self._model.storage is not None and not self._model.num_calls:
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
        self, chunk: int, batch: Any, lent: Mapping[str, Lent] | None = None
    ) -> tuple[dict[str, tuple[float, float]], Mapping[str, Any]]:
        """Loss and metrics of an evaluation batch, each as (sum, weight), and `Loss.updates`.

        Args:
            chunk: number of the batch.
            batch: its samples.
            lent: rows of each table that it looks up; without, all that there are, or if they are
                not, as they are before the first step.

        Raises:
            TaskError: the loss did not return what it must.
            StageDone: this rank does not compute the last block of a pipeline.
        """
        if self.lookups.tables:
            if lent is None and not self.lookups.are_whole:
                wanted = self.wanted_to_evaluate(chunk, batch)
                lent = self.lookups.at_start(wanted, trains=False)
            self.lookups.lend(lent)
        seed_all(random_key(self._seed, Stream.EVALUATION, chunk))
        with torch.no_grad(), self._open(), self._autocast():
            loss = self.task.evaluate(self._model, batch)
        self._check_stage("evaluate")
        _check("evaluate", loss)
        pairs = {"loss": (loss.sum, loss.weight), **loss.metrics}
        values = copied([v for pair in pairs.values() for v in pair])()
        sums = dict(zip(pairs, zip(values[::2], values[1::2], strict=True), strict=True))
        return sums, loss.updates

    def scalars(self, step: int, loss: Loss) -> list[Number]:
        """Loss and `metrics` as [sum, weight, sum, weight, …]; those of other phases are 0."""
        values: list[Number] = [loss.sum, loss.weight]
        if not self.phases.are_several:
            for name in self.metrics:
                values += loss.metrics[name]
            return values
        phase = self.phases.at(step).name
        named = {"loss": (loss.sum.detach(), loss.weight), **loss.metrics}
        pairs = {f"{phase}_{name}": pair for name, pair in named.items()}
        for name in self.metrics:
            values += pairs.get(name, (0.0, 0.0))
        return values


def _place(phase: Phase) -> str:
    return f"{phase.name}: the loss" if phase.name else "loss"


def _check(where: str, loss: Any) -> None:
    """Refuse a loss that is not what it must be.

    Raises:
        TaskError: it is not.
    """
    if not isinstance(loss, Loss):
        raise TaskError(
            f"Task.{where}: must return lockstep.Loss(sum, weight, metrics), returned a "
            f"{type(loss).__name__}"
        )
    if not isinstance(loss.sum, Tensor) or loss.sum.dim() != 0:
        raise TaskError(
            f"Task.{where}: Loss.sum must be a scalar tensor, is {_described(loss.sum)}; sum "
            "the loss over the batch"
        )
    _check_scalars(where, loss)


def _check_scalars(where: str, loss: Loss) -> None:
    """Refuse a weight or metrics that are not what they must be, by name.

    Raises:
        TaskError: they are not.
    """
    if not _is_scalar(loss.weight):
        raise TaskError(
            f"Task.{where}: Loss.weight must be a number, is {_described(loss.weight)}; give the "
            "number of samples of the batch"
        )
    if not isinstance(loss.metrics, Mapping):
        raise TaskError(
            f"Task.{where}: Loss.metrics must be a dict of name: (sum, weight), is "
            f"{_described(loss.metrics)}"
        )
    for name, pair in loss.metrics.items():
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TaskError(
                f"Task.{where}: metric {name!r} must be a pair (sum, weight), is "
                f"{_described(pair)}; give its sum over the batch, and the number of samples"
            )
        for value in pair:
            if not _is_scalar(value):
                raise TaskError(
                    f"Task.{where}: metric {name!r} must be a pair of scalars (sum, weight), has "
                    f"{_described(value)}; sum over the batch"
                )


def _is_scalar(value: object) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, Real)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def copied(values: Sequence[Number]) -> Callable[[], list[float]]:
    """Copy numbers as they are now; what is returned gives them.

    Those on a GPU are copied there, and come with one message when they are asked for. So nobody
    waits for the GPU before it has been given more to do.
    """
    there = [v.detach().double() for v in values if isinstance(v, Tensor) and v.is_cuda]
    if not there:
        here = [float(v.item() if isinstance(v, Tensor) else v) for v in values]
        return lambda: here
    stacked = torch.stack(there)
    rest = [None if isinstance(v, Tensor) and v.is_cuda else float(v) for v in values]

    def fetch() -> list[float]:
        fetched = iter(stacked.tolist())
        return [next(fetched) if v is None else v for v in rest]

    return fetch


def check_weight(weight: float, step: int) -> None:
    """Refuse a step in which nothing counts.

    Raises:
        TaskError: the weights of all microbatches add up to zero, a negative number or NaN.
    """
    if not (weight > 0 and math.isfinite(weight)):
        raise shared(
            TaskError(
                f"step {step}: the weights of all microbatches add up to {weight}; Loss.weight "
                "must be the number of samples (or another positive weight) of the batch"
            )
        )
