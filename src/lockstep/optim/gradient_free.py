"""Optimizers that need no gradients, only evaluations of the loss: SPSA and Rotosolve.

class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(circuit, ["ZZ"])
            self.perturbation = Perturbation(radius=0.1)

    loss = model.perturbation(model, lambda model: energy(model))
    optimizer = SPSA(model.parameters(), model.perturbation, lr=0.2)

What a step knows beside the parameters, the number of steps, is a parameter of the model itself: so
it is saved, and moves, with it.

class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(circuit, [hamiltonian])
            self.sweep = Sweep("layer.weights", self.layer.frequencies())

    loss = model.sweep(model, lambda model: model.layer().sum())
    optimizer = Rotosolve(model.layer.weights, model.sweep)

As a function of an angle that is in one gate, an expectation value is a sinusoid, which three
evaluations determine. These are sums over samples: they go to the optimizer as the gradient of a
parameter, and so over any number of ranks. That parameter also counts the angles that are done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError

Function = Callable[[Any], Tensor]
"""A function of a model: a scalar, such as the sum of the losses of a batch."""


def value_at(model: nn.Module, values: Mapping[str, Tensor], function: Function) -> Tensor:
    """A function of a model that has other values in place of some of its parameters.

    Args:
        model: model; it is left as it is.
        values: value of each parameter that is replaced, by its name in the model.
        function: function of the model.

    Returns:
        Its value, a scalar.

    Raises:
        ConfigError: the function's value is no real scalar.
    """
    replaced = {f"model.{name}": value for name, value in values.items()}
    value = torch.func.functional_call(_Evaluated(model, function), replaced, ())
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        returned = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"the function of a model must be a real scalar tensor, not {returned}")
    return value


class _Evaluated(nn.Module):
    def __init__(self, model: nn.Module, function: Function) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self) -> Tensor:
        return self._function(self.model)


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


_TOLERANCE = 1e-4
"""Greatest deviation from a sinusoid, as part of the values' size: more than float32 rounds."""


class Sweep(nn.Module):
    """Evaluates what `Rotosolve` needs to know about the next angle.

    Args:
        name: name of the parameter that holds the angles, in the model.
        frequencies: frequency of the sinusoid that the loss is as a function of each angle: a
            number for all, or real, in the shape of the parameter.
        check: whether a fourth evaluation in the first sweep checks that the loss is a sinusoid.
            It must not be noisy then.

    Attributes:
        found: parameter [3], float64: the number of angles that are done, and two places whose
            gradients say where the next one's minimum is.

    Raises:
        ConfigError: a frequency is not above 0.
    """

    def __init__(self, name: str, frequencies: Tensor | float = 1.0, check: bool = True) -> None:
        super().__init__()
        self.name = name
        self.frequencies = tuple(torch.as_tensor(frequencies).double().flatten().tolist())
        if not all(0 < frequency < math.inf for frequency in self.frequencies):
            raise ConfigError("frequencies: must be above 0")
        self.check = check
        self.found = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, model: nn.Module, function: Function) -> Tensor:
        """The function's value, whose gradient says where the next angle's minimum is.

        Parameters other than the angles get their usual gradients.

        Args:
            model: model that has the angles, and this.
            function: function of the model, a scalar: linear in expectation values.

        Returns:
            A scalar.

        Raises:
            ConfigError: the model has no such parameter, there is not one frequency for each
                angle, or the function is not a sinusoid.
        """
        angles = dict(model.named_parameters()).get(self.name)
        if angles is None or not angles.numel():
            raise ConfigError(f"Rotosolve: the model has no angles {self.name!r}")
        if len(self.frequencies) not in (1, angles.numel()):
            raise ConfigError(
                f"Rotosolve: {len(self.frequencies)} frequencies for {angles.numel()} angles"
            )
        number, frequency = self.next_angle(angles)
        quarter = math.pi / 2 / frequency

        def at(shift: float) -> Tensor:
            moved = angles.detach().clone()
            moved.view(-1)[number] += shift
            return value_at(model, {self.name: moved}, function)

        here = at(0.0)
        with torch.no_grad():
            high, low = at(quarter), at(-quarter)
            if self.check and self.found[0] < angles.numel():
                _check(number, here.detach(), high, low, at(1 / frequency))
            facts = torch.stack([0 * here, high - low, 2 * here - high - low]).to(self.found)
        message = ((self.found - self.found.detach()) * facts).sum()
        return here + message.to(here) + 0 * angles.sum()

    def next_angle(self, angles: Tensor) -> tuple[int, float]:
        """The place of the angle that is solved next, and its frequency."""
        number = int(self.found[0].item()) % angles.numel()
        return number, self.frequencies[number % len(self.frequencies)]


def _check(number: int, here: Tensor, high: Tensor, low: Tensor, fourth: Tensor) -> None:
    """Check by a fourth value, at a phase of 1 rad: there, multiples of the frequency differ."""
    values = [value.item() for value in (here, high, low, fourth)]
    size = max(map(abs, values))
    mean, odd = (values[1] + values[2]) / 2, (values[1] - values[2]) / 2
    expected = mean + (values[0] - mean) * math.cos(1) + odd * math.sin(1)
    gap = abs(expected - values[3])
    if gap > _TOLERANCE * max(size, 1e-30):
        raise ConfigError(
            f"Rotosolve: the loss is no sinusoid of angle {number} (off by {gap:.1e}): it must be "
            "linear in expectation values, and the frequency right; take another optimizer"
        )


class Rotosolve(Optimizer):
    """Each step takes one angle to its minimum, in turn (Ostaszewski et al. 2021, algorithm 1).

    Ostaszewski, Grant and Benedetti, Quantum 5, 391 (2021), equation 4.

    Args:
        angles: parameter that holds the angles.
        sweep: what evaluates the loss; it must be part of the model.
        lr: part of the way to the minimum; 1 is all of it.
    """

    elementwise = False

    def __init__(self, angles: nn.Parameter, sweep: Sweep, lr: float = 1.0) -> None:
        super().__init__([angles, sweep.found], {"lr": lr})
        self._sweep = sweep

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the next angle to its minimum."""
        (group,) = self.param_groups
        angles, found = group["params"]
        if found.grad is None:
            return
        number, frequency = self._sweep.next_angle(angles)
        _, odd, even = found.grad.tolist()
        if odd or even:  # else the loss does not depend on the angle
            turn = -math.pi / 2 - math.atan2(even, odd)
            turn = math.remainder(turn, 2 * math.pi)
            angles.view(-1)[number] += group["lr"] * turn / frequency
        found[0] += 1
