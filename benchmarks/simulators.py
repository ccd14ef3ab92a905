"""Lockstep beside lightning.qubit and Qiskit Aer on one circuit: state, gradient and samples.

Part of `quantum.py`. TorchQuantum is not there: its last release (0.1.8) needs Qiskit below 1.0 and
TensorFlow, and cannot be imported beside a Qiskit of today.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pennylane as qml
import torch

from lockstep.systems.quantum.circuits.circuit import Circuit
from lockstep.systems.quantum.simulation.measure import PauliSum, probabilities, sample_frequencies
from lockstep.systems.quantum.simulation.statevector import Simulator
from page import Section, duration, ratio
from peers import aer_circuits
from peers.lightning_circuits import applied
from peers.lightning_circuits import gradient as lightning_gradient
from processes import Spread
from state_over_ranks import ring
from timing import Work, timed

SHOTS = 1000
_LAYERS = 4


def simulators(sizes: list[int], rounds: int) -> Section:
    """State, gradient and samples of a hardware-efficient circuit, by number of qubits."""
    section = Section(
        "Beside lightning.qubit and Qiskit Aer",
        "RX, RY, RZ on each qubit and a ring of CNOTs, 4 layers, complex128, one thread. "
        "Gradient: of <Z_0>, by adjoint differentiation, which Aer lacks. Samples: 1,000 "
        "measurements of all qubits.",
        ("qubits", "what", "Lockstep", "lightning.qubit", "Aer", "lightning / Lockstep",
         "Aer / Lockstep"),
    )  # fmt: skip
    for num_qubits in sizes:
        circuit = ring(num_qubits, _LAYERS)
        generator = torch.Generator().manual_seed(num_qubits)
        parameters = torch.randn(circuit.num_parameters, dtype=torch.float64, generator=generator)
        own_rounds = max(1, min(rounds, 24 >> max(0, num_qubits - 17)))
        for what, works in cases(circuit, parameters).items():
            times = timed(works, own_rounds)
            section.raw[f"{num_qubits} qubits, {what}"] = times
            if num_qubits % 8 == 4:  # the file with raw numbers has all
                section.rows.append(row(num_qubits, what, times))
    return section


def cases(circuit: Circuit, parameters: torch.Tensor) -> dict[str, dict[str, Work]]:
    """What is timed, after a check that all compute the same."""
    simulator = Simulator(circuit)
    num_qubits = circuit.num_qubits
    observable = PauliSum({"I" * (num_qubits - 1) + "Z": 1.0})

    @torch.no_grad()
    def state() -> torch.Tensor:
        return simulator.state(parameters)

    def gradient() -> torch.Tensor:
        own = parameters.clone().requires_grad_()
        return torch.autograd.grad(observable.expectation(simulator.state(own)), own)[0]

    def samples() -> torch.Tensor:
        return sample_frequencies(probabilities(state()), SHOTS)

    theirs = lightning(circuit, parameters)
    states = {"Lockstep": state, "lightning": theirs["state"]}
    states["Aer"] = aer_circuits.state(circuit, parameters)
    gradients = {"Lockstep": gradient, "lightning": lightning_gradient(circuit, parameters)}
    sampled = {"Lockstep": samples, "lightning": theirs["samples"]}
    sampled["Aer"] = aer_circuits.counts(circuit, parameters, SHOTS)
    check(states, gradients, sampled, float(observable.expectation(state())))
    return {"state": states, "gradient": gradients, "samples": sampled}


def lightning(circuit: Circuit, parameters: torch.Tensor) -> dict[str, Work]:
    """Functions that compute the state, qubit 0 its highest bit, and that sample it."""
    values = parameters.numpy()
    device = qml.device("lightning.qubit", wires=circuit.num_qubits)

    @qml.qnode(device)
    def state() -> Any:
        applied(circuit.gates, values)
        return qml.state()

    @qml.set_shots(SHOTS)
    @qml.qnode(device)
    def samples() -> Any:
        applied(circuit.gates, values)
        return qml.sample()

    return {"state": state, "samples": samples}


def check(
    states: Mapping[str, Work], gradients: Mapping[str, Work], sampled: Mapping[str, Work], z: float
) -> None:
    """Check that all simulate the same circuit."""
    own = states["Lockstep"]().numpy()
    axes = np.reshape(states["lightning"](), (2,) * (len(own).bit_length() - 1))
    assert np.abs(own - axes.T.flatten()).max() < 1e-12
    assert np.abs(own - states["Aer"]()).max() < 1e-12
    slopes = [np.asarray(work()) for work in gradients.values()]
    assert np.abs(slopes[0] - slopes[1]).max() < 1e-12
    means = {
        "Lockstep": 1 - 2 * float(sampled["Lockstep"]()[1::2].sum()),
        "lightning": 1 - 2 * float(np.mean(sampled["lightning"]()[:, 0])),
        "Aer": sum((-1) ** int(bits[-1]) * n for bits, n in sampled["Aer"]().items()) / SHOTS,
    }
    assert all(abs(mean - z) < 6 / SHOTS**0.5 for mean in means.values()), (means, z)


def row(num_qubits: int, what: str, times: Mapping[str, list[float]]) -> list[str]:
    """A line of the table."""
    names = ("Lockstep", "lightning", "Aer")
    cells = [duration(Spread.of(times[name])) if name in times else "" for name in names]
    for name in names[1:]:
        there = name in times
        cells.append(ratio(Spread.of_ratios(times[name], times["Lockstep"])) if there else "")
    return [str(num_qubits), what, *cells]
