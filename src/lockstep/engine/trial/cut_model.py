"""Whether a model that is cut, into shards or stages, computes what the whole model does.

Parameters may be read only where they are. A penalty on weights, say, would be another number on
each rank of an axis of shards; layers are not affected, since they read the shards of their region.
A model in stages that is no `Pipeline` runs all of its code on each of them. Code around the blocks
that reads what another stage has (a residual connection past the row, a weight that two stages use
by one name) would find other numbers there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.data.loader import BatchSource
from lockstep.engine.evaluation.batches import is_validation
from lockstep.engine.evaluation.evaluation import Evaluation, eval_mode
from lockstep.engine.passes.buffers import KeptBuffers
from lockstep.engine.passes.compute import Compute
from lockstep.engine.task import Loss, Task
from lockstep.engine.trial.drawn_blocks import DrawnBlocks
from lockstep.errors import LockstepError, TaskError
from lockstep.nn.cutting import compute_in, joined_by_name, region_of, shards_of
from lockstep.nn.holding import release
from lockstep.nn.row import Row, StageDone
from lockstep.nn.sharded.regions import Region
from lockstep.parallel.axes import DepthAxis, ShardAxis
from lockstep.parallel.layout import Range

_TOLERANCE: Mapping[str, float] = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Relative difference that rounding may make, by `precision.dtype`."""

_READ_TOLERANCE = 1e-3
"""Relative difference that is no rounding, even on a GPU."""

_FEW = 0.05
"""Part of a metric's weight by which it may differ: a rounding may flip what is counted."""

_MAY_NEED_ALL = frozenset(
    {
        "amax", "amin", "argmax", "argmin", "batch_norm", "cumprod", "cumsum", "group_norm",
        "instance_norm", "layer_norm", "log_softmax", "logsumexp", "max", "mean", "median", "min",
        "norm", "normalize", "prod", "rms_norm", "softmax", "softmin", "sort", "std", "sum", "topk",
        "var", "var_mean", "vector_norm",
    }
)  # fmt: skip
"""Functions that mix features if they are called along the features' dim."""

Values = Callable[[], Mapping[str, float]]
"""Computes loss and metrics by name."""


def check_cut_model(
    whole: nn.Module,
    model: nn.Module,
    compute: Compute,
    config: TrainConfig,
    loader: BatchSource,
    evaluations: Mapping[str, Evaluation],
    device: torch.device,
) -> None:
    """Compare the first microbatch in evaluation mode: loss, metrics, gradients; not a collective.

    An operation that needs all features at once, such as a softmax over them, is wrong in a region
    in which each shard is computed by itself, and no other check would notice.

    Args:
        whole: the model before it was cut.
        model: model in shards, with all of its shards.
        compute: loss of the task, of `model`.
        config: config of the run.
        loader: loader of the training samples.
        evaluations: evaluations by split.
        device: device that both models are on.

    Raises:
        TaskError: they differ by more than rounding, or the task reads parameters in shards.
    """
    there = _values(whole, Compute(compute.task, whole, config, device), loader)
    buffers = KeptBuffers(model)
    try:
        here, calls = _noted(model, compute, loader)
        why = _why(calls)
        _check_values(here, there, config, why)
        _check_gradients(whole, model, config, why)
        check_parameter_reads(model, compute, loader, evaluations)
    finally:
        buffers.restore()


def _noted(
    model: nn.Module, compute: Compute, loader: BatchSource
) -> tuple[Mapping[str, tuple[float, float]], Mapping[str, str]]:
    """`_values` of a model in shards, and where it calls which functions on features in shards."""
    region = region_of(model)
    assert region is not None, "the model is not cut"
    calls: dict[str, str] = {}
    region.calls = calls
    try:
        return _values(model, compute, loader), calls
    finally:
        region.calls = None


def _values(
    model: nn.Module, compute: Compute, loader: BatchSource
) -> dict[str, tuple[float, float]]:
    """Sum and weight of loss and metrics of the first microbatch, whose gradients are left."""
    with eval_mode(model):
        loss = compute.forward(0, 0, loader.microbatch(0, 0))
        model.zero_grad(set_to_none=True)
        loss.sum.backward()  # type: ignore[no-untyped-call]
    return _numbers(loss)


def _check_values(
    here: Mapping[str, tuple[float, float]],
    there: Mapping[str, tuple[float, float]],
    config: TrainConfig,
    why: str,
) -> None:
    """Compare sums of loss and metrics in shards (`here`) and of the whole model (`there`)."""
    tolerance = _TOLERANCE[config.precision.dtype]
    for name, (expected, weight) in there.items():
        found = here[name][0]
        allowed = tolerance * abs(expected) + (0.0 if name == "loss" else _FEW * abs(weight))
        if not math.isclose(found, expected, rel_tol=tolerance, abs_tol=allowed + 1e-6):
            raise TaskError(
                f"num_shards={config.num_shards}: the sum of the {name} of the first microbatch is "
                f"{found:.6g} in shards and {expected:.6g} of the whole model: {why}"
            )


def _why(calls: Mapping[str, str]) -> str:
    """Likely causes of a difference.

    Args:
        calls: where functions were called on features in shards, by their names.
    """
    suspects = [call for name, call in calls.items() if name in _MAY_NEED_ALL]
    return (
        "something between a layer that cuts features and the one that sums them needs all "
        "features at once, such as a softmax, a norm or a mean over them, or is no function of "
        "torch; leave these layers out of the plan"
    ) + (f". Look at {', '.join(suspects)}" if suspects else "")


def _check_gradients(whole: nn.Module, model: nn.Module, config: TrainConfig, why: str) -> None:
    """Compare the gradients that `_values` has left, and free them."""
    tolerance = _TOLERANCE[config.precision.dtype]
    shards = shards_of(model)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    trained |= {shards[n].whole for n in trained if n in shards}  # no optimizer may have the others
    expected = {
        n: p.grad for n, p in whole.named_parameters() if p.grad is not None and n in trained
    }
    parts = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    missing = {n: torch.zeros_like(p) for n, p in model.named_parameters() if n not in parts}
    found = dict(joined_by_name(parts | missing, shards))
    largest = max((float(g.norm()) for g in expected.values()), default=0.0)
    for name, gradient in expected.items():
        gap = float((found[name] - gradient).norm())
        # A gradient that cancels out has the rounding errors of those that do not.
        if gap > 10 * tolerance * (float(gradient.norm()) + 0.01 * largest):
            raise TaskError(
                f"num_shards={config.num_shards}: the gradient of {name} in the first microbatch "
                f"has norm {float(found[name].norm()):.6g} in shards and "
                f"{float(gradient.norm()):.6g} of the whole model: {why}"
            )


def check_parameter_reads(
    model: nn.Module,
    compute: Compute,
    loader: BatchSource,
    evaluations: Mapping[str, Evaluation],
) -> None:
    """Compute the first microbatch with and without the shards of other ranks; not a collective.

    Args:
        model: model in shards, with all of its shards.
        compute: loss of the task, of `model`.
        loader: loader of the training samples.
        evaluations: evaluations by split.

    Raises:
        TaskError: a loss, a metric or an evaluation depends on shards that no layer computes.
    """
    tried: dict[str, Values] = {}
    for step in compute.phases.first_steps:
        phase = compute.phases.at(step).name
        where = f"{phase}: the loss" if phase else "loss"
        tried[where] = partial(_loss, model, compute, loader, step)
    if type(compute.task).evaluate is not Task.evaluate:
        for name, evaluation in evaluations.items():
            if is_validation(name):
                tried["evaluate"] = partial(evaluation.first_batch, model, compute)
    usual = region_of(model)
    assert usual is not None, "the model is not cut"
    compute_in(model, Region(_FirstShard(usual.axis.num_shards)))
    try:
        for where, values in tried.items():
            _check(model, where, values)
    finally:
        compute_in(model, usual)


class _FirstShard(ShardAxis):
    """An axis on which all shards equal the first one, the only one that is computed."""

    def __init__(self, num_shards: int) -> None:
        super().__init__(num_shards)
        self.own = Range(0, 1)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].clone()

    def maximum(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0]] * self.num_shards


def _loss(model: nn.Module, compute: Compute, loader: BatchSource, step: int) -> dict[str, float]:
    with eval_mode(model):
        loss = compute.forward(step, 0, loader.microbatch(step, 0))
    return {name: total for name, (total, _) in _numbers(loss).items()}


def _numbers(loss: Loss) -> dict[str, tuple[float, float]]:
    pairs = {"loss": (loss.sum, loss.weight), **loss.metrics}
    return {name: (number(total), number(weight)) for name, (total, weight) in pairs.items()}


def number(value: Tensor | float) -> float:
    """A sum or a weight of a loss or a metric as a number."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def _check(model: nn.Module, where: str, values: Values) -> None:
    try:
        with_all = values()
    except Exception:  # not an error of the task: this is not its model
        return
    wholes = list(dict.fromkeys(shard.whole for shard in shards_of(model).values()))
    if not _depends(model, wholes, values, with_all):
        return
    read = next((w for w in wholes if _depends(model, [w], values, with_all)), wholes[0])
    raise TaskError(
        f"Task.{where} reads {read} itself, which is cut into shards (num_shards); with mesh.tp "
        "above 1 no rank has all of them. Compute with what the model gives; have the optimizer "
        "penalise weights (optimizer.weight_decay); or leave the layer out of the plan of "
        "lockstep.nn.shard"
    )


def _depends(
    model: nn.Module, wholes: Collection[str], values: Values, with_all: Mapping[str, float]
) -> bool:
    """Whether values change when all shards but the first of some parameters are released."""
    try:
        with _without_others(model, wholes):
            without = values()
    except LockstepError:
        raise
    except Exception:  # NaN may be an error to it
        return True
    return any(
        math.isfinite(value)
        and not math.isclose(without[name], value, rel_tol=_READ_TOLERANCE, abs_tol=_READ_TOLERANCE)
        for name, value in with_all.items()
    )


@contextlib.contextmanager
def _without_others(model: nn.Module, wholes: Collection[str]) -> Iterator[None]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    others = {
        id(parameters[name]): parameters[name]
        for name, shard in shards_of(model).items()
        if shard.whole in wholes and shard.number > 0
    }
    kept = [(parameter, parameter.data) for parameter in others.values()]
    try:
        for parameter, _ in kept:
            release(parameter)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


class _OneProcess(DepthAxis):
    """Stages after one another, which hand over tensors with their graph."""

    outputs: Sequence[Tensor] = ()

    def receive_inputs(self) -> list[Tensor]:
        return list(self.outputs)


class StageRehearsal:
    """Computes a loss as it is computed on as many stages as the row can be cut into."""

    def __init__(self, row: Row, drawn: DrawnBlocks | None = None) -> None:
        """Prepare.

        Args:
            row: row whose parameters are all in memory.
            drawn: where they are, if they are there for a block at a time only.
        """
        self._row, self._drawn = row, drawn
        named = row.module.named_parameters(remove_duplicate=False)
        self._named = [(row.block_of(name), parameter) for name, parameter in named]

    def loss(self, forward: Callable[[], Loss]) -> Loss:
        """What the last stage computes; its graph goes back through all stages.

        Args:
            forward: computes the loss of one microbatch from the beginning.

        Raises:
            TaskError: no loss comes of it.
        """
        axis = _OneProcess(self._row.groups)
        usual, self._row.axis = self._row.axis, axis
        try:
            for stage, own in enumerate(axis.stages):
                axis.enter(stage)
                with self._only(own):
                    try:
                        return forward()
                    except StageDone as done:
                        axis.outputs = done.outputs
        except LockstepError:
            raise
        except Exception as error:
            raise TaskError(
                f"{differs_on_stages('Task.loss')} ({type(error).__name__}: {error})"
            ) from None
        finally:
            self._row.axis = usual
        raise TaskError(differs_on_stages("Task.loss"))

    @contextmanager
    def _only(self, own: Range) -> Iterator[None]:
        """Have NaN in place of the parameters of other blocks."""
        here = {id(p) for block, p in self._named if block in range(*own)}
        if self._drawn is not None:
            with self._drawn.only(here):
                yield
            return
        others = {id(p): p for _, p in self._named if id(p) not in here}.values()
        # By `data`, which autograd does not take for a change of what it has saved.
        kept = [parameter.data.clone() for parameter in others]
        try:
            for parameter in others:
                parameter.data.fill_(torch.nan)
            yield
        finally:
            for parameter, content in zip(others, kept, strict=True):
                parameter.data.copy_(content)


def differs_on_stages(subject: str) -> str:
    """The error message about a result that differs on stages."""
    return (
        f"{subject} differs when blocks are computed by stages (mesh.pp), each with its own "
        "parameters: the model, or the loss, reads something of another stage around the blocks, "
        "such as what came before the first one, a parameter that is used before and behind them "
        "by one name, or what a block keeps for later ones. Write the model as a "
        "lockstep.nn.Pipeline, or set mesh.pp=1"
    )
