"""Pauli operators against dense matrices; groups, estimates and lowest energies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.systems.quantum.circuits import some_parameters
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.launching.targets import configured, make_task
from lockstep.quantum import (
    Circuit,
    GroupedMeasurement,
    PauliOperator,
    PauliSum,
    Simulator,
    bit_strings,
    commuting_groups,
    gate,
    lowest_energies,
    parameter,
    pauli_rotation,
    shifted,
)
from lockstep.systems.quantum.hamiltonian import (
    commute,
    commute_qubitwise,
    masks_of,
    string_of,
)

EXAMPLES = Path(__file__).parents[4] / "examples"
LETTERS = {
    "I": torch.eye(2), "X": torch.tensor([[0, 1], [1, 0]]),
    "Y": torch.tensor([[0, -1j], [1j, 0]]), "Z": torch.tensor([[1, 0], [0, -1]]),
}  # fmt: skip


def dense(terms: Any) -> Tensor:
    strings = [
        coefficient * reduce(torch.kron, [LETTERS[c].to(torch.complex128) for c in string])
        for string, coefficient in terms.items()
    ]
    return sum(strings[1:], start=strings[0])


numbers = st.floats(-2, 2).map(lambda x: round(x, 3))


def operators(num_qubits: int, real: bool = False, most: int = 8) -> st.SearchStrategy[Any]:
    strings = st.text("IXYZ", min_size=num_qubits, max_size=num_qubits)
    values = numbers if real else st.builds(complex, numbers, numbers)
    terms = st.dictionaries(strings, values, min_size=1, max_size=most)
    return terms.map(lambda t: PauliOperator(t, num_qubits))


def matrix(operator: PauliOperator) -> Tensor:
    zero = {"I" * operator.num_qubits: 0}
    return dense(operator.terms or zero)


@given(st.data(), st.integers(1, 3), st.builds(complex, numbers, numbers))
@settings(max_examples=25, deadline=None)
def test_the_algebra_is_that_of_matrices(data: st.DataObject, n: int, factor: complex) -> None:
    one, two = data.draw(operators(n)), data.draw(operators(n))
    a, b = matrix(one), matrix(two)
    for found, expected in [
        (one + two, a + b), (one - two, a - b), (one @ two, a @ b), (factor * one, factor * a),
        (one * factor, factor * a), (-one, -a), (one.adjoint(), a.mH), (one / 4, a / 4),
        (PauliOperator.parse(one.text(), n), a), (one.simplified(1e-9), a),
    ]:  # fmt: skip
        assert (found.matrix() - matrix(found)).abs().max() < 1e-12
        assert (matrix(found) - expected).abs().max() < 1e-8
    assert one.is_hermitian() == bool((a - a.mH).abs().max() < 1e-12)
    assert one.norm() == pytest.approx(sum(abs(c) for c in one.terms.values()))


@given(st.data(), st.integers(1, 5), st.sampled_from(["qubitwise", "fully"]))
@settings(max_examples=25, deadline=None)
def test_groups_commute_and_hold_each_term_once(
    data: st.DataObject, n: int, commuting: str
) -> None:
    operator = data.draw(operators(n, real=True, most=16))
    groups = commuting_groups(operator, commuting)
    strings = [s for group in groups for s in group.strings]
    assert sorted(strings) == sorted(set(operator.terms) - {"I" * n})
    fits = commute_qubitwise if commuting == "qubitwise" else commute
    for group in groups:
        masks = [masks_of(s) for s in group.strings]
        assert all(fits(a, b) for a in masks for b in masks)
        own = dict(zip(group.strings, group.coefficients, strict=True))
        assert own == {s: operator.terms[s].real for s in group.strings}
        every = torch.eye(1 << n, dtype=torch.complex128)
        circuit = Simulator(group.circuit).state(initial=every).mT
        turned = circuit @ dense(own) @ circuit.mH
        assert (turned - group.values.to(turned).diag()).abs().max() < 1e-12
        if commuting == "qubitwise":
            assert {g.name for g in group.circuit.gates} <= {"h", "sdg"}
            assert not any(g.controls for g in group.circuit.gates)


@given(st.text("IXYZ", min_size=1, max_size=70))
def test_masks_and_back(string: str) -> None:
    assert string_of(masks_of(string), len(string)) == string


def test_text_of_openfermion() -> None:
    text = "(-0.5+0j) [] +\n(0.25-0.5j) [X0 Y12] +\n1e-3 [Z3]\n- [Z0] + 2 * [X1]"
    operator = PauliOperator.parse(text)
    assert operator.num_qubits == 13
    expected = {"": -0.5, "X0 Y12": 0.25 - 0.5j, "Z3": 1e-3, "Z0": -1, "X1": 2}
    for words, value in expected.items():
        string = ["I"] * 13
        for word in words.split():
            string[12 - int(word[1:])] = word[0]
        assert operator.terms["".join(string)] == value
    assert PauliOperator.parse(operator.text(), 13).terms == operator.terms
    assert PauliOperator.parse("[X0] + [X0] - 2 [X0]").terms == {}
    assert PauliOperator.parse("0.5*[X0]-(2j)*[Z0]").terms == {"X": 0.5, "Z": -2j}
    sparse = PauliOperator.from_sparse([("XY", (0, 3), 0.5), ("", (), 1), ("YX", (3, 0), 1)], 4)
    assert sparse.terms == {"YIIX": 1.5, "IIII": 1}


STATES = some_parameters(2, 8).to(torch.complex128)
STATES = STATES / STATES.norm(dim=-1, keepdim=True)
HAMILTONIAN = PauliSum({"III": 0.3, "ZZI": 1.0, "XXI": -0.5, "IYY": 0.25, "YIX": 0.1, "IIZ": 0.2})


@pytest.mark.parametrize("commuting", ["qubitwise", "fully"])
@pytest.mark.parametrize("by", ["norm", "deviation"])
def test_estimates_have_their_variance(commuting: str, by: str) -> None:
    measurement = GroupedMeasurement(HAMILTONIAN, commuting)
    exact = HAMILTONIAN.expectation(STATES)
    generator = torch.Generator().manual_seed(3)
    many = STATES.repeat(400, 1)
    found = measurement.estimate(many, 300, by, generator)
    gaps = (found.values - exact.repeat(400)).view(400, 2)
    spread = gaps.square().mean(0)
    assert (gaps.mean(0).abs() < 5 * (spread / 400).sqrt()).all()
    claimed = found.variances.view(400, 2).mean(0)
    assert ((spread / claimed - 1).abs() < 0.35).all()  # 5 sigma of χ² with 400 samples
    assert sum(found.shots) == 300
    assert [o.shape for o in found.outcomes] == [(800, count) for count in found.shots]
    again = measurement.estimate(many, 300, by, torch.Generator().manual_seed(3))
    assert torch.equal(again.values, found.values)
    assert all(torch.equal(a, b) for a, b in zip(again.outcomes, found.outcomes, strict=True))


def test_shots_by_deviation_make_the_variance_least() -> None:
    measurement = GroupedMeasurement(HAMILTONIAN)
    generator = torch.Generator().manual_seed(0)
    count = 100_000
    assert sum(measurement.shares(count)) == count
    norms = [group.norm for group in measurement.groups]
    for own, norm in zip(measurement.shares(count), norms, strict=True):
        assert own == pytest.approx(count * norm / sum(norms), abs=2 * len(norms))
    state = STATES[0]
    variances = [
        measurement.estimate(state, count, by, generator).variances for by in ("norm", "deviation")
    ]
    assert variances[1] < variances[0]


def test_shots_in_shifted_gradients_are_unbiased() -> None:
    circuit = Circuit(3, [gate("ry", q, angle=parameter(q)) for q in range(3)])
    simulator, measurement = Simulator(circuit), GroupedMeasurement(HAMILTONIAN)
    torch.manual_seed(1)
    at = some_parameters(3).requires_grad_()
    exact = torch.autograd.grad(HAMILTONIAN.expectation(simulator.state(at)), at)[0]
    found = []
    for _ in range(25):
        value = shifted(simulator, at, lambda s: measurement.estimate(s, 200).values[:, None])
        found.append(torch.autograd.grad(value.sum(), at)[0])
    gradients = torch.stack(found)
    error = gradients.std(0) / len(found) ** 0.5
    assert ((gradients.mean(0) - exact).abs() < 5 * error + 1e-12).all()


def test_bit_strings() -> None:
    state = Simulator(Circuit(3, [gate("x", 0)])).state()
    measurement = GroupedMeasurement(PauliSum({"ZZZ": 1.0}))
    found = measurement.estimate(state, 4)
    assert found.values == -1
    assert found.variances == 0
    assert bit_strings(found.outcomes[0], 3) == ["001"] * 4


def test_a_constant_needs_no_measurement() -> None:
    found = GroupedMeasurement(PauliSum({"II": 2.5})).estimate(STATES.new_ones(4) / 2, 1)
    assert (found.values, found.variances, found.shots) == (2.5, 0, ())


@pytest.mark.parametrize("num_qubits", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_lowest_energies_are_those_of_the_matrix(num_qubits: int) -> None:
    import random

    source = random.Random(num_qubits)
    strings = ["".join(source.choices("IXYZ", k=num_qubits)) for _ in range(20)]
    operator = PauliOperator({s: source.gauss(0, 1) for s in strings})
    expected = torch.linalg.eigvalsh(matrix(operator))[:3]
    assert (lowest_energies(operator, 3) - expected).abs().max() < 1e-9


@pytest.mark.parametrize("string", ["X", "Y", "Z", "IZ", "XY", "ZIX", "YXZY"])
def test_a_rotation_is_the_exponential(string: str) -> None:
    angle = torch.tensor([0.7], dtype=torch.float64)
    circuit = Circuit(len(string), pauli_rotation(string, parameter(0)))
    every = torch.eye(1 << len(string), dtype=torch.complex128)
    found = Simulator(circuit).state(angle, every).mT
    expected = torch.linalg.matrix_exp(-0.35j * dense({string: 1}))
    assert (found - expected).abs().max() < 1e-12


def test_the_hydrogen_example_has_the_known_energies() -> None:
    task = make_task(*configured(str(EXAMPLES / "h2.py"), []))
    assert lowest_energies(task.hamiltonian).item() == pytest.approx(-1.1372701749, abs=1e-9)
    assert len(task.groups) == 5
    torch.manual_seed(0)
    model, energies = task.build_model(), []
    for angle in (0.0, 0.22622):  # Hartree-Fock; the optimum
        with torch.no_grad():
            model.angles[0] = angle
        losses = [task.loss(model, [torch.tensor([n])]) for n in range(5)]
        energies.append(sum(each.sum.item() for each in losses))
        assert sum(each.weight for each in losses) == pytest.approx(1)
    assert energies == [pytest.approx(-1.1166844, abs=1e-6), pytest.approx(-1.1372701, abs=1e-6)]


@pytest.mark.slow
def test_the_hydrogen_coefficients_are_pennylanes() -> None:
    qml = pytest.importorskip("pennylane")
    geometry = qml.numpy.array([[0, 0, 0], [0, 0, 0.7414]])
    molecule = qml.qchem.Molecule(["H", "H"], geometry, unit="angstrom")
    theirs, _ = qml.qchem.molecular_hamiltonian(molecule, method="dhf")
    task = make_task(*configured(str(EXAMPLES / "h2.py"), []))
    sparse = [
        ("".join(p for _, p in word), tuple(q for q, _ in word), float(c))
        for word, c in ((sorted(w.items()), c) for w, c in theirs.pauli_rep.items())
    ]
    expected = PauliOperator.from_sparse(sparse, 4)
    gap = (expected - task.hamiltonian).simplified(1e-12)
    assert not gap.terms


def test_the_cut_of_a_ring_is_the_known_one() -> None:
    task = make_task(*configured(str(EXAMPLES / "maxcut.py"), ["num_nodes=6", "num_layers=1"]))
    model = task.build_model()
    with torch.no_grad():  # γ = π/4, as exp(-iγC) is rzz(-γ), and β = π/8
        model.angles.copy_(torch.tensor([-1 / 4, 1 / 8], dtype=torch.float64) * torch.pi)
    loss = task.loss(model, [torch.tensor(task.edges)])
    assert loss.sum.item() / loss.weight == pytest.approx(1 / 4, abs=1e-9)
    assert task.evaluate(model, [torch.tensor(task.edges)]).metrics["best"][0] == loss.weight


NAN = float("nan")
PAULI = PauliOperator({"ZZ": 1.0})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PauliOperator([("Z", 1)]), r"needs \{string: coefficient\}, not list"),
        (lambda: PauliOperator({}), "needs num_qubits"),
        (lambda: PauliOperator({"ZA": 1}), "must have 2 letters of I, X, Y, Z"),
        (lambda: PauliOperator({"ZZ": 1, "Z": 1}), "must have 2 letters"),
        (lambda: PauliOperator({1: 1.0}), "must have 1 letters"),
        (lambda: PauliOperator({"": 1.0}), "0 qubits: an operator has from 1 to 10,000"),
        (lambda: PauliOperator({"Z": float("nan")}), "must be a finite number, not nan"),
        (lambda: PauliOperator({"Z": "a"}), "must be a finite number, not 'a'"),
        (lambda: PAULI + PauliOperator({"Z": 1}), "of 2 and of 1 qubits: must be equal"),
        (lambda: PAULI @ PauliOperator({"Z": 1}), "of 2 and of 1 qubits: must be equal"),
        (lambda: PAULI * float("inf"), "factor must be a finite number"),
        (lambda: PAULI / 0, "cannot be divided by 0"),
        (lambda: (1j * PAULI).observable(), "1j is not real; only Hermitian operators"),
        (lambda: PauliOperator({"Z" * 40: 1.0}).matrix(), "the matrix of 40 qubits: needs"),
        (lambda: PauliOperator.from_sparse([("X", (0, 1), 1)], 2), "a letter for each qubit"),
        (lambda: PauliOperator.from_sparse([("XX", (0, 0), 1)], 2), "a qubit is named twice"),
        (lambda: PauliOperator.from_sparse([("X", (2,), 1)], 2), "must be from 0 to 1"),
        (lambda: PauliOperator.from_sparse([("A", (1,), 1)], 2), "letters of I, X, Y, Z"),
        (lambda: PauliOperator.from_sparse([3], 2), r"must be \(letters, qubits, coefficient\)"),
        (lambda: PauliOperator.from_sparse([("X", (0,), "a")], 2), "must be a finite number"),
        (lambda: PauliOperator.parse(3), "must be a string, not int"),
        (lambda: PauliOperator.parse(""), "there are no terms"),
        (lambda: PauliOperator.parse("0.5 X0"), r"expected a term .* at '0.5 X0'"),
        (lambda: PauliOperator.parse("* [X0]"), r"expected a term .* at '\* \[X0\]'"),
        (lambda: PauliOperator.parse("0.5 [X0] 0.5 [X1]"), r"expected a term .* '0.5 \[X1\]'"),
        (lambda: PauliOperator.parse("a [X0]"), "'a' is no number"),
        (lambda: PauliOperator.parse("1 [A0]"), "'A0' is no factor such as X0"),
        (lambda: PauliOperator.parse("1 [X0 Y0]"), "a qubit is named twice"),
        (lambda: PauliOperator.parse("nan [X0]"), "must be a finite number"),
        (lambda: PauliOperator.parse("1 [X999999999]"), "an operator has from 1 to 10,000"),
        (lambda: PauliOperator.parse("1 [X3]", 3), "must be from 0 to 2"),
        (lambda: commuting_groups("ZZ"), "must be a PauliSum or a PauliOperator, not str"),
        (lambda: commuting_groups(PAULI, "some"), "must be 'qubitwise' or 'fully'"),
        (lambda: commuting_groups(PauliOperator({"Z" * 63: 1})), "63 qubits: a circuit has"),
        (lambda: GroupedMeasurement(None), "must be a PauliSum or a PauliOperator"),
        (lambda: GroupedMeasurement(PAULI).estimate(STATES, 1), "of 2 qubits for states of 3"),
        (lambda: GroupedMeasurement(HAMILTONIAN).estimate(STATES, 5), "groups need at least"),
        (lambda: GroupedMeasurement(HAMILTONIAN).estimate(STATES, [1]), "at least 2 for each"),
        (lambda: GroupedMeasurement(HAMILTONIAN).estimate(STATES, 99, "x"), "by='x': must be"),
        (lambda: GroupedMeasurement(HAMILTONIAN).shares(99, "deviation"), "together with states"),
        (lambda: commuting_groups(PAULI)[0].sample(STATES, 1), "of 2 letters for states of 3"),
        (lambda: commuting_groups(PAULI)[0].sample(STATES[0, :4], 0), "shots=0: must be"),
        (lambda: commuting_groups(HAMILTONIAN)[0].sample(2 * STATES, 1), "states of norm 1"),
        (lambda: commuting_groups(HAMILTONIAN)[0].sample(STATES * NAN, 1), "states of norm 1"),
        (lambda: bit_strings(torch.tensor([4]), 2), "outcomes must be from 0 to"),
        (lambda: lowest_energies(PAULI, 0), "count=0: must be from 1 to 4"),
        (lambda: lowest_energies(PAULI, 5), "count=5: must be from 1 to 4"),
        (lambda: lowest_energies(PauliOperator({"Z" * 40: 1.0})), "needs .* bytes of memory"),
        (lambda: pauli_rotation("II", 0.1), "a rotation needs a letter X, Y or Z"),
        (lambda: pauli_rotation("AX", 0.1), "letters of I, X, Y, Z"),
        (lambda: pauli_rotation("XX", "a"), "its angle must be a number"),
    ],
)
def test_wrong_arguments_are_one_clear_message(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_without_scipy_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    with pytest.raises(ConfigError, match=r'pip install "lockstep-train\[quantum\]"'):
        lowest_energies(PauliOperator({"Z" * 9: 1.0}))
