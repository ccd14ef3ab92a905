from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.systems.quantum.circuits import by_definition, circuits, ring, some_parameters
from torch.autograd import forward_ad
from torch.func import jvp, vmap

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate, unitary
from lockstep.systems.quantum.circuits.fusion import plan
from lockstep.systems.quantum.simulation import evolution
from lockstep.systems.quantum.simulation.gradients import shifted
from lockstep.systems.quantum.simulation.measure import PauliSum, probabilities, sample_frequencies
from lockstep.systems.quantum.simulation.parts import check_memory
from lockstep.systems.quantum.simulation.statevector import Simulator, statevector

KEPT_BYTES = "lockstep.systems.quantum.simulation.statevector.KEPT_BYTES"


@pytest.mark.parametrize("large", [1, 1 << 13])
@given(circuits(), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_states_are_those_of_the_definition(large: int, circuit: Circuit, max_targets: int) -> None:
    parameters = some_parameters(2, 3)
    with mock.patch.object(evolution, "_LARGE", large):  # what is large is multiplied one by one
        found = Simulator(circuit, max_targets=max_targets).state(parameters)
    for state, own in zip(found, parameters, strict=True):
        assert (state - by_definition(circuit, own)).abs().max() < 1e-13


@given(circuits(most_qubits=3))
@settings(max_examples=5, deadline=None)
def test_gradients_are_those_of_finite_differences(circuit: Circuit) -> None:
    simulator = Simulator(circuit)
    parameters = some_parameters(2, 3).requires_grad_()
    start = torch.randn(1 << circuit.num_qubits, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(simulator.state, (parameters, start))
    starts = torch.randn(2, 1 << circuit.num_qubits, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(simulator.state, (parameters[0].detach(), starts))


@given(circuits(most_qubits=5))
@settings(max_examples=25, deadline=None)
def test_parameter_shift_and_adjoint_agree(circuit: Circuit) -> None:
    simulator = Simulator(circuit)
    parameters = some_parameters(2, 3).requires_grad_()
    weights = some_parameters(1 << circuit.num_qubits)
    exact = probabilities(simulator.state(parameters))
    by_shift = shifted(simulator, parameters, probabilities)
    assert torch.equal(exact, by_shift)
    one, two = (
        torch.autograd.grad((found.log1p() @ weights).sum(), parameters)[0]
        for found in (exact, by_shift)
    )
    assert (one - two).abs().max() < 1e-10


def test_shifts_of_some_parameters_only() -> None:
    simulator = Simulator(ring(4, 2))
    parameters = some_parameters(24).requires_grad_()
    only = torch.arange(24) % 3 == 0

    def gradient(chosen: torch.Tensor | None) -> torch.Tensor:
        found = shifted(simulator, parameters, probabilities, chosen)
        return torch.autograd.grad(found[3], parameters)[0]

    assert torch.allclose(gradient(only), torch.where(only, gradient(None), 0.0), atol=1e-14)


@pytest.mark.parametrize("num_qubits", [5, 9, 10])
def test_rings_are_fused_without_moving_axes(num_qubits: int) -> None:
    circuit = ring(num_qubits, 2)
    parameters = some_parameters(circuit.num_parameters)
    plain = Simulator(circuit, max_targets=1).state(parameters)
    for max_targets in (2, 3, 4, 5):
        simulator = Simulator(circuit, max_targets=max_targets)
        assert (simulator.state(parameters) - plain).abs().max() < 1e-14
    blocks = plan(ring(12, 3), from_zero=False).blocks
    assert not any(block.moves for block in blocks)
    moves = [move for block in plan(ring(12, 3)).blocks for move in block.moves]
    assert moves == [4, 4, 4]


@given(circuits(), st.sampled_from([0, 1 << 30]))
@settings(max_examples=25, deadline=None)
def test_qubits_that_nothing_has_touched_take_part_from_the_start_or_not_at_all(
    circuit: Circuit, kept: int
) -> None:
    zero = torch.zeros(1 << circuit.num_qubits, dtype=torch.complex128)
    zero[0] = 1
    weights = some_parameters(1 << circuit.num_qubits)
    found = []
    for initial in (None, zero):
        parameters = some_parameters(2, 3).requires_grad_()
        with mock.patch(KEPT_BYTES, kept):
            state = Simulator(circuit).state(parameters, initial)
            (probabilities(state) @ weights).sum().backward()
        found.append((state.detach(), parameters.grad))
    (state, gradient), (other_state, other_gradient) = found
    assert (state - other_state).abs().max() < 1e-14
    assert (gradient - other_gradient).abs().max() < 1e-13


def test_circuits_undo_themselves() -> None:
    circuit = ring(5, 2)
    both = Circuit(5, [*circuit.gates, *circuit.inverse().gates])
    state = statevector(both, some_parameters(30))
    assert (state[0] - 1).abs() < 1e-14


def test_complex64() -> None:
    circuit, parameters = ring(6, 2), some_parameters(36)
    found = statevector(circuit, parameters, torch.complex64)
    assert found.dtype == torch.complex64
    assert (found - statevector(circuit, parameters)).abs().max() < 1e-6


def test_what_is_kept_for_the_backward_pass_does_not_change_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    circuit = ring(7, 3)
    gradients, undone = [], []
    undo = evolution.Moving.undo
    for kept in (0, 3 * 16 << 7, 1 << 30):
        monkeypatch.setattr(KEPT_BYTES, kept)
        parameters = some_parameters(circuit.num_parameters).requires_grad_()
        with mock.patch.object(evolution.Moving, "undo", autospec=True, side_effect=undo) as calls:
            probabilities(statevector(circuit, parameters))[5].backward()
        gradients.append(parameters.grad)
        undone.append(calls.call_count)
    assert (gradients[0] - gradients[1]).abs().max() < 1e-15
    assert (gradients[0] - gradients[2]).abs().max() < 1e-15
    assert undone[0] > undone[1] > undone[2]


MEMORY = """
import torch
from lockstep.systems.quantum.simulation.statevector import statevector
from tests.systems.quantum.circuits import ring
circuit = ring(20, {layers})
parameters = torch.zeros(circuit.num_parameters, dtype=torch.float64, requires_grad=True)
statevector(circuit, parameters)[0].real.backward()
print(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_does_not_depend_on_depth() -> None:
    peaks = [
        int(subprocess.check_output([sys.executable, "-c", MEMORY.format(layers=layers)]))
        for layers in (3, 12)
    ]
    assert peaks[1] < peaks[0] + 2 * 16 * 1024  # KiB: two states, where 45 more blocks are applied


def test_pauli_sums() -> None:
    circuit = ring(3, 1)
    state = statevector(circuit, some_parameters(2, 9))
    matrices = {
        "I": torch.eye(2, dtype=torch.complex128),
        "X": torch.tensor([[0, 1], [1, 0]], dtype=torch.complex128),
        "Y": torch.tensor([[0, -1j], [1j, 0]]).to(torch.complex128),
        "Z": torch.tensor([[1, 0], [0, -1]], dtype=torch.complex128),
    }
    terms = {"ZIZ": 0.5, "XYI": -1.5, "III": 2.0, "YZX": 0.3, "IIZ": 1.0}
    whole = sum(
        c * torch.kron(torch.kron(matrices[s[0]], matrices[s[1]]), matrices[s[2]])
        for s, c in terms.items()
    )
    expected = torch.einsum("bi,ij,bj->b", state.conj(), whole, state).real
    assert torch.allclose(PauliSum(terms).expectation(state), expected, atol=1e-14)
    assert torch.allclose(PauliSum({"ZIZ": 2.0}).expectation(state),
                          2 * PauliSum({"ZIZ": 1.0}).terms(state)[:, 0])  # fmt: skip
    for bad in ({}, {"ZZ": 1.0, "Z": 1.0}, {"ZQ": 1.0}):
        with pytest.raises(ConfigError, match="Pauli"):
            PauliSum(bad)
    with pytest.raises(ConfigError, match="of 2 letters for a state of 3 qubits"):
        PauliSum({"ZZ": 1.0}).expectation(state)


def test_marginal_probabilities() -> None:
    state = statevector(ring(4, 1), some_parameters(12))
    whole = probabilities(state)
    found = probabilities(state, [2, 0])
    expected = [
        sum(whole[i].item() for i in range(16) if (i >> 2 & 1, i & 1) == (low, high))
        for high in (0, 1)
        for low in (0, 1)
    ]
    assert found.tolist() == pytest.approx(expected)


def test_samples_are_seeded_and_right_on_average() -> None:
    state = statevector(ring(3, 1), some_parameters(9))
    exact, observable = probabilities(state), PauliSum({"ZII": 1.0, "IXY": -0.5})

    def generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    drawn = sample_frequencies(exact, 20_000, generator(1))
    assert torch.equal(drawn, sample_frequencies(exact, 20_000, generator(1)))
    assert not torch.equal(drawn, sample_frequencies(exact, 20_000, generator(2)))
    assert drawn.sum() == pytest.approx(1)
    assert (drawn - exact).abs().max() < 0.02
    sampled = observable.sample(state, 20_000, generator(3))
    assert sampled.item() == pytest.approx(observable.expectation(state).item(), abs=0.04)
    assert sampled == observable.sample(state, 20_000, generator(3))


def test_shots_give_noisy_gradients_around_the_exact_one() -> None:
    simulator = Simulator(ring(3, 1))
    parameters = some_parameters(9).requires_grad_()
    noise = torch.Generator().manual_seed(0)

    def measure(states: torch.Tensor) -> torch.Tensor:
        return sample_frequencies(probabilities(states), 5000, noise)

    noisy = shifted(simulator, parameters, measure)[0]
    exact = probabilities(simulator.state(parameters))[0]
    (one,) = torch.autograd.grad(noisy, parameters)
    (two,) = torch.autograd.grad(exact, parameters)
    assert 0 < (one - two).abs().max() < 0.05


def test_too_many_qubits_says_how_many_bytes_and_ranks() -> None:
    with pytest.raises(ConfigError, match=r"60 qubits: .* need [\d,]+ bytes.*; \d+ ranks would do"):
        statevector(Circuit(60, [gate("h", 0)]))
    with pytest.raises(ConfigError, match=r"need 4,096 bytes, and a rank has 1,000; 8 ranks"):
        check_memory(6, torch.complex128, gradients=True, available=1000)
    check_memory(6, torch.complex128, gradients=True, available=1000, num_ranks=8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gate("foo", 0), "gate foo on 0: not supported .*there are: id, x"),
        (lambda: gate("cx", 1, 1), "must be different"),
        (lambda: gate("x", -1), "not negative"),
        (lambda: gate("swap", 1), "needs 2 qubits"),
        (lambda: gate("rx", 1), "needs an angle"),
        (lambda: gate("x", 1, angle=0.5), "needs no angle"),
        (lambda: unitary(torch.ones(2, 2), 0), "not unitary"),
        (lambda: Gate("unitary", (0,)), "given by a matrix"),
        (lambda: gate("cx", 0, 1).controlled(2, state=(1, 0)), "one bit for each control"),
        (lambda: Circuit(2, [gate("x", 2)]), "qubit 2 in a circuit of 2 qubits"),
        (lambda: Circuit(1, [gate("rx", 0, angle=parameter(3))], 2), "parameter 3 in a circuit"),
        (lambda: statevector(ring(2, 1), torch.zeros(5)), "5 parameters for a circuit of 6"),
    ],
)
def test_bad_gates_and_circuits_are_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_memory_is_not_used_again_while_somebody_may_look_at_it() -> None:
    circuit = ring(6, 3)
    simulator = Simulator(circuit)
    first, second = torch.rand(2, circuit.num_parameters, dtype=torch.float64)
    expected = [gradients(Simulator(circuit), p) for p in (first, second)]
    theta = first.clone().requires_grad_()
    state = simulator.state(theta)
    kept = state.detach().clone()
    for _ in range(3):  # of another state, while the first one's backward pass is to come
        assert torch.equal(gradients(simulator, second), expected[1])
    assert torch.equal(state, kept)
    value = PauliSum({"Z" * 6: 1.0}).expectation(state)
    for _ in range(2):
        (found,) = torch.autograd.grad(value, theta, retain_graph=True)
        assert torch.equal(found, expected[0])


def gradients(simulator: Simulator, parameters: torch.Tensor) -> torch.Tensor:
    theta = parameters.clone().requires_grad_()
    PauliSum({"Z" * 6: 1.0}).expectation(simulator.state(theta)).backward()
    assert theta.grad is not None
    return theta.grad


def test_parameters_that_do_not_vary_must_be_the_same_in_all_rows() -> None:
    simulator, plain = Simulator(ring(3, 1), varying=[0, 4]), Simulator(ring(3, 1))
    rows = some_parameters(9).repeat(4, 1)
    rows[:, [0, 4]] = some_parameters(4, 2)
    found, expected = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    weights = some_parameters(4, 8)
    one, two = simulator.state(found), plain.state(expected)
    assert (one - two).abs().max() < 1e-14
    for states in (one, two):
        (states.abs().square() * weights).sum().backward()
    assert (found.grad[:, [0, 4]] - expected.grad[:, [0, 4]]).abs().max() < 1e-13
    assert (found.grad.sum(0) - expected.grad.sum(0)).abs().max() < 1e-13
    rows[2, 3] += 1e-9
    with pytest.raises(ConfigError, match=r"^parameter 3 differs .* no parameter in `varying`"):
        simulator.state(rows)
    with pytest.raises(ConfigError, match=r"^the angle of gate 3 differs .* in `varying`"):
        simulator.state_at(simulator.circuit.angles(rows))


def test_rows_are_compared_under_transforms_too() -> None:
    simulator = Simulator(ring(3, 1), varying=[0, 4])
    rows = some_parameters(9).repeat(2, 4, 1)
    rows[..., [0, 4]] = some_parameters(2, 4, 2)
    expected = simulator.state(rows)
    assert (vmap(simulator.state)(rows) - expected).abs().max() < 1e-14
    ones = torch.ones_like(rows)
    assert (jvp(simulator.state, (rows,), (ones,))[0] - expected).abs().max() < 1e-14
    rows[1, 2, 3] += 1e-9
    differs = pytest.raises(ConfigError, match=r"^parameter 3 differs")
    with differs:
        vmap(simulator.state)(rows)
    with differs:
        jvp(simulator.state, (rows,), (ones,))
    with differs, forward_ad.dual_level():
        simulator.state(forward_ad.make_dual(rows, ones))
