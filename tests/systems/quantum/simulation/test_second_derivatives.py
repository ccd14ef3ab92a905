"""Second derivatives by every path are those of a dense simulation that autograd follows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from tests.systems.quantum.circuits import circuits, dense_state, ring, some_parameters
from tests.thread_transport import ThreadTransport, on_ranks
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, gate
from lockstep.systems.quantum.simulation.gradients import share, shifted
from lockstep.systems.quantum.simulation.measure import PauliSum, probabilities
from lockstep.systems.quantum.simulation.statevector import Simulator, expectation
from lockstep.systems.quantum.transformer.amplitudes import loss
from lockstep.systems.quantum.transformer.model import QuantumTransformer, Sentences

hessian = torch.autograd.functional.hessian
Function = Callable[[Tensor], Tensor]


def observable(num_qubits: int) -> PauliSum:
    """Strings of I and Z, and others: they are differentiated in different ways."""
    middle = "I" * (num_qubits - 2)
    if num_qubits == 1:
        return PauliSum({"Z": 0.7, "X": 0.5})
    return PauliSum({f"Z{middle}Z": 0.7, f"X{middle}Y": 0.5, f"I{middle}Z": -0.3})


def mixed(value: Tensor, theta: Tensor) -> Tensor:
    """Not linear, and with classical terms, alone and as a factor."""
    return value.square().sum() + (theta.sin().sum() * value).sum() + theta.pow(3).sum()


def test_the_second_derivative_of_a_cosine() -> None:
    simulator = Simulator(Circuit(1, [gate("rx", 0, angle=parameter(0))]))
    theta = torch.tensor([0.3], dtype=torch.float64)

    def energy(at: Tensor) -> Tensor:
        return PauliSum({"Z": 1.0}).expectation(simulator.state(at))

    assert hessian(energy, theta).item() == pytest.approx(-math.cos(0.3), abs=1e-14)
    with_classical = hessian(lambda at: energy(at) + at.square().sum(), theta)
    assert with_classical.item() == pytest.approx(2 - math.cos(0.3), abs=1e-14)


def paths(circuit: Circuit, max_targets: int = 4) -> dict[str, Function]:
    simulator, terms = Simulator(circuit, max_targets=max_targets), observable(circuit.num_qubits)
    zero = torch.zeros(2, 1 << circuit.num_qubits, dtype=torch.complex128)
    zero[:, 0] = 1
    return {
        "adjoint": lambda at: terms.expectation(simulator.state(at)),
        "batched": lambda at: terms.expectation(simulator.state(torch.stack([at, at]))).mean(),
        "from any state": lambda at: terms.expectation(simulator.state(at, zero)).mean(),
        "shift": lambda at: shifted(simulator, at, lambda s: terms.expectation(s)[:, None])[0],
    }


@given(circuits(most_qubits=4))
@settings(max_examples=15, deadline=None)
def test_hessians_of_any_circuit_are_those_of_a_dense_simulation(circuit: Circuit) -> None:
    check_hessians(circuit)


@pytest.mark.slow
@given(circuits(most_qubits=5))
@settings(max_examples=300, deadline=None)
def test_hessians_of_many_circuits(circuit: Circuit) -> None:
    check_hessians(circuit)


def check_hessians(circuit: Circuit) -> None:
    theta, terms = some_parameters(3), observable(circuit.num_qubits)
    expected = hessian(lambda at: mixed(terms.expectation(dense_state(circuit, at)), at), theta)
    for name, value in paths(circuit).items():
        found = hessian(lambda at, value=value: mixed(value(at), at), theta)
        assert (found - expected).abs().max() < 1e-11, name


@given(circuits(most_qubits=3))
@settings(max_examples=6, deadline=None)
def test_gradgradcheck(circuit: Circuit) -> None:
    simulator, generator = Simulator(circuit), torch.Generator().manual_seed(1)
    size = 1 << circuit.num_qubits
    start = torch.randn(2, size, dtype=torch.complex128, generator=generator).requires_grad_()
    for rows in (some_parameters(2, 3), some_parameters(3)):
        given_start = rows.requires_grad_(), start
        assert torch.autograd.gradgradcheck(simulator.state, given_start, fast_mode=True)
    assert torch.autograd.gradgradcheck(simulator.state, some_parameters(2, 3).requires_grad_())


def test_a_state_that_goes_through_two_circuits_with_the_same_parameters() -> None:
    first, second = ring(3, 1), Circuit(3, [gate("crx", 0, 2, angle=parameter(0))], 9)
    both = Circuit(3, [*first.gates, *second.gates], 9)
    one, two, whole = Simulator(first), Simulator(second), Simulator(both)
    theta, terms = some_parameters(9), observable(3)
    found = hessian(lambda at: terms.expectation(two.state(at, one.state(at))), theta)
    expected = hessian(lambda at: terms.expectation(whole.state(at)), theta)
    assert (found - expected).abs().max() < 1e-12


def test_third_derivatives() -> None:
    simulator = Simulator(Circuit(1, [gate("ry", 0, angle=parameter(0, scale=2.0))]))
    for value in (
        lambda at: PauliSum({"Z": 1.0}).expectation(simulator.state(at)),
        lambda at: shifted(simulator, at, probabilities).diff().neg()[0],
    ):
        found = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
        at, derivative = found, value(found)
        for _ in range(3):
            (derivative,) = torch.autograd.grad(derivative.sum(), at, create_graph=True)
        assert derivative.item() == pytest.approx(8 * math.sin(0.8), abs=1e-12)


def transformer() -> tuple[QuantumTransformer, Sentences]:
    torch.manual_seed(3)
    model = QuantumTransformer([f"w{i}" for i in range(8)], 2, 2, seed=1)
    with torch.no_grad():
        model.angles.mul_(10)
    words = torch.tensor([[0, 1, 0, 0], [2, 3, 4, 0], [5, 6, 7, 1]])
    return model, Sentences(words, torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64))


def test_all_backends_of_the_transformer_have_the_same_hessian() -> None:
    model, batch = transformer()

    def by(method: Callable[[], Tensor]) -> Tensor:
        first = torch.autograd.grad(loss(method()).sum(), model.angles, create_graph=True)[0]
        rows = [torch.autograd.grad(g, model.angles, retain_graph=True)[0] for g in first.flatten()]
        return torch.stack([row.flatten() for row in rows])

    expected = by(lambda: model(batch))
    assert expected.abs().max() > 0.1
    assert (expected - expected.mT).abs().max() < 1e-12
    for method in (
        lambda: model.by_circuits(batch),
        lambda: model.by_circuits(batch, shift=True),
        lambda: model.by_transitions(batch, 1),
        lambda: model.by_restarts(batch, 1),
    ):
        assert (by(method) - expected).abs().max() < 1e-11


def second_derivative(value: Tensor, parameters: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(value, parameters, create_graph=True)
    return torch.autograd.grad((first + parameters).abs().square().sum(), parameters)[0]


def test_parts_of_a_gradient_refuse_to_be_differentiated_again() -> None:
    model, batch = transformer()
    size = model.angles[0].numel()
    simulator, theta = Simulator(ring(2, 1)), some_parameters(6).requires_grad_()
    some = shifted(simulator, theta, probabilities, share(6, 0, 2))[0]
    cases = {
        "no sum over parts": (some, theta),
        "parts of the transitions": (model.by_transitions(batch, 2).log().sum(), model.angles),
        "second derivatives of some": (
            model.by_circuits(batch, shift=True, num_parts=size).sum(), model.angles,
        ),
    }  # fmt: skip
    for message, (value, parameters) in cases.items():
        with pytest.raises(ConfigError, match=message):
            second_derivative(value, parameters)


def test_states_over_ranks_refuse_second_derivatives_on_all_of_them() -> None:
    circuit = ring(5, 1)

    def body(transport: ThreadTransport) -> tuple[Tensor, list[str]]:
        simulator = Simulator(circuit, transport=transport)
        theta = some_parameters(15).requires_grad_()
        own = simulator.state(theta)
        value = expectation(simulator, own, {"ZIIIX": 1.0})
        (first,) = torch.autograd.grad(value, theta, create_graph=True)
        messages = []
        for at in (theta, own):
            with pytest.raises(ConfigError, match=r"second derivatives .* over ranks") as error:
                second_derivative(expectation(simulator, own, {"ZIIIX": 1.0}).square(), at)
            messages.append(str(error.value))
        return first.detach(), messages

    results = on_ranks(2, body)
    assert results[0][1] == results[1][1]
    theta = some_parameters(15).requires_grad_()
    value = PauliSum({"ZIIIX": 1.0}).expectation(Simulator(circuit).state(theta))
    (expected,) = torch.autograd.grad(value, theta)
    assert (results[0][0] - expected).abs().max() < 1e-13


def test_second_derivatives_that_do_not_fit_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.systems.quantum.simulation.parts.memory_bytes", lambda *_: 20_000)
    monkeypatch.setattr("lockstep.systems.quantum.simulation.parts._ALWAYS_FITS", 0)
    circuit = ring(6, 4)
    theta = some_parameters(circuit.num_parameters).requires_grad_()
    value = PauliSum({"Z" * 6: 1.0}).expectation(Simulator(circuit).state(theta))
    with pytest.raises(ConfigError, match=r"second derivatives of \d+ blocks.*: needs [\d,]+ byte"):
        torch.autograd.grad(value, theta, create_graph=True)
