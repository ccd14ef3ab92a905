"""L-BFGS for gradients of the whole batch, without a line search."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_CURVATURE = 1e-10
"""Pairs with yᵀs below this part of |y||s| are not kept: they would spoil the inverse Hessian."""


class LBFGS(Optimizer):
    """Limited-memory BFGS (Nocedal and Wright 2006, algorithm 7.4), one gradient for each step.

    torch's own needs a closure to compute the loss again. This one takes the full quasi-Newton
    step times `lr`, but none longer than `max_step`. Gradients must be of the same function
    in each step: the whole batch, not clipped.

    Args:
        params: parameters, in a single group.
        lr: factor of the step; 1 is the quasi-Newton step.
        history: number of pairs of steps and gradient changes that are kept.
        max_step: greatest Euclidean length of a step.
    """

    elementwise = False

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1.0,
        history: int = 10,
        max_step: float = 1.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "history": history, "max_step": max_step})
        assert len(self.param_groups) == 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters by their gradients."""
        group = self.param_groups[0]
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self.state[p] for p in parameters]
        gradient = [p.grad.clone() for p in parameters if p.grad is not None]
        self._remember(states, gradient, group["history"])
        direction = _direction(states, gradient, group["history"])
        slope = _dot(direction, gradient)
        if not slope < 0:
            for state in states:
                state["num_pairs"] = 0
            direction = [-g for g in gradient]
        fresh = not states[0].get("num_pairs", 0)
        scale = group["lr"] * (min(1.0, 1.0 / _norm(gradient)) if fresh and slope else 1.0)
        scale = min(scale, group["max_step"] / max(_norm(direction), 1e-300))
        for parameter, state, d, g in zip(parameters, states, direction, gradient, strict=True):
            state["gradient"], state["last_step"] = g, d * scale
            parameter.add_(state["last_step"])

    @staticmethod
    def _remember(states: list[dict[str, Any]], gradient: list[Tensor], history: int) -> None:
        """Keep the last step and what it changed in the gradient, if it curves upwards."""
        if not states or "last_step" not in states[0]:
            return
        steps = [s["last_step"] for s in states]
        changes = [g - s["gradient"] for g, s in zip(gradient, states, strict=True)]
        if not _dot(steps, changes) > _CURVATURE * _norm(steps) * _norm(changes):
            return
        count = states[0].get("num_pairs", 0)
        for state, step, change in zip(states, steps, changes, strict=True):
            state[f"step_{count % history}"] = step
            state[f"change_{count % history}"] = change
            state["num_pairs"] = count + 1


def _direction(states: list[dict[str, Any]], gradient: list[Tensor], history: int) -> list[Tensor]:
    """Minus the inverse Hessian times the gradient: the two-loop recursion."""
    direction = [-g for g in gradient]
    count = states[0].get("num_pairs", 0) if states else 0
    newest_first = [i % history for i in range(count - 1, max(count - history, 0) - 1, -1)]
    pairs = [
        ([s[f"step_{i}"] for s in states], [s[f"change_{i}"] for s in states]) for i in newest_first
    ]
    weights = []
    for steps, changes in pairs:
        weight = _dot(steps, direction) / _dot(steps, changes)
        weights.append(weight)
        direction = [d - weight * y for d, y in zip(direction, changes, strict=True)]
    if pairs:
        steps, changes = pairs[0]
        scale = _dot(steps, changes) / _dot(changes, changes)
        direction = [d * scale for d in direction]
    for (steps, changes), weight in zip(reversed(pairs), reversed(weights), strict=True):
        back = weight - _dot(changes, direction) / _dot(steps, changes)
        direction = [d + back * s for d, s in zip(direction, steps, strict=True)]
    return direction


def _dot(left: list[Tensor], right: list[Tensor]) -> float:
    return float(sum(float((a * b).sum()) for a, b in zip(left, right, strict=True)))


def _norm(tensors: list[Tensor]) -> float:
    return float(_dot(tensors, tensors) ** 0.5)
