"""What a worker's own steps cannot be made of, refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.engine.passes.non_finite import norm_overflows
from lockstep.errors import NonFiniteError, TaskError
from lockstep.nn.sharded.refusals import has_gradient_hook


def check_norm(norm: Tensor, copies: Mapping[str, Tensor]) -> None:
    """Refuse gradients that are finite, but whose norm is not: Adam would stand still.

    NaN and infinity in gradients reach the parameters, where all ranks see them.

    Raises:
        NonFiniteError: naming the parameter with the greatest one.
    """
    if bool(norm.isfinite()):
        return
    gradients = {n: c.grad for n, c in copies.items() if c.grad is not None and c.numel()}
    greatest = [(name, float(gradient.abs().max())) for name, gradient in gradients.items()]
    if all(math.isfinite(value) for _, value in greatest):
        raise NonFiniteError(f"local.steps: in a step of a worker {norm_overflows(greatest)}")


def check_read(common: Iterable[str], gradients: Iterable[Tensor | None]) -> None:
    """Refuse a loss that reads the common parameters, which a worker does not step.

    Raises:
        TaskError: naming one.
    """
    for name, gradient in zip(common, gradients, strict=True):
        if gradient is not None:
            raise TaskError(
                f"Task.loss: reads parameter {name} from elsewhere than the model it is given, "
                "so it would not see the steps of a worker; take it from the model each time, "
                "or set local.steps=1"
            )


def check_copied(named: Mapping[str, Tensor], config: TrainConfig) -> None:
    """Refuse parameters that have what copies of them would not have.

    Raises:
        TaskError: naming one.
    """
    begin = f"local.steps={config.local.steps}: parameter"
    for name, parameter in named.items():
        if type(parameter) is not nn.Parameter:
            raise TaskError(
                f"{begin} {name} is a {type(parameter).__name__}, and workers step copies of "
                "parameters, which are plain ones; make it an nn.Parameter, or set local.steps=1"
            )
        if has_gradient_hook(parameter):
            raise TaskError(
                f"{begin} {name} has a hook on its gradient (register_hook or "
                "register_post_accumulate_grad_hook), which gradients of workers pass by; remove "
                "the hook, or set local.steps=1"
            )
