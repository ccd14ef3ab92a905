"""Adam with an arctangent in place of a division: no epsilon, and steps of a bounded size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import ConfigError

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
