"""Steps of torch's own optimizers without what torch does around the arithmetic.

That is for its compiler and its profiler, and for a small model takes several times as long as the
arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_WRAPPING = optim.Optimizer.__init__.__code__.co_filename
"""The file in which torch wraps what optimizers do."""

_ADAM = sys.modules[optim.Adam.__module__].__file__
"""The file in which torch defines the step of the optimizers in `_FUSED`."""

_FUSED: dict[type[optim.Optimizer], Callable[..., None]] = {
    optim.Adam: torch._fused_adam_,
    optim.AdamW: torch._fused_adamw_,
}


def step(optimizer: optim.Optimizer) -> None:
    """One step of an optimizer.

    One of torch's own that nobody watches is stepped bare: the same arithmetic, and no import of
    the compiler.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or _is_watched(optimizer):
        optimizer.step()
        return
    plain = _unwrapped(kind.step)
    with torch.no_grad():
        if plain.__code__.co_filename != _ADAM or not _step_fused(optimizer):
            plain(optimizer)


@lru_cache(maxsize=64)
def _unwrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method without what torch has wrapped around it; what others have stays."""
    while hasattr(method, "__wrapped__") and method.__code__.co_filename == _WRAPPING:
        method = method.__wrapped__
    return method


def _is_watched(optimizer: optim.Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or "step" in vars(optimizer)  # a scheduler of learning rates has replaced it
        or optimizer.defaults.get("differentiable", False)
        or torch._C._autograd._profiler_enabled()
    )


def _step_fused(optimizer: optim.Optimizer) -> bool:
    """Call the kernel that torch would come to call for each group.

    Returns:
        Whether that is all there is to do. If not, nothing was done: torch has to do the rest.
    """
    kernel = _FUSED.get(type(optimizer))
    if kernel is None or hasattr(optimizer, "grad_scale"):
        return False
    kept = [_kept(optimizer, group) for group in optimizer.param_groups]
    if None in kept:
        return False
    for group, states in zip(optimizer.param_groups, kept, strict=True):
        if states:
            _call(kernel, group, states)
    return True


def _kept(optimizer: optim.Optimizer, group: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What the optimizer keeps for each parameter of a group; None if torch has more to do."""
    # A generator would take longer than what it looks at.
    more = group["amsgrad"] or group["differentiable"] or group["capturable"] or group["foreach"]
    if more or not group["fused"] or isinstance(group["lr"], Tensor):
        return None
    states = []
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        is_plain = parameter.is_cpu and parameter.dtype == group["params"][0].dtype
        if not state or parameter.grad is None or not is_plain:
            return None
        states.append(state)
    return states


def _call(kernel: Callable[..., None], group: dict[str, Any], states: list[dict[str, Any]]) -> None:
    beta1, beta2 = group["betas"]
    steps = [state["step"] for state in states]
    for count in steps:
        count += 1
    kernel(
        group["params"],
        [parameter.grad for parameter in group["params"]],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )
