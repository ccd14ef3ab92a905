"""Whether a task reads parameters in shards, of which a rank may have some only.

A penalty on weights, say, would be another number on each rank. What layers compute is not: they
read the shards that their region says.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import Tensor, nn

from lockstep.data.batch_source import BatchSource
from lockstep.engine.evaluation.evaluation import Evaluation
from lockstep.engine.evaluation.splits import is_validation
from lockstep.engine.passes.compute import Compute
from lockstep.engine.task import Task
from lockstep.errors import LockstepError, TaskError
from lockstep.nn.cutting import compute_in, region_of, shards_of
from lockstep.nn.let_go import let_go
from lockstep.nn.sharded.regions import Region
from lockstep.parallel.layout import Range
from lockstep.parallel.shard_axis import ShardAxis

Values = Callable[[], Mapping[str, float]]
"""Computes loss and metrics by name."""

_TOLERANCE = 1e-3
"""Relative difference that is no rounding, even on a GPU."""


class _FirstShard(ShardAxis):
    """An axis on which all shards are as the first one, which is all that is computed."""

    def __init__(self, num_shards: int) -> None:
        super().__init__(num_shards)
        self.own = Range(0, 1)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].clone()

    def maximum(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0]] * self.num_shards


def check_parameter_reads(
    model: nn.Module,
    compute: Compute,
    loader: BatchSource,
    evaluations: Mapping[str, Evaluation],
) -> None:
    """Compute the first microbatch with and without the shards of others; talks to nobody.

    Args:
        model: model in shards, all of which this process has.
        compute: loss of the task, of `model`.
        loader: loader of the training samples.
        evaluations: evaluations by split.

    Raises:
        TaskError: a loss, a metric or an evaluation depends on shards that no layer computes.
    """
    tried: dict[str, Values] = {}
    for step in compute.phases.first_steps:
        phase = compute.phases.at(step).name
        tried[f"{phase}: the loss" if phase else "loss"] = _loss(model, compute, loader, step)
    if type(compute.task).evaluate is not Task.evaluate:
        for name, evaluation in evaluations.items():
            if is_validation(name):
                tried["evaluate"] = _evaluation(model, compute, evaluation)
    usual = region_of(model)
    assert usual is not None, "the model is not cut"
    compute_in(model, Region(_FirstShard(usual.axis.num_shards)))
    try:
        for where, values in tried.items():
            _check(model, where, values)
    finally:
        compute_in(model, usual)


def _check(model: nn.Module, where: str, values: Values) -> None:
    try:
        with_all = values()
    except Exception:  # it is not the task's fault: this is not its model
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
    """Whether values change when all shards but the first of some parameters are let go."""
    try:
        with _without_others(model, wholes):
            without = values()
    except LockstepError:
        raise
    except Exception:  # NaN may be an error to it
        return True
    return any(
        math.isfinite(value)
        and not math.isclose(without[name], value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
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
            let_go(parameter)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def _loss(model: nn.Module, compute: Compute, loader: BatchSource, step: int) -> Values:
    def values() -> dict[str, float]:
        model.eval()
        try:
            loss = compute.forward(step, 0, loader.microbatch(step, 0))
        finally:
            model.train()
        pairs = {"loss": (loss.sum, loss.weight), **loss.metrics}
        return {name: number(total) for name, (total, _) in pairs.items()}

    return values


def _evaluation(model: nn.Module, compute: Compute, evaluation: Evaluation) -> Values:
    return lambda: evaluation.first_batch(model, compute)


def number(value: Tensor | float) -> float:
    """A sum or a weight of a loss or a metric as a number."""
    return float(value.detach() if isinstance(value, Tensor) else value)
