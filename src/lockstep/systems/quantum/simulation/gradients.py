"""Gradients by the parameter-shift rule, and the Fubini-Study metric of any circuit.

The rule holds for functions that are linear in the state's density matrix: probabilities and
expectation values. Functions of these, such as a logarithm, are differentiated by the chain rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import Angle, as_integer, kind_of
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate
from lockstep.systems.quantum.circuits.gates import shift_rule
from lockstep.systems.quantum.simulation.adjoint import is_transformed, only_once
from lockstep.systems.quantum.simulation.parts import check_fits
from lockstep.systems.quantum.simulation.statevector import Simulator

_TWO_TERMS = 2


def frequencies(circuit: Circuit, only: Sequence[int] | None = None) -> Tensor:
    """The frequency of expectation values, as sinusoids of each parameter.

    Args:
        circuit: circuit.
        only: numbers of the parameters; all by default.

    Returns:
        Frequencies, above 0, float64, one for each of these parameters. A parameter without gates
        has 1.

    Raises:
        ConfigError: a parameter has several: it is used by several gates, by a controlled rotation,
            or in a formula.
    """
    users: dict[int, list[Gate]] = {}
    for gate in circuit.with_angle:
        for number in gate.parameters:
            users.setdefault(number, []).append(gate)
    numbers = range(circuit.num_parameters) if only is None else only
    return torch.tensor([_frequency(n, users.get(n, [])) for n in numbers], dtype=torch.float64)


def _frequency(number: int, users: Sequence[Gate]) -> float:
    if not users:
        return 1.0
    gate = users[0]
    if len(users) > 1:
        problem = f"is used by {len(users)} gates"
    elif not isinstance(gate.angle, Angle):
        problem = f"is part of the formula {gate.angle}"
    elif len(shift_rule(gate.kind, bool(gate.controls))) > _TWO_TERMS:
        problem = f"is used by a controlled {gate.name}"
    else:
        return abs(float(gate.angle.scale)) or 1.0
    raise ConfigError(
        f"parameter {number} {problem}: expectation values are no sinusoid of one frequency in it"
    )


_OF_SOME = (
    "second derivatives of some parameters' shifts are not supported: they are no sum over parts; "
    "leave `only` out"
)

_AMPLITUDES = 1 << 17
"""About how many amplitudes are simulated at a time: as many as fit into a core's cache."""

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
            order are not a sum over parts.

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
                part = slice(first, first + chunk)
                moved = angles[row].repeat(len(places[part]), 1)
                moved[torch.arange(len(moved)), places[part]] += shifts[part].to(moved)
                measured = _measured(moved, ctx.simulator, ctx.measure, ctx.only)
                values = measured @ gradient[row]
                summands = values * coefficients[part].to(values)
                angle_gradient[row].index_add_(0, places[part], summands)
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
        if any(only is None or only[index] for index in gate.parameters):
            rule = shift_rule(gate.kind, bool(gate.controls))
            terms += [(place, coefficient, shift) for coefficient, shift in rule]
    device = simulator.device
    places = torch.tensor([t[0] for t in terms], dtype=torch.int64, device=device)
    numbers = torch.tensor([t[1:] for t in terms], dtype=torch.float64, device=device)
    coefficients, shifts = numbers.view(-1, 2).unbind(1)
    return places, coefficients, shifts


Approximation = Literal["full", "block-diagonal", "diagonal"]

_CHUNK_BYTES = 1 << 26
"""About how many bytes of derivatives of states are computed at a time."""
_COPIES = 4
"""Derivatives in memory: real and imaginary parts as computed, as complex numbers, conjugated."""


def metric_tensor(
    simulator: Simulator,
    parameters: Tensor,
    only: Sequence[int] | None = None,
    approximation: Approximation = "full",
) -> Tensor:
    """g_jk = Re(<∂_j ψ|∂_k ψ> - <∂_j ψ|ψ><ψ|∂_k ψ>) (Stokes et al., Quantum 4, 269 (2020), eq. 4).

    Args:
        simulator: simulator of the circuit.
        parameters: real tensor [..., num_parameters].
        only: numbers of the p parameters of rows and columns; all by default.
        approximation: `full`; `block-diagonal`: entries of two parameters in the same layer of the
            circuit only (`layers`), the others 0; `diagonal`.

    Returns:
        Metric [..., p, p], real, symmetric and positive semidefinite; without gradient.

    Raises:
        ConfigError: an argument has the wrong type or shape, the state is split over ranks, or the
            derivatives do not fit into memory.
    """
    if not isinstance(simulator, Simulator):
        raise ConfigError(f"a metric needs a Simulator, not {kind_of(simulator)}")
    circuit = simulator.circuit
    if approximation not in get_args(Approximation):
        raise ConfigError(
            f"approximation={approximation!r}: must be one of {', '.join(get_args(Approximation))}"
        )
    circuit.check_parameters(parameters)
    wanted = range(circuit.num_parameters) if only is None else only
    numbers = [as_integer(number, "only") for number in wanted]
    if any(not 0 <= number < circuit.num_parameters for number in numbers):
        raise ConfigError(f"only: there are parameters 0 to {circuit.num_parameters - 1}")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"only {numbers}: must be different parameters")
    rows = parameters.detach().to(simulator.device, simulator.dtype.to_real())
    rows = rows.reshape(parameters.shape[:-1].numel(), circuit.num_parameters)
    size = max(1, len(numbers)) * simulator.dtype.itemsize << circuit.num_qubits
    check_fits(
        f"the metric of {len(numbers)} parameters on {circuit.num_qubits} qubits",
        _COPIES * size,
        simulator.device,
        "take fewer parameters (`only`)",
    )
    index = torch.tensor(numbers, dtype=torch.int64, device=simulator.device)

    def metric(row: Tensor) -> Tensor:
        def state(own: Tensor) -> Tensor:
            return torch.view_as_real(simulator.state(row.index_copy(0, index, own)))

        return fubini_study_of(state, row[index])

    chunk = max(1, _CHUNK_BYTES // size)
    metrics = torch.func.vmap(metric, chunk_size=chunk)(rows) if len(rows) else rows[:, :0, None]
    metrics = metrics.reshape(*parameters.shape[:-1], len(numbers), len(numbers))
    if approximation == "full":
        return metrics
    own = layers(circuit) if approximation == "block-diagonal" else range(circuit.num_parameters)
    ids = torch.tensor(own, device=simulator.device)[index]
    return metrics * (ids[:, None] == ids)


def layers(circuit: Circuit) -> list[int]:
    """For each parameter, the number of the layer that it belongs to.

    A layer holds gates with parameters none of which comes after another one on the same qubit.
    Layers that share a parameter count as one.
    """
    depth = [0] * circuit.num_qubits
    joined: list[set[int]] = []
    by_layer: dict[int, set[int]] = {}
    for gate in circuit.gates:
        layer = max(depth[q] for q in gate.every_qubit)
        by_layer.setdefault(layer, set()).update(gate.parameters)
        for qubit in gate.every_qubit:
            depth[qubit] = layer + bool(gate.parameters)
    for members in by_layer.values():
        apart = [block for block in joined if not block & members]
        joined = [*apart, members.union(*(block for block in joined if block & members))]
    numbers = [-1] * circuit.num_parameters
    for number, block in enumerate(joined):
        for parameter in block:
            numbers[parameter] = number
    return numbers


def fubini_study_of(state: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The metric [p, p] of a state as a function of p real parameters (equation 4 again).

    Args:
        state: function from parameters [p] to the real view of a state, [amplitudes, 2].
        at: the parameters, [p].
    """
    phi = torch.view_as_complex(state(at))
    moved = torch.func.jacfwd(state)(at)  # [amplitudes, 2, p]
    jacobian = torch.complex(moved[:, 0], moved[:, 1])
    along = phi.conj() @ jacobian
    return (jacobian.mH @ jacobian).real - torch.outer(along.conj(), along).real
