"""Random circuits with noise: by definition, by PennyLane and by Qiskit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.systems.quantum.circuits import some_parameters
from tests.systems.quantum.noise.reference import (
    CHANNEL_VALUES,
    NUM_PARAMETERS,
    ByDefinition,
    random_dynamic,
)

from lockstep.quantum import (
    Channel,
    Circuit,
    DensitySimulator,
    DynamicCircuit,
    Measure,
    PauliSum,
    Simulator,
    channel,
    gate,
    misread,
    parameter,
    probabilities,
)
from lockstep.systems.quantum.circuits.circuit import Gate

THETA = some_parameters(NUM_PARAMETERS).sigmoid()


def check_definition(source: random.Random, num_qubits: int) -> None:
    circuit = random_dynamic(source, num_qubits, 9, classical=True, trained=True)
    expected = ByDefinition(circuit, THETA)
    found = DensitySimulator(circuit).run(THETA)
    for bits, branch in enumerate(found.branches.numpy()):
        assert np.abs(branch - expected.table.get(bits, 0)).max() < 1e-12
    assert found.bits.sum().item() == pytest.approx(1, abs=1e-12)
    assert (found.density.numpy() - expected.density()).__abs__().max() < 1e-12


def check_gradients(source: random.Random, num_qubits: int) -> None:
    circuit = random_dynamic(source, num_qubits, 5, classical=True, trained=True)
    simulator = DensitySimulator(circuit)
    pad = "I" * (num_qubits - 2)
    energy = PauliSum({f"X{pad}Y": 0.5, f"Z{pad}I": -0.3, f"I{pad}X": 0.8})

    def value(at: torch.Tensor) -> torch.Tensor:
        state = simulator.run(at)
        return state.expectation(energy) + state.bits[..., -1]

    at = THETA.clone().requires_grad_()
    torch.autograd.gradcheck(value, at, eps=1e-6, atol=1e-8)


def check_pennylane(source: random.Random, num_qubits: int) -> None:
    qml = pytest.importorskip("pennylane")
    circuit = random_dynamic(source, num_qubits, 10, classical=False)
    wires = list(reversed(range(num_qubits)))  # theirs has the first wire as the high bit
    angles, values = (iter(t.tolist()) for t in (circuit.angles(THETA), circuit.values(THETA)))

    @qml.qnode(qml.device("default.mixed", wires=wires))
    def theirs() -> Any:
        for each in circuit.operations:
            if isinstance(each, Gate):
                matrix = unitary_of(each, angles)
                control = list(reversed(each.controls))
                targets = list(reversed(each.qubits))
                state = [bool(b) for b in reversed(each.control_state)]
                if control:
                    qml.ControlledQubitUnitary(matrix, control + targets, control_values=state)
                else:
                    qml.QubitUnitary(matrix, targets)
            else:
                assert isinstance(each, Channel)
                append_pennylane(qml, each, [next(values) for _ in each.values])
        return qml.density_matrix(wires)

    found = DensitySimulator(circuit).run(THETA).density
    assert np.abs(found.numpy() - theirs()).max() < 1e-10


def unitary_of(each: Gate, angles: Any) -> Any:
    matrix = each.kind.constant
    if each.angle is not None:
        phase = next(angles) * each.kind.frequency
        matrix = matrix + np.cos(phase) * each.kind.cosine + np.sin(phase) * each.kind.sine
    return matrix.numpy()


def append_pennylane(qml: Any, each: Channel, values: list[float]) -> None:
    targets = list(reversed(each.qubits))
    if each.name == "QubitChannel":
        assert each.matrices is not None
        qml.QubitChannel(list(each.matrices.numpy()), wires=targets)
    elif each.name == "PauliError":
        qml.PauliError(each.operators[::-1], values[0], wires=targets)
    else:
        getattr(qml, each.name)(*values, wires=targets)


def check_qiskit(source: random.Random, num_qubits: int) -> None:
    pytest.importorskip("qiskit")
    from qiskit.quantum_info import DensityMatrix

    from lockstep.quantum import bound, dynamic_from_qiskit, dynamic_to_qiskit

    circuit = random_dynamic(source, num_qubits, 10, classical=False)
    gates = iter(
        bound(
            Circuit(num_qubits, [g for g in circuit.every if isinstance(g, Gate)], NUM_PARAMETERS),
            THETA,
        ).gates
    )
    numbers = [next(gates) if isinstance(each, Gate) else each for each in circuit.operations]
    made = dynamic_to_qiskit(DynamicCircuit(num_qubits, numbers))
    found = DensitySimulator(circuit).run(THETA).density.numpy()
    assert np.abs(found - DensityMatrix(made).data).max() < 1e-10
    again = DensitySimulator(dynamic_from_qiskit(made)).run().density.numpy()
    assert np.abs(found - again).max() < 1e-10


CHECKS = [check_definition, check_gradients, check_pennylane, check_qiskit]


@pytest.mark.filterwarnings("ignore")  # of the peers about themselves
@pytest.mark.parametrize("check", CHECKS)
def test_random_circuits_with_noise(check: Callable[[random.Random, int], None]) -> None:
    for seed in range(2 if check is check_gradients else 6):
        print("seed", seed)
        check(random.Random(seed), 2 + seed % 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", CHECKS)
def test_many_random_circuits_with_noise(check: Callable[[random.Random, int], None]) -> None:
    for seed in range(1000, 1100):
        print("seed", seed)
        check(random.Random(seed), 2 + seed % 3)


@pytest.mark.parametrize("t2", [0.3, 1.0, 1.7, 2.0])
def test_thermal_relaxation_is_the_textbooks(t2: float) -> None:
    noise = channel("ThermalRelaxationError", 0, pe=0.2, t1=1.0, t2=t2, tg=0.4)
    circuit = DynamicCircuit(1, [gate("ry", 0, angle=1.0), noise])
    found = DensitySimulator(circuit).run().density
    start = DensitySimulator(DynamicCircuit(1, [gate("ry", 0, angle=1.0)])).run().density
    left = np.exp(-0.4)
    assert found[1, 1].real.item() == pytest.approx(
        left * start[1, 1].real.item() + (1 - left) * 0.2
    )
    assert (found[0, 1] / start[0, 1]).real.item() == pytest.approx(np.exp(-0.4 / t2))


def test_without_noise_it_is_the_state() -> None:
    gates = [gate("h", 0), gate("crx", 0, 2, angle=parameter(0)), gate("rzz", 1, 2, angle=0.4)]
    thetas = some_parameters(2, 3, 1)
    found = DensitySimulator(DynamicCircuit(3, gates)).run(thetas)
    states = Simulator(Circuit(3, gates)).state(thetas)
    assert found.density.shape == (2, 3, 8, 8)
    assert (found.density - states[..., :, None] * states[..., None, :].conj()).abs().max() < 1e-13
    energy = PauliSum({"XYZ": 0.5, "IIZ": 1.0})
    assert (found.expectation(energy) - energy.expectation(states)).abs().max() < 1e-13


@pytest.mark.parametrize("name", sorted(CHANNEL_VALUES))
def test_strength_0_has_the_gradient_from_the_right(name: str) -> None:
    keys = {key: parameter(0) for key in CHANNEL_VALUES[name][:1]}
    keys |= dict.fromkeys(CHANNEL_VALUES[name][1:], 0.3)
    operations = [gate("ry", 0, angle=1.1), channel(name, 0, **keys)]
    simulator, energy = (
        DensitySimulator(DynamicCircuit(1, operations)),
        PauliSum({"X": 1, "Z": 0.7}),
    )
    at = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(simulator.run(at).expectation(energy), at)
    ends = [simulator.run(torch.tensor([x]).double()).expectation(energy) for x in (0, 1e-7)]
    assert found.item() == pytest.approx((ends[1] - ends[0]).item() / 1e-7, abs=1e-5)


def test_misread_outcomes_are_those_of_measurements() -> None:
    confusion = [((0.9, 0.1), (0.2, 0.8)), ((0.7, 0.3), (0.05, 0.95)), ((1, 0), (0, 1))]
    gates = [gate("ry", q, angle=0.4 + q) for q in range(3)] + [gate("cx", 0, 1)]
    measures = [Measure(q, q, confusion[q]) for q in range(3)]
    found = DensitySimulator(DynamicCircuit(3, [*gates, *measures])).run().bits
    likely = probabilities(Simulator(Circuit(3, gates)).state())
    assert (misread(likely, confusion) - found).abs().max() < 1e-14


def test_confusion_may_be_rounded() -> None:
    rows = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    kept = Measure(0, 0, rows).confusion  # type: ignore[arg-type]
    assert kept is not None
    for row, given in zip(kept, rows.tolist(), strict=True):
        assert sum(row) == pytest.approx(1, abs=1e-15)
        assert row == pytest.approx(given, abs=1e-7)
    assert Measure(0, 0, ((0.7, 0.3), (0.35, 0.65))).confusion == ((0.7, 0.3), (0.35, 0.65))


def test_the_value_of_a_channel_may_be_a_formula():
    x, y = parameter(0), parameter(1)
    rate = (x * y).sin() ** 2
    damping = channel("AmplitudeDamping", 0, gamma=rate)
    formula = DynamicCircuit(1, [gate("ry", 0, angle=x), damping])
    theta = torch.tensor([0.7, 0.9], dtype=torch.float64, requires_grad=True)
    number = math.sin(0.7 * 0.9) ** 2
    damping = channel("AmplitudeDamping", 0, gamma=number)
    plain = DynamicCircuit(1, [gate("ry", 0, angle=0.7), damping])
    found = DensitySimulator(formula).run(theta).density
    torch.testing.assert_close(found, DensitySimulator(plain).run().density, rtol=0, atol=1e-14)
    # The excited part is sin²(x/2) (1 - sin²(x y)).
    (grad,) = torch.autograd.grad(found[..., 1, 1].real, theta)
    a, b = 0.7, 0.9
    by_y = -(math.sin(a / 2) ** 2) * 2 * math.sin(a * b) * math.cos(a * b) * a
    assert grad[1].item() == pytest.approx(by_y, abs=1e-12)
