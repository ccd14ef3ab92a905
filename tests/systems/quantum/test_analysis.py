from __future__ import annotations

import math

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.systems.quantum.analysis import (
    ANSAETZE,
    decay,
    divergence,
    entangling_capability,
    expressibility,
    fidelities,
    gradient_samples,
    gradient_variance,
    h_cz_rx,
    haar_entanglement,
    idle,
    meyer_wallach,
    pauli_z,
    random_axes,
    ring,
    rx_rz,
    two_design_variance,
)
from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, gate
from lockstep.systems.quantum.simulation.statevector import statevector

CIRCUIT_A = Circuit(1, [gate("h", 0), gate("rz", 0, angle=parameter(0))])
CIRCUIT_B = Circuit(1, [*CIRCUIT_A.gates, gate("rx", 0, angle=parameter(1))])


def haar(num_qubits: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 1 << num_qubits)
    states = torch.randn(shape, dtype=torch.complex128, generator=generator)
    return states / states.norm(dim=1, keepdim=True)


def test_the_circuits_of_the_paper_are_as_expressive_as_it_says() -> None:
    """Sim et al. 2019, figure 1, which rounds to 4.30 (of 74 bins), 0.22 and 0.02."""
    assert expressibility(idle(1, 1), 10) == pytest.approx(math.log(75), abs=1e-9)
    assert expressibility(idle(1, 1), 10, bins=74) == pytest.approx(4.304, abs=5e-4)
    edges = torch.linspace(0, 1, 76, dtype=torch.float64)
    arcsine = (2 / math.pi * edges.sqrt().asin()).diff()  # the fidelities of H, RZ
    exact = divergence(arcsine, 1)
    assert exact == pytest.approx(0.22, abs=0.025)
    biased = exact + 74 / (2 * 5000)
    assert expressibility(CIRCUIT_A, 5000, seed=1) == pytest.approx(biased, abs=0.02)
    assert expressibility(CIRCUIT_B, 5000, seed=1) == pytest.approx(0.02, abs=0.01)


def test_haar_random_states_are_most_expressive() -> None:
    for num_qubits in (1, 3):
        pairs = haar(num_qubits, 20_000, 3).view(2, 10_000, -1)
        found = (pairs[0].conj() * pairs[1]).sum(1).abs().square()
        frequencies = torch.histc(found, 75, 0, 1) / len(found)
        assert divergence(frequencies, num_qubits) == pytest.approx(0, abs=0.01)
        # From the density (N - 1) (1 - F)^(N - 2) of fidelities (Życzkowski, Sommers 2005).
        edges = torch.linspace(0, 1, 76, dtype=torch.float64)
        expected = -((1 - edges) ** ((1 << num_qubits) - 1)).diff()
        assert expected.sum() == pytest.approx(1)
        assert (frequencies - expected).abs().max() < 0.02
        assert divergence(expected, num_qubits) == pytest.approx(0, abs=1e-12)


def test_the_divergence_of_what_haar_states_never_are_is_finite() -> None:
    assert expressibility(idle(4, 1), 10) == pytest.approx(15 * math.log(75), rel=1e-12)
    assert 1e6 < expressibility(idle(20, 1), 1) < math.inf


def test_batches_change_no_fidelity(monkeypatch: pytest.MonkeyPatch) -> None:
    circuit = ring(3, 2)
    whole = fidelities(circuit, 21, seed=5)
    monkeypatch.setattr("lockstep.systems.quantum.analysis._AMPLITUDES", 56)  # 7 states at a time
    assert (fidelities(circuit, 21, seed=5) - whole).abs().max() < 1e-14
    assert whole.shape == (21,)
    assert not torch.equal(fidelities(circuit, 21, seed=6), whole)


def test_the_entanglement_of_known_states() -> None:
    product = statevector(rx_rz(3, 1), torch.rand(6, dtype=torch.float64))
    ghz = torch.zeros(8, dtype=torch.complex128)
    ghz[[0, 7]] = 0.5**0.5
    w = torch.zeros(8, dtype=torch.complex128)
    w[[1, 2, 4]] = 3**-0.5
    bell = torch.zeros(8, dtype=torch.complex128)
    bell[[0, 6]] = 0.5**0.5
    found = meyer_wallach(torch.stack([product, ghz, w, bell])).tolist()
    assert found == pytest.approx([0, 1, 8 / 9, 2 / 3], abs=1e-12)
    assert meyer_wallach(haar(4, 4000, 1)).mean() == pytest.approx(haar_entanglement(4), abs=5e-3)


def test_the_capability_of_known_circuits() -> None:
    assert entangling_capability(rx_rz(4, 2), 50) == pytest.approx(0, abs=1e-12)
    assert entangling_capability(h_cz_rx(4, 1), 50) == pytest.approx(1, abs=1e-12)
    assert entangling_capability(ring(4, 4), 500) == pytest.approx(haar_entanglement(4), abs=0.02)


def test_gradients_are_those_of_finite_differences() -> None:
    circuit, observable = random_axes(3, 2, seed=4), pauli_z(3, "local")
    found = gradient_samples(circuit, observable, 3, seed=9)
    generator = torch.Generator().manual_seed(9)
    angles = 2 * math.pi * torch.rand(3, 6, dtype=torch.float64, generator=generator)
    steps = 1e-5 * torch.eye(6, dtype=torch.float64)

    def values(at: torch.Tensor) -> torch.Tensor:
        return observable.expectation(statevector(circuit, at))

    moved = (values(angles[:, None] + steps) - values(angles[:, None] - steps)) / 2e-5
    assert (found - moved).abs().max() < 1e-9


def test_deep_random_circuits_are_2_designs() -> None:
    sizes = (2, 4)
    found = [
        gradient_variance(random_axes, n, 24, pauli_z(n, "local"), samples=50, circuits=8)
        for n in sizes
    ]
    assert found == pytest.approx([two_design_variance(n) for n in sizes], rel=0.25)
    shallow = [gradient_variance(ring, n, 1, pauli_z(n, "local"), samples=400) for n in (2, 6)]
    assert shallow[1] > 0.5 * shallow[0]  # no plateau


@pytest.mark.slow
def test_gradients_of_deep_random_circuits_decay_as_those_of_2_designs() -> None:
    sizes = (2, 4, 6, 8)
    found = [
        gradient_variance(random_axes, n, 100, pauli_z(n, "local"), samples=40, circuits=10)
        for n in sizes
    ]
    limits = [two_design_variance(n) for n in sizes]
    assert decay(sizes, found) == pytest.approx(decay(sizes, limits), rel=0.15)


def test_a_decay_is_found() -> None:
    assert decay([2, 3, 5], [math.exp(-0.7 * n + 1) for n in (2, 3, 5)]) == pytest.approx(0.7)
    assert two_design_variance(20) == pytest.approx(0.5 / (1 << 20), rel=1e-5)


@pytest.mark.parametrize("name", ANSAETZE)
def test_ansaetze_of_any_size_use_each_parameter_once(name: str) -> None:
    for num_qubits in (1, 2, 5):
        circuit = ANSAETZE[name](num_qubits, 2, 0)
        used = [g.angle.index for g in circuit.gates if g.angle and g.angle.index is not None]
        assert sorted(used) == list(range(circuit.num_parameters))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expressibility(ring(2, 1), 0), "samples=0: must be at least 1"),
        (lambda: expressibility(ring(2, 1), 5, bins=1), "bins=1"),
        (lambda: expressibility(ring(2, 1), 5, seed=-1), "seed=-1"),
        (lambda: fidelities(7, 5), "needs a Circuit, not int"),
        (lambda: entangling_capability(ring(2, 1), 1), "samples=1"),
        (lambda: meyer_wallach(torch.ones(4)), "must be a complex tensor"),
        (lambda: gradient_samples(idle(2, 1), pauli_z(2, "local")), "has no parameter"),
        (lambda: gradient_samples(ring(3, 1), pauli_z(2, "local")), "for a state of 3 qubits"),
        (lambda: gradient_variance(ring, 2, 1, pauli_z(2, "local"), circuits=0), "circuits=0"),
        (lambda: ring(2, 0), "num_layers=0"),
        (lambda: ring(0, 1), "0 qubits"),
        (lambda: pauli_z(2, "all"), "observable 'all'"),
        (lambda: decay([2], [0.1]), "two numbers of qubits"),
        (lambda: decay([2, 3], [0.1, 0]), "positive variances"),
    ],
)
def test_wrong_arguments_are_refused(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
