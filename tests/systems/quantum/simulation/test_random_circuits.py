"""Random circuits by Qiskit, by a dense simulation and here: states, gradients, second derivatives.

Circuits are made of standard gates, composite and controlled ones, and gates of the user's own that
have names of known ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.systems.quantum.circuits import dense_state, random_circuit, some_parameters

from lockstep.quantum import bound, from_qasm, from_qiskit, to_qasm, to_qiskit
from lockstep.systems.quantum.circuits.circuit import Circuit
from lockstep.systems.quantum.simulation.gradients import shifted
from lockstep.systems.quantum.simulation.measure import PauliSum
from lockstep.systems.quantum.simulation.statevector import Simulator, statevector

qiskit = pytest.importorskip("qiskit")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Qiskit about itself

from qiskit import qasm2, qasm3  # noqa: E402
from qiskit.circuit import Parameter, QuantumCircuit  # noqa: E402
from qiskit.circuit.library import get_standard_gate_name_mapping  # noqa: E402
from qiskit.quantum_info import Statevector  # noqa: E402

STANDARD = {
    name: each for name, each in get_standard_gate_name_mapping().items()
    if getattr(each, "num_clbits", 1) == 0 and name not in ("reset", "delay", "global_phase")
}  # fmt: skip
NAMES = ["h", "x", "rx", "cu", "barrier", "measure", "unitary", "u", "mine"]
PARAMETERS = [Parameter(f"p{i}") for i in range(12)]
VALUES = dict(zip(PARAMETERS, some_parameters(12).tolist(), strict=True))


def qiskit_circuit(
    source: random.Random, num_qubits: int, num_gates: int, depth: int, parametric: bool
) -> QuantumCircuit:
    circuit = QuantumCircuit(num_qubits, global_phase=source.uniform(-3, 3))
    for _ in range(num_gates):
        kind = source.choice(["standard"] * 4 + ["own"] * (depth > 0) + ["controlled"])
        if kind == "own":
            width = source.randint(1, num_qubits)
            operation = qiskit_circuit(source, width, 3, depth - 1, parametric).to_gate()
            operation.name = source.choice(NAMES) if parametric else f"g{source.randrange(10**9)}"
        else:
            operation = standard(source, parametric and kind == "standard")
        if kind == "controlled" or (kind == "own" and source.random() < 0.4):
            state = source.randint(0, 1)
            annotated = kind == "own" and parametric
            operation = operation.control(1, ctrl_state=state, annotated=annotated)
        if operation.num_qubits <= num_qubits:
            circuit.append(operation, source.sample(range(num_qubits), operation.num_qubits))
    return circuit


def standard(source: random.Random, parametric: bool) -> Any:
    template = STANDARD[source.choice(sorted(STANDARD))]
    values: list[Any] = [source.uniform(-3, 3) for _ in template.params]
    if parametric:
        for place in range(len(values)):
            if source.random() < 0.3:
                values[place] = source.choice([1, -0.5]) * source.choice(PARAMETERS) + 0.1
    return template.base_class(*values)


def check_qiskit(source: random.Random, num_qubits: int) -> None:
    circuit = qiskit_circuit(source, num_qubits, 10, 2, parametric=True)
    expected = Statevector(circuit.assign_parameters({p: VALUES[p] for p in circuit.parameters}))
    values = torch.tensor([VALUES[p] for p in circuit.parameters], dtype=torch.float64)
    found = statevector(from_qiskit(circuit), values)
    assert np.abs(found.numpy() - expected.data).max() < 1e-11


def check_texts(source: random.Random, num_qubits: int) -> None:
    """What Qiskit writes is read as Qiskit reads it; writing loses phases of definitions."""
    circuit = qiskit_circuit(source, num_qubits, 6, 1, parametric=False)
    for qasm in (qasm2, qasm3):
        text = qasm.dumps(circuit)
        expected = Statevector(qasm.loads(text, **LEGACY[qasm])).data
        assert np.abs(statevector(from_qasm(text)).numpy() - expected).max() < 1e-10


LEGACY: dict[Any, dict[str, Any]] = {
    qasm2: {"custom_instructions": qasm2.LEGACY_CUSTOM_INSTRUCTIONS}, qasm3: {},
}  # fmt: skip


def check_ours(source: random.Random, num_qubits: int) -> None:
    circuit, theta = random_circuit(source, num_qubits, 12), some_parameters(12)
    expected = statevector(circuit, theta)
    assert (dense_state(circuit, theta) - expected).abs().max() < 1e-12
    used = sorted({g.angle.index for g in circuit.with_angle if g.angle.index is not None})
    again = from_qiskit(to_qiskit(circuit))
    assert (statevector(again, theta[used]) - expected).abs().max() < 1e-11
    numbers = bound(circuit, theta)
    there_and_back = from_qasm(to_qasm(numbers, 2))
    assert (statevector(there_and_back) - expected).abs().max() < 1e-11
    check_derivatives(circuit, theta)


def check_derivatives(circuit: Circuit, theta: torch.Tensor) -> None:
    pad = "I" * (circuit.num_qubits - 2)
    terms = PauliSum({f"Z{pad}Z": 0.7, f"X{pad}Y": 0.5, f"Y{pad}I": -0.3})
    simulator, direction = Simulator(circuit), some_parameters(2, 12)[1]
    paths = [
        lambda at: terms.expectation(dense_state(circuit, at)),
        lambda at: terms.expectation(simulator.state(at)),
        lambda at: terms.expectation(simulator.state(at.expand(2, -1)))[1],
        lambda at: shifted(simulator, at, lambda s: terms.expectation(s)[:, None])[0],
    ]
    results = []
    for path in paths:
        at = theta.clone().requires_grad_()
        value = path(at) * at.cos().sum() + at.pow(3).sum()
        (once,) = torch.autograd.grad(value, at, retain_graph=True)
        (first,) = torch.autograd.grad(value, at, create_graph=True)
        (second,) = torch.autograd.grad(first @ direction, at)
        results.append(torch.stack([once, first.detach(), second]))
    for result in results[1:]:
        assert (result - results[0]).abs().max() < 1e-10


CHECKS = [check_qiskit, check_texts, check_ours]


@pytest.mark.parametrize("check", CHECKS)
def test_random_circuits(check: Callable[[random.Random, int], None]) -> None:
    for seed in range(8):
        check(random.Random(seed), 2 + seed % 3)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_many_random_circuits(check: Callable[[random.Random, int], None]) -> None:
    for seed in range(1000, 1300):
        check(random.Random(seed), 2 + seed % 4)
