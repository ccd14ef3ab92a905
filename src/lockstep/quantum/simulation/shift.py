"""Gradients by shifted angles, as they are computed where only measurements are available.

The rule holds for what is linear in the state's density matrix: probabilities and expectation
values. Functions of these, such as a logarithm, are differentiated by the chain rule around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import as_integer, kind_of
from lockstep.quantum.circuits.gates import shift_rule
from lockstep.quantum.simulation.derivatives import is_transformed, only_once
from lockstep.quantum.simulation.statevector import Simulator

_OF_SOME = (
    "second derivatives of some parameters' shifts are not supported: they are no sum over parts; "
    "leave `only` out"
)

_AMPLITUDES = 1 << 17
"""About how many amplitudes are simulated at a time: what stays in a core's cache."""

Measure = Callable[[Tensor], Tensor]
"""Probabilities or expectation values [B, M] of states [B, 2^n]."""


def shifted(
    simulator: Simulator, parameters: Tensor, measure: Measure, only: Tensor | None = None
) -> Tensor:
    """The values of `measure`, with a gradient by the parameter-shift rule.

    Two evaluations for each gate with an angle that depends on a parameter; four, where the gate is
    a controlled rotation. The rule is for the gates' angles; where these are formulas of several
    parameters, their derivatives follow by the chain rule.

    Args:
        simulator: simulator of the circuit.
        parameters: real tensor [..., num_parameters].
        measure: function from states [B, 2^n] to values [B, M] that are linear in the density
            matrix; it may sample.
        only: bool tensor [num_parameters], True for the parameters that get a gradient; all by
            default. The gradient of some cannot be differentiated again: derivatives of second
            order are no sum over parts.

    Returns:
        Values [..., M], differentiable in the parameters, any number of times by shifts of shifts.

    Raises:
        ConfigError: an argument has the wrong type or shape, or `measure` returns the wrong shape.
    """
    if not isinstance(simulator, Simulator):
        raise ConfigError(f"shifts need a Simulator, not {kind_of(simulator)}")
    if not callable(measure):
        raise ConfigError(f"measure must be a function of states, not {kind_of(measure)}")
    count = simulator.circuit.num_parameters
    if only is not None and (not isinstance(only, Tensor) or only.shape != (count,)):
        raise ConfigError(f"only must be a tensor of bools [{count}], not {kind_of(only)}")
    simulator.circuit.check_parameters(parameters)
    if is_transformed(parameters):
        raise ConfigError(
            "torch.func does not know the parameter-shift rule: use Simulator.state, or "
            "torch.autograd, which differentiates shifts any number of times"
        )
    if only is not None:  # an angle may depend on others, too
        parameters = torch.where(only.to(parameters.device), parameters, parameters.detach())
    angles = simulator.circuit.angles(parameters)
    rows = angles.reshape(angles.shape[:-1].numel(), angles.shape[-1])
    measured = _measured(rows, simulator, measure, only)
    return measured.view(*angles.shape[:-1], -1)


def share(count: int, part: int, num_parts: int) -> Tensor:
    """The parameters of one part of the work: what `only` of `shifted` takes.

    Args:
        count: number N of parameters.
        part: number p of the part, from 0.
        num_parts: number P of parts.

    Returns:
        Bool tensor [count], True for the parameters p·N/P .. (p + 1)·N/P.

    Raises:
        ConfigError: `part` is not from 0 to `num_parts` less one.
    """
    if not 0 <= as_integer(part, "part") < as_integer(num_parts, "num_parts"):
        raise ConfigError(f"part {part} of {num_parts}: must be from 0 to {num_parts} less one")
    return torch.arange(count) * num_parts // count == part


def _measured(
    angles: Tensor, simulator: Simulator, measure: Measure, only: Tensor | None
) -> Tensor:
    """The values [B, M] of `measure` at angles [B, G] of all gates."""
    measured: Tensor = _Shift.apply(angles, simulator, measure, only)  # type: ignore[no-untyped-call]
    return measured


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, angles: Tensor, simulator: Simulator, measure: Measure, only: Tensor | None
    ) -> Tensor:
        ctx.simulator, ctx.measure, ctx.only = simulator, measure, only
        ctx.save_for_backward(angles)
        measured = measure(simulator.state_at(angles))
        if not isinstance(measured, Tensor) or measured.shape[:-1] != (len(angles),):
            raise ConfigError(
                f"measure must find [B, M] of B = {len(angles)} states, not {kind_of(measured)}"
            )
        return measured

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (angles,) = ctx.saved_tensors
        places, coefficients, shifts = _terms(ctx.simulator, ctx.only)
        angle_gradient = torch.zeros_like(angles)
        chunk = max(1, _AMPLITUDES >> ctx.simulator.circuit.num_qubits)
        for row in range(len(angles)):
            for first in range(0, len(places), chunk):
                own = slice(first, first + chunk)
                moved = angles[row].repeat(len(places[own]), 1)
                moved[torch.arange(len(moved)), places[own]] += shifts[own].to(moved)
                measured = _measured(moved, ctx.simulator, ctx.measure, ctx.only)
                values = measured @ gradient[row]
                angle_gradient[row].index_add_(
                    0, places[own], values * coefficients[own].to(values)
                )
        if torch.is_grad_enabled() and ctx.only is not None:
            angle_gradient = only_once(angle_gradient.detach(), _OF_SOME, gradient, angles)
        return angle_gradient, None, None, None


def _terms(simulator: Simulator, only: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """For each of E evaluations, the number of the shifted angle, its coefficient and its shift.

    Returns:
        Three tensors [E]: int64, float64 and float64.
    """
    terms = []
    for place, gate in enumerate(simulator.circuit.with_angle):
        indices = () if gate.angle is None else gate.angle.parameters
        if any(only is None or only[index] for index in indices):
            rule = shift_rule(gate.kind, bool(gate.controls))
            terms += [(place, coefficient, shift) for coefficient, shift in rule]
    device = simulator.device
    places = torch.tensor([t[0] for t in terms], dtype=torch.int64, device=device)
    numbers = torch.tensor([t[1:] for t in terms], dtype=torch.float64, device=device)
    coefficients, shifts = numbers.view(-1, 2).unbind(1)
    return places, coefficients, shifts
