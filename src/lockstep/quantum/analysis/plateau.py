"""Barren plateaus: how the variance of gradients falls with qubits and layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.analysis.ansaetze import Ansatz
from lockstep.quantum.analysis.draws import chunks, random_angles
from lockstep.quantum.circuits.circuit import Circuit, as_integer
from lockstep.quantum.simulation.measure import PauliSum
from lockstep.quantum.simulation.statevector import Simulator


def gradient_samples(
    circuit: Circuit,
    observable: PauliSum,
    samples: int = 200,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The gradient of <H> in all parameters, at random angles, by adjoint differentiation.

    Args:
        circuit: circuit to differentiate.
        observable: the sum H.
        samples: number of draws of the angles, at least 2.
        seed: seed of the angles, from 0 to 2^63 - 1.
        device: device on which states are computed.

    Returns:
        Gradients [samples, num_parameters], float64.

    Raises:
        ConfigError: an argument is out of range, the observable is of another number of qubits,
            the circuit has no parameter, or a state does not fit into memory.
    """
    if isinstance(circuit, Circuit) and not circuit.num_parameters:
        raise ConfigError("the circuit has no parameter, so no gradient")
    angles = random_angles(circuit, samples, seed).to(device)
    simulator = Simulator(circuit, device=device)
    found = []
    for rows in chunks(angles, circuit):
        own = rows.clone().requires_grad_()
        total = observable.expectation(simulator.state(own)).sum()
        found.append(torch.autograd.grad(total, own)[0])
    return torch.cat(found)


def gradient_variance(
    ansatz: Ansatz,
    num_qubits: int,
    num_layers: int,
    observable: PauliSum,
    *,
    samples: int = 200,
    circuits: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> float:
    """The variance of the derivative in the parameter in the middle of the circuit.

    Args:
        ansatz: family of circuits.
        num_qubits: number of qubits.
        num_layers: number of layers.
        observable: the sum H whose expectation value is differentiated.
        samples: number of draws of the angles for each circuit, at least 2.
        circuits: number of circuits, from as many seeds; more than one for random circuits.
        seed: seed of the circuits and of the angles; the next ones are those after it.
        device: device on which states are computed.

    Raises:
        ConfigError: as `gradient_samples`.
    """
    if as_integer(circuits, "circuits") < 1:
        raise ConfigError(f"circuits={circuits}: must be at least 1")
    found = []
    for own in range(seed, seed + circuits):
        circuit = ansatz(num_qubits, num_layers, own)
        gradients = gradient_samples(circuit, observable, samples, own, device)
        found.append(gradients[:, circuit.num_parameters // 2])
    return float(torch.cat(found).var())


def pauli_z(num_qubits: int, kind: Literal["local", "global"]) -> PauliSum:
    """Z on qubits 0 and 1 (`local`, as McClean et al.), or on all (`global`).

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in ("local", "global"):
        raise ConfigError(f"observable {kind!r}: must be local or global")
    count = min(2, num_qubits) if kind == "local" else num_qubits
    return PauliSum({"I" * (num_qubits - count) + "Z" * count: 1.0})


def two_design_variance(num_qubits: int) -> float:
    """The variance where what is before the gate and what is behind it are 2-designs.

    For a rotation exp(-iθP/2) about a Pauli string P and an observable that is a Pauli string:
    N² / (2 (N² - 1) (N + 1)) with N = 2^n; about 2^-n / 2 (from McClean et al. 2018, equation 7,
    with the integrals of first and second moments done).
    """
    size = 1 << num_qubits
    return size**2 / (2 * (size**2 - 1) * (size + 1))


def decay(num_qubits: Sequence[int], variances: Sequence[float]) -> float:
    """The factor b in variance ∝ exp(-b n), by least squares of the logarithm over n.

    Raises:
        ConfigError: there are fewer than two numbers of qubits, or a variance is not positive.
    """
    if len(set(num_qubits)) < 2 or min(variances) <= 0:
        raise ConfigError("a decay needs positive variances at two numbers of qubits or more")
    x = torch.tensor(num_qubits, dtype=torch.float64)
    y = torch.tensor([math.log(v) for v in variances], dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return -float(x @ y / (x @ x))
