"""Simultaneous perturbation stochastic approximation (SPSA): no gradients, only evaluations.

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(circuit, ["ZZ"])
            self.perturbation = Perturbation(radius=0.1)

    loss = model.perturbation(model, lambda model: energy(model))
    optimizer = SPSA(model.parameters(), model.perturbation, lr=0.2)

What a step knows beside the parameters, the number of steps, is a parameter of the model itself: so
it is saved, and moves, with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.optim.evaluating import Function, value_at


class Perturbation(nn.Module):
    """Estimates gradients by two evaluations, with all parameters moved at once.

    With Δ of random signs, from torch's global generator, the estimate is (L(θ + cΔ) - L(θ - cΔ))
    / 2c · Δ (Spall, IEEE Trans. Autom. Control 37, 332 (1992), equation 2.2). In step k, counted
    from 0, c is radius / (k + 1)^decay. Each call draws its own Δ: with several microbatches, a
    step goes by the mean of their estimates.

    Args:
        radius: c of the first step; about the standard deviation of L where L is noisy.
        decay: exponent of its decay; 0.101 is Spall's.

    Attributes:
        steps: number of steps done so far, [1], float64; `SPSA` counts them.

    Raises:
        ConfigError: the radius is not above 0, or the decay is negative.
    """

    def __init__(self, radius: float = 0.1, decay: float = 0.101) -> None:
        super().__init__()
        if not radius > 0 or not decay >= 0:
            raise ConfigError(f"radius={radius}, decay={decay}: must be above 0, and at least 0")
        self.radius = radius
        self.decay = decay
        self.steps = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, model: nn.Module, function: Function) -> Tensor:
        """The mean of the two evaluations, with the estimate as its gradient.

        Args:
            model: model; all its parameters that require gradients are moved.
            function: function of the model, a scalar; it may be noisy, and need not be
                differentiable.

        Returns:
            A scalar.

        Raises:
            ConfigError: the function's value is no scalar, or the model has no parameters.
        """
        moved = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter is not self.steps
        }
        if not moved:
            raise ConfigError("SPSA: the model has no parameters that require gradients")
        with torch.no_grad():
            radius = self.radius / (self.steps.item() + 1) ** self.decay
            signs = {
                name: (torch.randint(2, p.shape, dtype=p.dtype) * 2 - 1).to(p.device)
                for name, p in moved.items()
            }
            high, low = (
                value_at(
                    model, {n: p + sign * radius * signs[n] for n, p in moved.items()}, function
                )
                for sign in (1, -1)
            )
            slope = (high - low) / (2 * radius)
        value = (high + low) / 2
        for name, p in moved.items():
            value = value + slope * ((p - p.detach()) * signs[name]).sum()
        return value + 0 * self.steps.sum()


class SPSA(Optimizer):
    """θ ← θ - lr / (k + 1 + stability)^decay · g in step k, with g by a `Perturbation`.

    Spall, IEEE Trans. Aerosp. Electron. Syst. 34, 817 (1998), section III.

    Args:
        params: parameters to step.
        perturbation: what estimates their gradients; its count of steps goes on with each.
        lr: gain of the steps.
        stability: number of steps after which the gain has begun to fall; about a tenth of all.
        decay: exponent of its decay; 0.602 is Spall's.
    """

    elementwise = False

    def __init__(
        self,
        params: Iterable[Tensor],
        perturbation: Perturbation,
        lr: float = 0.1,
        stability: float = 0.0,
        decay: float = 0.602,
    ) -> None:
        own = [p for p in params if p is not perturbation.steps]
        defaults = {"lr": lr, "stability": stability, "decay": decay}
        groups: list[dict[str, Any]] = [{"params": own}, {"params": [perturbation.steps]}]
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters by their gradients, and count the step."""
        group, counting = self.param_groups
        (steps,) = counting["params"]
        gain = group["lr"] / (steps.item() + 1 + group["stability"]) ** group["decay"]
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=gain)
        steps.add_(1)
