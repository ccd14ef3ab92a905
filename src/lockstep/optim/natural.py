"""Natural gradient descent: steps measured by a metric of what the parameters describe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


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
