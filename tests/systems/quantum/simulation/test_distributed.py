from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from tests.systems.quantum.circuits import circuits, ring, some_parameters
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.circuit import Circuit, gate
from lockstep.systems.quantum.simulation.measure import PauliSum
from lockstep.systems.quantum.simulation.statevector import Simulator, expectation

TERMS = {"ZIIZIII": 0.5, "IXYIIIZ": -1.0, "IIIIIIZ": 0.3, "YIIIIIX": 0.7, "IIIIIII": 0.1}


def whole(circuit: Circuit) -> tuple[torch.Tensor, torch.Tensor]:
    """The expectation value and its gradient, on one rank."""
    parameters = some_parameters(circuit.num_parameters).requires_grad_()
    value = PauliSum(TERMS).expectation(Simulator(circuit).state(parameters))
    return value.detach(), torch.autograd.grad(value, parameters)[0]


@given(circuits(most_qubits=7))
@settings(max_examples=20, deadline=None)
def test_any_circuit_over_any_power_of_two_of_ranks(circuit: Circuit) -> None:
    circuit = Circuit(7, circuit.gates, 3)
    state = Simulator(circuit).state(some_parameters(3))
    value, gradient = whole(circuit)

    def body(transport: ThreadTransport) -> tuple[torch.Tensor, ...]:
        simulator = Simulator(circuit, max_targets=3, transport=transport)
        parameters = some_parameters(3).requires_grad_()
        own = simulator.state(parameters)
        found = expectation(simulator, own, TERMS)
        return own.detach(), found.detach(), *torch.autograd.grad(found, parameters)

    for size in (1, 2, 4):
        results = on_ranks(size, body)
        assert (torch.cat([own for own, _, _ in results]) - state).abs().max() < 1e-13
        for _, found, own_gradient in results:
            assert (found - value).abs() < 1e-13
            assert (own_gradient - gradient).abs().max() < 1e-12
            assert torch.equal(own_gradient, results[0][2])


def test_controls_on_other_ranks_cost_no_exchange() -> None:
    circuit = Circuit(7, [gate("h", q) for q in range(5)] + [gate("cx", 6, 0), gate("cz", 5, 1)])

    def body(transport: ThreadTransport) -> list[str]:
        Simulator(circuit, transport=transport).state()
        return transport.calls

    assert on_ranks(4, body) == [[]] * 4


def test_a_ring_exchanges_about_once_a_layer() -> None:
    circuit = ring(12, 4)

    def body(transport: ThreadTransport) -> int:
        Simulator(circuit, transport=transport).state(some_parameters(circuit.num_parameters))
        return transport.calls.count("all_to_all")

    assert max(on_ranks(2, body)) <= 2 * 4 + 2


def test_a_start_split_over_ranks_gets_a_gradient() -> None:
    circuit = ring(6, 1)
    start = torch.randn(64, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))

    def gradient(transport: ThreadTransport | None, own: torch.Tensor) -> torch.Tensor:
        variable = own.clone().requires_grad_()
        simulator = Simulator(circuit, transport=transport)
        found = expectation(
            simulator, simulator.state(some_parameters(18), variable), {"ZXIIYZ": 1}
        )
        return torch.autograd.grad(found, variable)[0]

    expected = gradient(None, start)
    parts = on_ranks(4, lambda t: gradient(t, start[t.rank * 16 : t.rank * 16 + 16]))
    assert (torch.cat(parts) - expected).abs().max() < 1e-13


@pytest.mark.parametrize(
    ("size", "circuit", "message"),
    [
        (3, ring(6, 1), "cannot be split over 3 ranks: their number must be a power of two"),
        (4, ring(4, 1), "4 ranks are too many for 4 qubits"),
    ],
)
def test_ranks_that_do_not_fit(size: int, circuit: Circuit, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        on_ranks(size, lambda transport: Simulator(circuit, transport=transport))


@given(circuits(most_qubits=7))
@settings(max_examples=10, deadline=None)
def test_the_bits_depend_on_the_parts_only(circuit: Circuit) -> None:
    check_bits(Circuit(7, circuit.gates, 3))


@pytest.mark.parametrize("kept", [0, 8192])
def test_ranks_of_more_and_of_fewer_parts_keep_the_same_states(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr("lockstep.systems.quantum.simulation.statevector.KEPT_BYTES", kept)
    check_bits(ring(7, 3))


def check_bits(circuit: Circuit) -> None:
    """Four parts have the same bits and make the same calls on any ranks."""
    thetas = some_parameters(2, circuit.num_parameters)
    exact = PauliSum(TERMS).expectation(Simulator(circuit).state(thetas))

    def body(transport: ThreadTransport | None) -> tuple[list[str], list[torch.Tensor]]:
        simulator = Simulator(circuit, max_targets=3, transport=transport, parts=4)
        at = thetas.clone().requires_grad_()
        found = expectation(simulator, simulator.state(at), TERMS)
        assert found.shape == (2,)
        slopes = torch.autograd.grad(found.square().sum(), at)
        return [] if transport is None else transport.calls, [found.detach(), *slopes]

    _, alone = body(None)
    assert (alone[0] - exact).abs().max() < 1e-13
    for size in (1, 2, 3, 4):
        for calls, found in (results := on_ranks(size, body)):
            assert calls == results[0][0]
            assert all(torch.equal(own, other) for own, other in zip(found, alone, strict=True))


def test_batches_over_ranks_and_parts() -> None:
    circuit = ring(7, 2)
    thetas = some_parameters(2, 3, circuit.num_parameters)
    starts = torch.randn(3, 128, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    starts = starts / starts.norm(dim=-1, keepdim=True)

    def values(transport: ThreadTransport | None, parts: int) -> tuple[torch.Tensor, ...]:
        simulator = Simulator(circuit, max_targets=3, transport=transport, parts=parts)
        size = len(starts[0]) // parts
        at = thetas.clone().requires_grad_()
        mine = slice(simulator.part.first, simulator.part.first + simulator.part.num_here)
        own = starts.view(3, parts, size)[:, mine].flatten(1).requires_grad_()
        state = simulator.state(at, own)
        found = expectation(simulator, state, PauliSum(TERMS))
        slopes = torch.autograd.grad(found.square().sum(), (at, own))
        return found.detach(), slopes[0], slopes[1], state.detach()

    value, slope, start_slope, state = values(None, 1)
    for size in (1, 2, 3, 4):
        results = on_ranks(size, lambda t: values(t, 4))
        for found in results:
            assert (found[0] - value).abs().max() < 1e-13
            assert (found[1] - slope).abs().max() < 1e-12
        assert (torch.cat([r[2] for r in results], -1) - start_slope).abs().max() < 1e-12
        assert (torch.cat([r[3] for r in results], -1) - state).abs().max() < 1e-13


@pytest.mark.parametrize("parts", [1, 3, 6])
def test_parts_that_do_not_fit(parts: int) -> None:
    message = f"parts={parts}: must be a power of two, and at least 2"
    with pytest.raises(ConfigError, match=message):
        on_ranks(2, lambda transport: Simulator(ring(6, 1), transport=transport, parts=parts))


def test_a_state_of_another_number_of_parts_is_refused() -> None:
    simulator = Simulator(ring(6, 1), parts=2)
    with pytest.raises(ConfigError, match=r"the state must be a tensor \[..., 64\]"):
        expectation(simulator, torch.ones(32, dtype=torch.complex128), {"ZIIIII": 1.0})
