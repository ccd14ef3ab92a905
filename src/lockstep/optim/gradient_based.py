"""Optimizers of dense gradients: Adam-atan2, L-BFGS and natural gradient descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep.errors import ConfigError

_WRAPPING = Optimizer.__init__.__code__.co_filename
"""The file in which torch wraps what optimizers do."""
_SERIAL = 1 << 15
"""Elements of which an operation on the CPU uses one thread; a multiple of all vector widths."""


class AdamATan2(Optimizer):
    """p ← p (1 - lr · decay), then p ← p - lr / c1 · atan2(m, √v / √c2).

    Everett et al. 2024, "Scaling Exponents Across Parameterizations and Optimizers"
    (arXiv:2407.05872), without scales: m and v are Adam's running means of gradients and their
    squares, c1 and c2 its corrections for their beginning at zero. A gradient's scale changes no
    step, however small it is. Element-wise: an element's step depends on that element only.

    Bits are the same for any cut of a tensor at multiples of 1,024 elements, on one device type
    and with any number of threads.

    Args:
        params: parameters, or groups of them.
        lr: step size; no element moves further than lr · π/2 / c1, decay aside.
        betas: decay rates of the running means of gradients and their squares.
        weight_decay: decay of parameters, decoupled from gradients.

    Raises:
        ConfigError: a number is out of range, also of a group.
    """

    elementwise = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step more parameters.

        Args:
            param_group: `params`, and what differs from the first numbers.

        Raises:
            ConfigError: a number is out of range.
        """
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step all parameters that have a gradient.

        Args:
            closure: computes the gradients first, and returns the loss.

        Returns:
            What the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step(group, parameters)
        return loss

    def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        states = [self._advanced(p) for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = list(torch._foreach_sqrt(squares))
        torch._foreach_div_(roots, [math.sqrt(1 - beta2 ** state["step"]) for state in states])
        for mean, root in zip(means, roots, strict=True):
            _atan2_into(root, mean)
        torch._foreach_mul_(roots, [-lr / (1 - beta1 ** state["step"]) for state in states])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, roots)

    def _advanced(self, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter, one step on."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        return state


def _atan2_into(x: Tensor, y: Tensor) -> None:
    """Put atan2(y, x) into x; torch has no such operation for lists of tensors."""
    if x.device.type != "cpu" or not (x.is_contiguous() and y.is_contiguous()):
        torch.atan2(y, x, out=x)
        return
    # Vectors and single elements are rounded differently here. With several threads each would
    # leave single elements at the end of its share, and shares depend on the tensor's size.
    pieces = [torch.split(tensor.view(-1), _SERIAL) for tensor in (x, y)]
    for part, other in zip(*pieces, strict=True):
        torch.atan2(other, part, out=part)


def _check(values: dict[str, Any]) -> None:
    lr, betas, decay = values["lr"], values["betas"], values["weight_decay"]
    if not 0 <= lr < math.inf:
        raise ConfigError(f"lr={lr}: must be a number of at least 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas={betas}: must be two numbers of at least 0 and below 1")
    if not 0 <= decay < math.inf:
        raise ConfigError(f"weight_decay={decay}: must be a number of at least 0")


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


class NaturalGradient(Optimizer):
    """θ ← θ - lr (g + damping · 1)⁻¹ ∇L (Stokes et al., Quantum 4, 269 (2020), equation 6).

    Args:
        parameter: the only parameter, float64 or float32, of P elements.
        metric: function that returns the metric g at the parameter's present value, [P, P],
            symmetric and positive semidefinite.
        lr: step size.
        damping: number added to the diagonal of g, which may be singular; above 0.
    """

    elementwise = False

    def __init__(
        self,
        parameter: nn.Parameter,
        metric: Callable[[], Tensor],
        lr: float = 0.01,
        damping: float = 1e-3,
    ) -> None:
        super().__init__([parameter], {"lr": lr, "damping": damping})
        self._metric = metric

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Solve for the direction and step along it."""
        group = self.param_groups[0]
        (parameter,) = group["params"]
        if parameter.grad is None:
            return
        metric = self._metric().to(parameter.dtype, copy=True)
        metric.diagonal().add_(group["damping"])
        solved = torch.cholesky_solve(parameter.grad.reshape(-1, 1), torch.linalg.cholesky(metric))
        parameter.sub_(solved.view_as(parameter), alpha=group["lr"])


class SAM(Optimizer):
    """Steps by the gradient at the worst point nearby, which prefers flat minima.

    Foret et al. 2021, "Sharpness-Aware Minimization" (arXiv:2010.01412), equations 2 and 3: the
    gradient is taken at p + ρ g / |g|, and another optimizer steps p by it. `adaptive` scales the
    distance by each element's size (Kwon et al. 2021, arXiv:2102.11600, equation 9).

    Args:
        params: parameters, or groups of them, which may have a `rho` of their own.
        base: the optimizer that steps, made of the groups: `lambda groups: SGD(groups, lr=0.1)`.
        rho: the distance ρ, above 0.
        adaptive: whether the distance is relative to the size of elements.

    Raises:
        ConfigError: `rho` is out of range.
    """

    needs_closure = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        base: Callable[[list[dict[str, Any]]], Optimizer],
        rho: float = 0.05,
        adaptive: bool = False,
    ) -> None:
        super().__init__(params, {"rho": rho, "adaptive": adaptive})
        wrong = next((g["rho"] for g in self.param_groups if not 0 < g["rho"] < math.inf), None)
        if wrong is not None:
            raise ConfigError(f"SAM: rho={wrong}: must be a finite number above 0")
        made = base(self.param_groups)
        if (
            not isinstance(made, Optimizer)
            or getattr(made, "needs_closure", None)
            or (isinstance(made, torch.optim.LBFGS))
        ):
            raise ConfigError(
                f"SAM: base returned a {type(made).__name__}; must be an optimizer that steps "
                "without a closure"
            )
        if len(made.param_groups) != len(self.param_groups) or any(
            [*map(id, own["params"])] != [*map(id, theirs["params"])]
            for own, theirs in zip(self.param_groups, made.param_groups, strict=True)
        ):
            raise ConfigError("SAM: base has other groups than it was given; make it of these")
        self.base = made
        for own, theirs in zip(self.param_groups, made.param_groups, strict=True):
            theirs.setdefault("rho", own["rho"])
            theirs.setdefault("adaptive", own["adaptive"])
        self.param_groups = made.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Step once; gradients at the present parameters are there.

        Args:
            closure: computes loss and gradients at the parameters that it finds.

        Returns:
            The loss at the worst point nearby.
        """
        groups = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        scaled = [p.grad * p.abs() if g["adaptive"] else p.grad for p, g in groups]
        norm = torch.nn.utils.get_total_norm(scaled) + 1e-12
        before = [p.clone() for p, _ in groups]
        for (p, group), scale in zip(groups, scaled, strict=True):
            p.add_(
                scale * p.abs() if group["adaptive"] else scale, alpha=float(group["rho"] / norm)
            )
        loss = closure()
        for (p, _), own in zip(groups, before, strict=True):
            p.copy_(own)
        plain = bare_step(self.base)
        if plain is None:
            self.base.step()
        else:
            plain(self.base)
        return loss


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """The step of one of torch's optimizers without what torch wraps around it.

    That imports the compiler. It is to be called while gradients are off. None for an optimizer of
    others, and where a wrapper is in use.
    """
    kind = type(optimizer)
    is_watched = (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or is_step_replaced(optimizer)
        or optimizer.defaults.get("differentiable", False)
        or torch._C._autograd._profiler_enabled()
    )
    if is_watched or not kind.__module__.startswith("torch.optim."):
        return None
    return _unwrapped(kind.step)


def is_step_replaced(optimizer: Optimizer) -> bool:
    """Whether `step` is another one than its class's; schedulers only count the calls of theirs."""
    own = vars(optimizer).get("step")
    return own is not None and not hasattr(own, "_wrapped_by_lr_sched")


def _unwrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method without what torch has wrapped around it; what others have stays."""
    while hasattr(method, "__wrapped__") and method.__code__.co_filename == _WRAPPING:
        method = method.__wrapped__
    return method
