"""The Fubini-Study metric of any circuit: how far its state moves with its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.checks import as_integer, kind_of
from lockstep.quantum.circuits.circuit import Circuit
from lockstep.quantum.simulation.memory import check_fits
from lockstep.quantum.simulation.statevector import Simulator

Approximation = Literal["full", "block-diagonal", "diagonal"]

_AT_ONCE = 1 << 26
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
        return _metric(simulator, row, index)

    chunk = max(1, _AT_ONCE // size)
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
        own = gate.angle.parameters if gate.angle is not None else ()
        by_layer.setdefault(layer, set()).update(own)
        for qubit in gate.every_qubit:
            depth[qubit] = layer + bool(own)
    for members in by_layer.values():
        apart = [block for block in joined if not block & members]
        joined = [*apart, members.union(*(block for block in joined if block & members))]
    numbers = [-1] * circuit.num_parameters
    for number, block in enumerate(joined):
        for parameter in block:
            numbers[parameter] = number
    return numbers


def _metric(simulator: Simulator, row: Tensor, index: Tensor) -> Tensor:
    def state(own: Tensor) -> Tensor:
        return torch.view_as_real(simulator.state(row.index_copy(0, index, own)))

    phi = torch.view_as_complex(state(row[index]))
    moved = torch.func.jacfwd(state)(row[index])  # [amplitudes, 2, p]
    jacobian = torch.complex(moved[:, 0], moved[:, 1])
    along = phi.conj() @ jacobian
    return (jacobian.mH @ jacobian).real - torch.outer(along.conj(), along).real
