"""The metric of any circuit: by definition, as PennyLane's, and steps by it."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from tests.systems.quantum.circuits import dense_state, random_circuit, ring, some_parameters
from tests.thread_transport import ThreadTransport, on_ranks
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.optim import LBFGS, NaturalGradient
from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, gate
from lockstep.systems.quantum.layer import Layer
from lockstep.systems.quantum.simulation.gradients import layers, metric_tensor
from lockstep.systems.quantum.simulation.measure import PauliSum
from lockstep.systems.quantum.simulation.statevector import Simulator


def by_definition(circuit: Circuit, theta: Tensor) -> Tensor:
    """From the derivatives of a dense simulation."""
    jacobian = torch.autograd.functional.jacobian(
        lambda at: torch.view_as_real(dense_state(circuit, at)), theta
    )
    moved, phi = torch.complex(jacobian[:, 0], jacobian[:, 1]), dense_state(circuit, theta)
    whole = moved.mH @ moved - torch.outer((phi.conj() @ moved).conj(), phi.conj() @ moved)
    return whole.real


def test_the_metric_is_that_of_the_definition_for_any_circuit() -> None:
    for seed in range(4):
        circuit = random_circuit(random.Random(seed), 3, 14)
        simulator, rows = Simulator(circuit), some_parameters(2, 12)
        found = metric_tensor(simulator, rows)
        for own, row in zip(found, rows, strict=True):
            assert (own - by_definition(circuit, row)).abs().max() < 1e-12
        some = metric_tensor(simulator, rows[0], only=[7, 2])
        assert (some - found[0][[7, 2]][:, [7, 2]]).abs().max() < 1e-13
        assert not found.requires_grad
        with torch.no_grad():
            assert torch.equal(metric_tensor(simulator, rows), found)


def test_blocks_are_layers_of_the_circuit() -> None:
    circuit = ring(3, 1)
    assert [layers(circuit)[q * 3 + k] for k in range(3) for q in range(3)] == [0] * 3 + [1] * 3 + [
        2
    ] * 3
    shared = Circuit(1, [gate("rx", 0, angle=parameter(i)) for i in (0, 1, 2, 0)], 5)
    numbers = layers(shared)
    assert numbers[0] != numbers[1] != numbers[2] != numbers[0]
    assert numbers[3] == numbers[4] == -1
    simulator, theta = Simulator(circuit), some_parameters(9)
    full = metric_tensor(simulator, theta)
    ids = torch.tensor(layers(circuit))
    found = metric_tensor(simulator, theta, approximation="block-diagonal")
    assert torch.equal(found, full * (ids[:, None] == ids))
    diagonal = metric_tensor(simulator, theta, approximation="diagonal")
    assert torch.equal(diagonal, full.diagonal().diag())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_metric_and_its_blocks_are_pennylanes() -> None:
    qml = pytest.importorskip("pennylane")
    gates, theta = [], some_parameters(12)
    for layer in range(2):  # PennyLane's layers go by the order in which gates are written
        gates += [gate(n, q, angle=parameter(6 * layer + 3 * i + q))
                  for i, n in enumerate(("rx", "ry")) for q in range(3)]  # fmt: skip
        gates += [gate("cx", q, (q + 1) % 3) for q in range(3)]
    circuit = Circuit(3, gates)

    @qml.qnode(qml.device("default.qubit", wires=4))
    def measured(values: Any) -> Any:
        number = 0
        for _ in range(2):
            for rotation in (qml.RX, qml.RY):
                for qubit in range(3):
                    rotation(values[number], wires=qubit)
                    number += 1
            for qubit in range(3):
                qml.CNOT(wires=[qubit, (qubit + 1) % 3])
        return qml.expval(qml.Z(0))

    for ours, theirs in (("full", None), ("block-diagonal", "block-diag"), ("diagonal", "diag")):
        at = theta.clone().requires_grad_()
        expected = qml.metric_tensor(measured, approx=theirs)(at)
        found = metric_tensor(Simulator(circuit), theta, approximation=ours)  # type: ignore[arg-type]
        assert (found - expected.detach()).abs().max() < 1e-10, ours


def test_natural_gradient_and_lbfgs_find_a_ground_state() -> None:
    hamiltonian = PauliSum({"ZZI": -1.0, "IZZ": -1.0, "XII": -0.5, "IXI": -0.5, "IIX": -0.5})
    energies = {}
    for name in ("natural", "lbfgs"):
        torch.manual_seed(4)
        layer = Layer(ring(3, 2), hamiltonian, dtype=torch.float64)
        optimizer = (
            NaturalGradient(layer.weights, layer.metric, lr=0.1, damping=1e-2)
            if name == "natural"
            else LBFGS(layer.parameters())
        )
        for _ in range(60):
            optimizer.zero_grad()
            layer().sum().backward()
            optimizer.step()
        energies[name] = layer().item()
    z, x = torch.tensor([[1.0, 0], [0, -1]]), torch.tensor([[0.0, 1], [1, 0]])
    one = torch.eye(2)

    def kron(*parts: Tensor) -> Tensor:
        return torch.kron(torch.kron(parts[0], parts[1]), parts[2])

    matrix = -kron(z, z, one) - kron(one, z, z) - 0.5 * (
        kron(x, one, one) + kron(one, x, one) + kron(one, one, x)
    )  # fmt: skip
    ground = torch.linalg.eigvalsh(matrix.double())[0].item()
    assert energies == {name: pytest.approx(ground, abs=0.02) for name in energies}


def test_the_mean_over_inputs() -> None:
    gates = [gate("ry", 0, angle=parameter(0) * parameter(1)), gate("rx", 0, angle=parameter(2))]
    layer = Layer(Circuit(1, gates), "Z", [0], dtype=torch.float64)
    rows = some_parameters(3, 1)
    each = torch.stack([layer.metric(row) for row in rows])
    assert (layer.metric(rows) - each.mean(0)).abs().max() < 1e-14
    assert partial(layer.metric, rows, "diagonal")().shape == (2, 2)


def test_wrong_arguments_are_one_clear_message() -> None:
    simulator, theta = Simulator(ring(2, 1)), some_parameters(6)
    with pytest.raises(ConfigError, match="a metric needs a Simulator, not Circuit"):
        metric_tensor(ring(2, 1), theta)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there are parameters 0 to 5"):
        metric_tensor(simulator, theta, [6])
    with pytest.raises(ConfigError, match=r"only \[0, 0\]: must be different"):
        metric_tensor(simulator, theta, [0, 0])
    with pytest.raises(ConfigError, match="5 parameters for a circuit of 6"):
        metric_tensor(simulator, theta[:5])
    with pytest.raises(ConfigError, match=r"approximation='half': must be one of full"):
        metric_tensor(simulator, theta, approximation="half")  # type: ignore[arg-type]
    wide = Simulator(ring(24, 1))
    with pytest.raises(ConfigError, match="the metric of 72 parameters on 24 qubits: needs"):
        metric_tensor(wide, some_parameters(72))


def test_states_over_ranks_are_refused() -> None:
    def body(transport: ThreadTransport) -> str:
        with pytest.raises(ConfigError, match=r"torch\.func does not transform .* over ranks") as e:
            metric_tensor(Simulator(ring(5, 1), transport=transport), some_parameters(15))
        return str(e.value)

    assert len(set(on_ranks(2, body))) == 1
