"""What a task's loss must return, and errors for what it must not: wrong types, NaN, infinity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.engine.flat_tensors import FlatTensors, Slice
from lockstep.engine.task import Loss, Phase
from lockstep.errors import NonFiniteError, TaskError, shared

_OTHERS = (
    ". A loss that reads parameters itself sees NaN for those of other ranks (mesh.tp, mesh.pp) "
    "and of blocks that are not computed just then (sharding=parameters)"
)
_UNCHANGED = "parameters and checkpoints are as after the step before"


def non_finite_loss(
    transport: Transport,
    step: int,
    losses: Mapping[int, float],
    is_divided: bool = False,
    is_over_batch: bool = False,
) -> NonFiniteError:
    """Name the microbatches; a collective.

    Args:
        transport: the group of ranks.
        step: number of the step.
        losses: loss sums of this rank's microbatches by number.
        is_divided: whether a rank has a part of the parameters only.
        is_over_batch: whether they are parts of one loss, over the whole batch.
    """
    bad = [[m, str(value)] for m, value in losses.items() if not math.isfinite(value)]
    everyone = transport.gather_json(bad)
    places = [
        f"{value} (Task.batch_loss)"
        if is_over_batch
        else f"{value} in microbatch {m} (rank {rank})"
        for rank, losses_there in enumerate(everyone)
        for m, value in losses_there
    ]
    rest = f" and {len(places) - 3} others" if len(places) > 3 else ""
    return shared(
        NonFiniteError(
            f"step {step}: the loss is {', '.join(places[:3])}{rest}; {_UNCHANGED}. Lower lr, "
            f"set clip_norm, or look at the data of this step{_OTHERS if is_divided else ''}"
        )
    )


def non_finite_gradient(
    transport: Transport,
    step: int,
    flat: FlatTensors,
    stepped: Sequence[Sequence[Slice]],
    tables: Mapping[str, Tensor],
) -> NonFiniteError:
    """Name the parameters, or the one with the greatest gradient; a collective.

    Args:
        transport: the group of ranks.
        step: number of the step.
        flat: trainable parameters in flat memory.
        stepped: slices of each segment that this rank has the gradient of.
        tables: gradients of rows of tables that this rank has, by the name of the table.
    """
    parts = [
        (entry.name, own.of(entry.range))
        for entry in flat.entries
        for own in stepped[entry.segment]
    ]
    parts += tables.items()
    names = [name for name, part in parts if not part.isfinite().all()]
    affected = sorted({n for of_rank in transport.gather_json(names) for n in of_rank})
    if affected:
        what = (
            f"the loss is finite, but not the gradient of {', '.join(affected[:3])}"
            f"{' and others' if len(affected) > 3 else ''}"
        )
    else:
        own_greatest = [(name, float(part.abs().max())) for name, part in parts if part.numel()]
        everyone = transport.gather_json(own_greatest)
        what = norm_overflows(pair for of_rank in everyone for pair in of_rank)
    return shared(NonFiniteError(f"step {step}: {what}; {_UNCHANGED}"))


def norm_overflows(greatest: Iterable[tuple[str, float]]) -> str:
    """What to say where gradients are finite, but their norm is not.

    Args:
        greatest: names of parameters, and the greatest magnitude in the gradient of each.
    """
    name, value = max(greatest, key=lambda pair: pair[1])
    return (
        f"the gradient is finite, but too large for its norm (up to {value:.3g}, in {name}), and "
        "optimizers square it; divide the loss by a constant"
    )


def place(phase: Phase) -> str:
    """What messages call the loss of a phase."""
    return f"{phase.name}: the loss" if phase.name else "loss"


def check_loss(where: str, loss: Any) -> None:
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
            f"Task.{where}: Loss.sum must be a scalar tensor, is {described(loss.sum)}; sum "
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
            f"Task.{where}: Loss.weight must be a number, is {described(loss.weight)}; give the "
            "number of samples of the batch"
        )
    if type(loss.metrics) is not dict and not isinstance(loss.metrics, Mapping):
        raise TaskError(
            f"Task.{where}: Loss.metrics must be a dict of name: (sum, weight), is "
            f"{described(loss.metrics)}"
        )
    for name, pair in loss.metrics.items():
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TaskError(
                f"Task.{where}: metric {name!r} must be a pair (sum, weight), is "
                f"{described(pair)}; give its sum over the batch, and the number of samples"
            )
        for value in pair:
            if not _is_scalar(value):
                raise TaskError(
                    f"Task.{where}: metric {name!r} must be a pair of scalars (sum, weight), has "
                    f"{described(value)}; sum over the batch"
                )


def check_has_gradient(where: str, loss: Loss) -> None:
    """Refuse a loss that nothing could be learned from.

    Raises:
        TaskError: no gradient goes back from it.
    """
    if not loss.sum.requires_grad:
        what = "it must depend on the model's parameters"
        if not torch.is_grad_enabled():
            what = "something has left torch.set_grad_enabled(False), which Lockstep does not set"
        raise TaskError(f"Task.{where}: Loss.sum has no gradient; {what}")


def pair_of(where: str, returned: Any) -> tuple[Any, Any]:
    """The loss and the carry that a loss in a task with a carry has returned.

    Raises:
        TaskError: it is no pair.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TaskError(
            f"Task.{where}: must return (lockstep.Loss, carry), since there is a Task.carry; "
            f"returned {described(returned)}"
        )
    return returned


def late_gradient(name: str, is_early: bool) -> TaskError:
    """The error of a gradient that came, or changed, after it was summed.

    Args:
        name: name of the parameter.
        is_early: whether gradients are sent in the last backward pass (`overlap`).
    """
    if is_early:
        return TaskError(
            f"parameter {name}: its gradient changed after it had been sent (overlap), which "
            "activations that are computed again or hooks may do; set overlap=false"
        )
    return TaskError(
        f"parameter {name}: got a gradient after the backward pass of its block was over "
        "(sharding); let the loss reach it by way of the model's blocks, or read it after the "
        "model was called, or set sharding=optimizer"
    )


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


def _is_scalar(value: object) -> bool:
    if type(value) in (int, float):  # an abstract class takes its time
        return True
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, Real)


def described(value: object) -> str:
    """What messages call a value of the wrong kind."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
