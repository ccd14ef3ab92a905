"""Qiskit and PennyLane find the same states and gradients."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.systems.quantum.circuits import circuits, random_unitary, ring, some_parameters

from lockstep import quantum
from lockstep.errors import ConfigError
from lockstep.quantum import (
    bound,
    drawing,
    from_qasm,
    from_qiskit,
    to_qasm,
    to_qiskit,
)
from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, gate, unitary
from lockstep.systems.quantum.simulation.gradients import shifted
from lockstep.systems.quantum.simulation.measure import PauliSum
from lockstep.systems.quantum.simulation.statevector import Simulator, statevector
from lockstep.systems.quantum.transformer.model import QuantumTransformer, Sentences

qiskit = pytest.importorskip("qiskit")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers about themselves


def state_of(circuit: Any, parameters: torch.Tensor) -> torch.Tensor:
    from qiskit.quantum_info import Statevector

    values = dict(zip(circuit.parameters, parameters.tolist(), strict=True))
    return torch.from_numpy(Statevector(circuit.assign_parameters(values)).data.copy())


@given(circuits(most_qubits=4))
@settings(max_examples=15, deadline=None)
def test_states_are_qiskits(circuit: Circuit) -> None:
    used = sorted({g.angle.index for g in circuit.with_angle if g.angle.index is not None})
    parameters = some_parameters(3)
    expected = state_of(to_qiskit(circuit), parameters[used])
    assert (statevector(circuit, parameters) - expected).abs().max() < 1e-12


def test_qiskits_circuits_are_read() -> None:
    from qiskit.circuit import Parameter, QuantumCircuit
    from qiskit.circuit.library import QFTGate, U3Gate, XGate

    a, b = Parameter("b"), Parameter("a")  # Qiskit sorts them by name
    circuit = QuantumCircuit(4, 2, global_phase=0.3)
    circuit.h(0)
    circuit.u(a, 0.2, 2 * b + 0.1, 1)
    circuit.append(U3Gate(0.1, 0.2, 0.3).control(1, ctrl_state=0), [2, 3])
    circuit.append(XGate().control(3, ctrl_state=5), [0, 1, 3, 2])
    circuit.crz(-b, 0, 3)
    circuit.cswap(1, 0, 2)
    circuit.rzx(0.7, 1, 2)
    circuit.ecr(0, 3)
    circuit.barrier()
    circuit.append(QFTGate(3), [3, 1, 0])
    circuit.unitary(random_unitary(2, 1).numpy(), [2, 0])
    parameters = some_parameters(2)
    expected = state_of(circuit, parameters)
    circuit.measure([0, 1], [0, 1])
    read = from_qiskit(circuit)
    assert (statevector(read, parameters) - expected).abs().max() < 1e-12


def test_qasm_there_and_back() -> None:
    circuit = Circuit(3, [*bound(ring(3, 1), some_parameters(9)).gates, gate("ccx", 0, 1, 2)])
    expected = statevector(circuit)
    for version in (2, 3):
        again = from_qasm(to_qasm(circuit, version))
        assert (statevector(again) - expected).abs().max() < 1e-12
    with pytest.raises(ConfigError, match="OpenQASM 2 has no parameters, the circuit has 6"):
        to_qasm(ring(2, 1))
    with_parameters = from_qasm(to_qasm(ring(2, 1), 3))
    assert with_parameters.num_parameters == 6


def test_a_drawing_shows_the_gates() -> None:
    text = drawing(Circuit(2, [gate("h", 0), gate("crx", 0, 1, angle=parameter(0))]))
    assert "┤ H ├" in text
    assert "Rx(θ[0])" in text


QASM = 'OPENQASM 2.0;\ninclude "qelib1.inc";\nqreg q[2];\ncreg c[2];\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (QASM + "measure q[0] -> c[0];\nh q[0];\n", "measurement in the middle: qubit 0 .* by h"),
        (QASM + "opaque magic a;\nmagic q[0];\n", "gate magic: not supported"),
        (QASM + "reset q[0];\n", "gate reset: not supported"),
        (QASM + "foo q[0];\n", "OpenQASM: .*foo"),
    ],
)
def test_bad_qasm_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_qasm(text)


def test_without_qiskit_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = tuple(f"lockstep.systems.quantum.{name}" for name in ("interop", "commands"))
    for name in [name for name in sys.modules if name.startswith(importing)]:
        monkeypatch.delitem(sys.modules, name)
    for extra in ("qiskit", "openqasm3", "qiskit_qasm3_import"):
        monkeypatch.setitem(sys.modules, extra, None)
    importlib.import_module("lockstep.systems.quantum.commands")
    for call in (
        lambda: quantum.to_qiskit(ring(2, 1)),
        lambda: quantum.to_qasm(ring(2, 1)),
        lambda: quantum.from_qasm(QASM),
        lambda: quantum.dynamic_from_qasm(QASM),
    ):
        with pytest.raises(ConfigError, match=r'pip install "lockstep-train\[quantum\]"'):
            call()


@pytest.mark.parametrize("num_qubits", [4, 6])
def test_gradients_are_pennylanes(num_qubits: int) -> None:
    qml = pytest.importorskip("pennylane")
    circuit = ring(num_qubits, 2)
    extra = [gate("crx", 0, 1, angle=parameter(0)), gate("rzz", 1, 2, angle=parameter(1, 0.5, 0.2))]
    matrix = random_unitary(2, 3)
    circuit = Circuit(num_qubits, [*circuit.gates, *extra, unitary(matrix, 3, 1)])
    letters = {"Z": qml.Z, "X": qml.X, "Y": qml.Y}

    @qml.qnode(qml.device("default.qubit", wires=num_qubits), diff_method="backprop")
    def expectation(values: Any) -> Any:
        number = 0
        for _ in range(2):
            for qubit in range(num_qubits):
                for rotation in (qml.RX, qml.RY, qml.RZ):
                    rotation(values[number], wires=qubit)
                    number += 1
            for qubit in range(num_qubits):
                qml.CNOT(wires=[qubit, (qubit + 1) % num_qubits])
        qml.CRX(values[0], wires=[0, 1])
        qml.IsingZZ(0.5 * values[1] + 0.2, wires=[1, 2])
        qml.QubitUnitary(matrix.numpy(), wires=[1, 3])
        return qml.expval(0.5 * letters["Z"](0) @ letters["X"](2) - letters["Y"](3))

    parameters = some_parameters(circuit.num_parameters)
    theirs = parameters.clone().requires_grad_()
    expectation(theirs).backward()
    pad = "I" * (num_qubits - 4)
    observable = PauliSum({pad + "IXIZ": 0.5, pad + "YIII": -1.0})
    ours = parameters.clone().requires_grad_()
    simulator = Simulator(circuit)
    observable.expectation(simulator.state(ours)).backward()
    assert (ours.grad - theirs.grad).abs().max() < 1e-12
    ours.grad = None
    shifted(simulator, ours, lambda s: observable.expectation(s)[:, None]).sum().backward()
    assert (ours.grad - theirs.grad).abs().max() < 1e-12


def test_the_transformers_circuit_in_qiskit() -> None:
    torch.manual_seed(0)
    transformer = QuantumTransformer(["a", "b", "c", "d"], 4)
    circuit = transformer.circuit([3, 1, 0, 2])
    angles = transformer.angles.detach().flatten()
    expected = state_of(to_qiskit(circuit), angles)
    assert (statevector(circuit, angles) - expected).abs().max() < 1e-12
    sentence = torch.tensor([[3, 1, 0, 2]]), torch.tensor([3]), torch.tensor([0])
    found = transformer(Sentences(*sentence))
    assert found.item() == pytest.approx(expected[0].abs().item() ** 2, abs=1e-12)
