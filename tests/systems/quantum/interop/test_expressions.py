"""Circuits with formulas as angles: those of Qiskit's library, and random ones beside the peers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.systems.quantum.circuits import random_angle, some_parameters

from lockstep.errors import ConfigError
from lockstep.quantum import from_qasm, from_qiskit, to_qasm, to_qiskit
from lockstep.systems.quantum.circuits.angles import Angle, Expression, parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate
from lockstep.systems.quantum.layer import Layer
from lockstep.systems.quantum.simulation.measure import PauliSum
from lockstep.systems.quantum.simulation.statevector import Simulator, statevector

pytest.importorskip("qiskit")
from qiskit.circuit import Parameter, ParameterVector, QuantumCircuit
from qiskit.quantum_info import SparsePauliOp, Statevector

pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers about themselves


def state_of(circuit: QuantumCircuit, parameters: torch.Tensor) -> torch.Tensor:
    values = dict(zip(circuit.parameters, parameters.tolist(), strict=True))
    return torch.from_numpy(Statevector(circuit.assign_parameters(values)).data.copy())


def used(circuit: Circuit) -> list[int]:
    return sorted({i for g in circuit.with_angle for i in g.angle.parameters})


def library() -> dict[str, QuantumCircuit]:
    from qiskit.circuit import library as known

    cost = SparsePauliOp(["ZZII", "IZZI", "IIZZ"], [1.0, -0.5, 2.0])
    excitations = [
        SparsePauliOp(["XYII", "YXII"], [0.5, -0.5]),
        SparsePauliOp(["XXXY", "YYXY"], [0.125, 0.125]),
    ]
    return {
        "ZZFeatureMap": known.ZZFeatureMap(3, reps=2),
        "PauliFeatureMap": known.PauliFeatureMap(3, paulis=["Z", "YY", "ZXZ"]),
        "QAOAAnsatz": known.QAOAAnsatz(cost, reps=2),
        "EvolvedOperatorAnsatz": known.EvolvedOperatorAnsatz(excitations, reps=2),
        "EfficientSU2": known.EfficientSU2(3, reps=1),
        "TwoLocal": known.TwoLocal(3, ["ry", "rz"], "cz", reps=1),
        "zz_feature_map": known.zz_feature_map(3),
        "qaoa_ansatz": known.qaoa_ansatz(cost, reps=1),
    }


def test_qiskits_feature_maps_and_ansaetze_load_and_go_there_and_back() -> None:
    for name, source in library().items():
        circuit = from_qiskit(source)
        theta = some_parameters(circuit.num_parameters)
        expected = state_of(source, theta)
        assert (statevector(circuit, theta) - expected).abs().max() < 1e-12, name
        back = from_qiskit(to_qiskit(circuit))
        assert (statevector(back, theta) - expected).abs().max() < 1e-12, name
        text = to_qasm(circuit, 3)
        assert (statevector(from_qasm(text), theta) - expected).abs().max() < 1e-12, name


def test_a_feature_map_and_an_ansatz_train() -> None:
    circuits = library()
    whole = circuits["ZZFeatureMap"].compose(circuits["TwoLocal"])
    names = [p.name for p in whole.parameters]
    inputs = [number for number, name in enumerate(names) if name.startswith("x")]
    torch.manual_seed(0)
    layer = Layer(from_qiskit(whole), "ZZZ", inputs, dtype=torch.float64)
    assert layer.num_inputs == 3
    assert len(layer.weights) == 12
    x = some_parameters(8, 3)
    y = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)
    optimizer, losses = torch.optim.Adam(layer.parameters(), 0.2), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (layer(x)[:, 0] - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def one_angle(angle: Any) -> QuantumCircuit:
    circuit = QuantumCircuit(1)
    circuit.h(0)
    circuit.rz(angle, 0)
    circuit.rx(0.3, 0)
    return circuit


X = ParameterVector("x", 2)


@pytest.mark.parametrize(
    "angle",
    [
        X[0] + X[1], X[0] * X[0], X[0] - 2 * X[1] + 1, X[0] / X[1], 1 / X[0], X[0] ** -1.5,
        X[0].sin().arcsin() + X[1].cos().arccos(), X[0].tan() * X[1].arctan(), X[0].exp().log(),
        abs(X[0]) * X[1].sign(), X[0].conjugate() * X[1], -X[0] * X[1] * 3.25, X[0] - X[0] + X[1],
    ],
    ids=str,
)  # fmt: skip
def test_qiskits_functions_are_read_and_written(angle: Any) -> None:
    source = one_angle(angle)
    values = some_parameters(2).abs()[: len(source.parameters)]
    circuit = from_qiskit(source)
    assert (statevector(circuit, values) - state_of(source, values)).abs().max() < 1e-12
    back = from_qiskit(to_qiskit(circuit))
    assert (statevector(back, values[used(circuit)]) - state_of(source, values)).abs().max() < 1e-12


def test_what_is_linear_is_read_as_an_angle() -> None:
    (_, rotation, _) = from_qiskit(one_angle(2 * Parameter("a") + 0.5)).gates
    assert rotation.angle == Angle(0.5, 0, 2.0)
    (_, rotation, _) = from_qiskit(one_angle(X[0] * X[1])).gates
    assert isinstance(rotation.angle, Expression)


def test_qasm_reads_functions_powers_and_definitions() -> None:
    text = """OPENQASM 3.0; include "stdgates.inc"; input float[64] b; input float[64] a;
    gate twice(t) q { rz(2*sin(t)*cos(t)) q; }
    qubit[1] q; h q[0]; rx(a**2 - sqrt(a)*b**3/2 + cos(pi/3)**2) q[0]; twice(a*b) q[0];
    ry(log(exp(b)) + arctan(a) + arcsin(0.5) + tan(0.2) * arccos(a/9)) q[0];"""
    circuit = from_qasm(text)
    b, a = 0.7, 1.3
    angles = circuit.angles(torch.tensor([b, a], dtype=torch.float64)).tolist()
    expected = [
        a**2 - a**0.5 * b**3 / 2 + 0.25,
        np.sin(2 * a * b),
        b + np.arctan(a) + np.arcsin(0.5) + np.tan(0.2) * np.arccos(a / 9),
    ]
    assert angles == pytest.approx(expected, abs=1e-12)


HEAD = 'OPENQASM 3.0; include "stdgates.inc"; input float[64] a; qubit[1] q; '


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_qiskit(one_angle(X[0] * 1j)), r"gate rz: angle .* is not supported"),
        (lambda: from_qasm(HEAD + "rx(ceiling(a)) q[0];"), "ceiling of 1: known functions"),
        (lambda: from_qasm(HEAD + "rx(sin(a, a)) q[0];"), "sin of 2: known functions"),
        (lambda: from_qasm(HEAD + "rx(sin(q)) q[0];"), "sin: its argument must be a number"),
        (lambda: from_qasm(HEAD + "rx(log(-1.0)) q[0];"), "OpenQASM: .*"),
        (lambda: from_qasm(HEAD + "rx((-2.0)**a) q[0];"), r"a power of -2\.0 with a parameter"),
        (
            lambda: to_qasm(Circuit(1, [gate("rx", 0, angle=abs(parameter(0)))]), 3),
            r"angle abs\(θ\[0\]\): OpenQASM 3 has no abs",
        ),
        (
            lambda: to_qasm(Circuit(1, [gate("rx", 0, angle=parameter(0) ** 2)])),
            "OpenQASM 2 has no parameters",
        ),
        (
            lambda: to_qiskit(Circuit(1, [gate("rx", 0, angle=(-2.0) ** parameter(0))])),
            r"Qiskit has no powers of -2\.0",
        ),
    ],
)
def test_what_cannot_be_read_or_written_is_one_clear_message(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


ROTATIONS = {"rx": "RX", "ry": "RY", "rz": "RZ", "rxx": "IsingXX", "ryy": "IsingYY",
             "rzz": "IsingZZ", "p": "PhaseShift", "crx": "CRX", "cry": "CRY",
             "crz": "CRZ"}  # fmt: skip


def random_gates(source: random.Random, num_qubits: int, count: int) -> list[Gate]:
    gates = []
    for _ in range(count):
        name = source.choice([*ROTATIONS, "h", "cx", "cz"])
        width = 2 if name in ("rxx", "ryy", "rzz") or name.startswith("c") else 1
        qubits = source.sample(range(num_qubits), width)
        angle = random_angle(source, 4, 2) if name in ROTATIONS else None
        gates.append(gate(name, *qubits, angle=angle))
    return gates


def pennylanes(circuit: Circuit, theta: torch.Tensor) -> torch.Tensor:
    """<Z_0 X_last> + <Y_1> of the circuit, whose angles PennyLane differentiates."""
    qml = pytest.importorskip("pennylane")
    fixed = {"h": "Hadamard", "x": "CNOT", "z": "CZ"}

    @qml.qnode(qml.device("default.qubit", wires=circuit.num_qubits), diff_method="backprop")
    def measured(values: Any) -> Any:
        each = iter(values)
        for own in circuit.gates:
            wires = [*own.controls, *own.qubits]
            if own.angle is None:
                getattr(qml, fixed[own.name])(wires=wires)
            else:
                name = ROTATIONS["c" * len(own.controls) + own.name]
                getattr(qml, name)(next(each), wires=wires)
        last = circuit.num_qubits - 1
        return qml.expval(qml.Z(0) @ qml.X(last)), qml.expval(qml.Y(1))

    # Angles from their texts, by torch, one after the other.
    functions = {n: getattr(torch, n) for n in ("sin", "cos", "tan", "arcsin", "arccos", "arctan",
                                                "exp", "log", "abs")}  # fmt: skip
    angles = [
        eval(str(own.angle), {"__builtins__": {}}, {**functions, "θ": theta})
        for own in circuit.with_angle
    ]
    return sum(measured(torch.stack([torch.as_tensor(a).double() for a in angles])))


def check(seed: int, twice: bool) -> None:
    """Compare states, values, gradients, and second derivatives if `twice`."""
    source = random.Random(seed)
    num_qubits = source.randint(2, 4)
    circuit = Circuit(num_qubits, [*random_gates(source, num_qubits, 12), gate(
        "ry", 0, angle=random_angle(source, 4))], 4)  # fmt: skip
    theta = some_parameters(4)
    expected = statevector(circuit, theta)
    states = [state_of(to_qiskit(circuit), theta[used(circuit)])]
    states.append(statevector(from_qiskit(to_qiskit(circuit)), theta[used(circuit)]))
    if source.random() < 0.3:  # its parser takes long
        states.append(statevector(from_qasm(to_qasm(circuit, 3)), theta))
    for state in states:
        assert (state - expected).abs().max() < 1e-10, f"seed {seed}"

    middle = "I" * (num_qubits - 2)
    terms, simulator = PauliSum({f"X{middle}Z": 1.0, f"{middle}YI": 1.0}), Simulator(circuit)
    results = []
    for function in (
        lambda at: terms.expectation(simulator.state(at)),
        lambda at: pennylanes(circuit, at),
        lambda at: terms.expectation(simulator.state(at.expand(2, -1)))[1],
    ):
        at = theta.clone().requires_grad_()
        value = function(at)
        (first,) = torch.autograd.grad(value, at, create_graph=twice)
        results.append(torch.stack([value.detach().expand(4), first.detach()]))
        if twice:
            (second,) = torch.autograd.grad(first.sum(), at)
            results[-1] = torch.cat([results[-1], second[None]])
    for result in results[1:]:
        assert (result - results[0]).abs().max() < 1e-10 * results[0].abs().max().clamp(min=1), (
            f"seed {seed}"
        )


@pytest.mark.slow
def test_random_formulas_are_the_peers() -> None:
    for seed in range(8):
        check(seed, twice=seed % 4 == 0)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # on a machine that others use
@pytest.mark.parametrize("first", [5000, 5100, 5200])
def test_many_random_formulas_are_the_peers(first: int) -> None:
    for seed in range(first, first + 100):
        print(seed)
        check(seed, twice=True)
