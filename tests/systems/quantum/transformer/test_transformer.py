from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.systems.quantum.transformer import ansatz
from lockstep.systems.quantum.transformer.amplitudes import context_root, fubini_study, loss
from lockstep.systems.quantum.transformer.ansatz import (
    context_norms,
    encode,
    positions,
    word_vectors,
)
from lockstep.systems.quantum.transformer.model import QuantumTransformer, Sentences

WORDS = [f"w{i}" for i in range(12)]


def model(
    dim: int = 4, num_layers: int = 1, restarts: int = 1, spread: float = 10
) -> QuantumTransformer:
    torch.manual_seed(dim)
    made = QuantumTransformer(WORDS, dim, num_layers, restarts=restarts, seed=3)
    with torch.no_grad():
        made.angles.mul_(spread)
    return made


def batch(*sentences: list[int], parts: list[int] | None = None) -> Sentences:
    longest = max(map(len, sentences))
    return Sentences(
        torch.tensor([s + [0] * (longest - len(s)) for s in sentences]),
        torch.tensor([len(s) - 1 for s in sentences]),
        torch.tensor(parts or [0] * len(sentences)),
    )


def by_definition(states: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """(1/T) Σ z† W Ψ Vᵀ x*, with Ψ made and normalised."""
    states = states.to(v.dtype)
    terms = []
    for i in range(1, len(states)):
        context = sum(torch.outer(states[j], states[j]) for j in range(i))
        context = context / context.norm()
        terms.append(states[i - 1].conj() @ w @ context @ v.mT @ states[i].conj())
    return sum(terms) / len(terms)


SENTENCES = ([0, 1], [2, 3, 4], [5, 5, 5, 5, 5], [6, 7, 8, 9, 10, 11, 0, 1])


@pytest.mark.parametrize("dim", [2, 4, 8, 16])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_amplitude_is_that_of_the_definition(dim: int, num_layers: int) -> None:
    transformer = model(dim, num_layers)
    v, w = transformer.unitaries()[0]
    found = transformer(batch(*SENTENCES))[0]
    for probability, sentence in zip(found, SENTENCES, strict=True):
        states = transformer.encode(torch.tensor(sentence))
        assert probability.item() == pytest.approx(
            by_definition(states, v, w).abs().item() ** 2, abs=1e-13
        )


@pytest.mark.parametrize("dim", [2, 4, 8])
@pytest.mark.parametrize("shift", [False, True])
def test_circuits_and_closed_form_agree(dim: int, shift: bool) -> None:
    transformer = model(dim, restarts=2)
    sentences = batch([0, 1], [2, 3, 4], [5, 5, 6, 7], [8, 9, 10, 11, 0, 1])
    results = []
    for found in (transformer(sentences), transformer.by_circuits(sentences, shift=shift)):
        losses = loss(found)
        (gradient,) = torch.autograd.grad(losses.sum(), transformer.angles)
        results.append((losses, gradient))
    (one, two), (three, four) = results
    assert (one - three).abs().max() < 1e-12
    assert (two - four).abs().max() < (1e-9 if shift else 1e-12)


def test_the_circuit_is_the_guides_where_it_needs_a_power_of_two() -> None:
    transformer = model()
    circuit = transformer.circuit([1, 2, 3, 4, 5])
    assert circuit.num_qubits == 2 + 2 + 2
    assert circuit.num_parameters == 48
    assert [g.name for g in circuit.gates[:2]] == ["h", "h"]
    assert transformer.circuit([1, 2]).num_qubits == 4
    assert [g.name for g in transformer.circuit([1, 2, 3, 4]).gates if g.name == "h"] == []


def rotation(axis: str, angle: float) -> Tensor:
    paulis = {"x": [[0, 1], [1, 0]], "y": [[0, -1j], [1j, 0]], "z": [[1, 0], [0, -1]]}
    pauli = torch.tensor(paulis[axis], dtype=torch.complex128)
    return math.cos(angle / 2) * torch.eye(2, dtype=pauli.dtype) - 1j * math.sin(angle / 2) * pauli


def on(qubit: int, matrix: Tensor, num_qubits: int) -> Tensor:
    high, low = 1 << (num_qubits - 1 - qubit), 1 << qubit
    return torch.kron(torch.kron(torch.eye(high), matrix), torch.eye(low, dtype=matrix.dtype))


def cnot(control: int, target: int, num_qubits: int) -> Tensor:
    columns = [c ^ (1 << target) if c >> control & 1 else c for c in range(1 << num_qubits)]
    return torch.eye(1 << num_qubits, dtype=torch.complex128)[columns]


@pytest.mark.parametrize("num_qubits", [1, 2, 3, 4])
def test_the_ansatz_is_its_gates_in_turn(num_qubits: int) -> None:
    shape = ansatz.angle_shape(num_qubits, 2)
    angles = torch.randn(shape, dtype=torch.float64)
    whole = torch.eye(1 << num_qubits, dtype=torch.complex128)
    for layer in angles:
        for (c, t), block in zip(ansatz.pairs(num_qubits) or [(0, 0)], layer, strict=True):
            for index, triple in enumerate(block):
                for axis, angle in zip("xyz", triple.tolist(), strict=True):
                    whole = on((c, t)[index % 2], rotation(axis, angle), num_qubits) @ whole
                if index % 2:
                    whole = cnot(c, t, num_qubits) @ whole
    assert (ansatz.unitaries(angles, num_qubits) - whole).abs().max() < 1e-14 * len(whole)


def test_pairs_are_those_of_the_guide_for_even_registers() -> None:
    assert ansatz.pairs(2) == [(0, 1), (1, 0)]
    assert ansatz.pairs(4) == [(0, 1), (2, 3), (1, 2), (3, 0)]
    assert ansatz.pairs(3) == [(0, 1), (1, 2), (2, 0)]
    assert [math.prod(ansatz.angle_shape(n, 2)) for n in (2, 4, 6)] == [48, 96, 144]


@pytest.mark.parametrize("dim", [2, 4, 8])
def test_gradients_are_those_of_finite_differences(dim: int) -> None:
    transformer = model(dim)
    sentences = batch([0, 1, 2, 3], [4, 5])

    def total(angles: Tensor) -> Tensor:
        found = torch.func.functional_call(transformer, {"angles": angles}, (sentences,))
        return loss(found).sum()

    assert torch.autograd.gradcheck(total, (transformer.angles,))


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_gradients_of_parts_of_the_transitions_add_up(num_parts: int) -> None:
    transformer = model()
    whole = loss(transformer(batch(*SENTENCES)))
    whole.sum().backward()
    expected = transformer.angles.grad
    transformer.angles.grad = None
    for part in range(num_parts):
        sentences = batch(*SENTENCES, parts=[part] * len(SENTENCES))
        found = loss(transformer.by_transitions(sentences, num_parts))
        assert (found - whole).abs().max() < 1e-13
        found.sum().backward()
    assert (transformer.angles.grad - expected).abs().max() < 1e-12


def test_parts_may_be_mixed_in_a_batch() -> None:
    transformer = model(restarts=6)
    whole = transformer(batch(*SENTENCES))
    mixed = batch(*SENTENCES, parts=[2, 0, 1, 2])
    found = transformer.by_restarts(mixed, 3)
    expected = torch.stack([whole[2 * p : 2 * p + 2, i] for i, p in enumerate([2, 0, 1, 2])], 1)
    assert (found - expected).abs().max() < 1e-14


def test_a_words_vector_depends_on_nothing_but_itself_and_the_seed() -> None:
    together = word_vectors(["a", "b", "ä"], 8, 1)
    assert torch.equal(word_vectors(["ä"], 8, 1)[0], together[2])
    assert not torch.equal(word_vectors(["ä"], 8, 2)[0], together[2])
    many = word_vectors([str(i) for i in range(2000)], 4, 0)
    assert 0 <= many.min() < many.max() < 0.1
    assert many.mean().item() == pytest.approx(0.05, abs=0.001)


def test_positions_are_sinusoidal() -> None:
    table = positions(3, 4)
    assert table[0].tolist() == [0, 1, 0, 1]
    assert table[2].tolist() == pytest.approx(
        [math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)]
    )


@given(st.integers(2, 9), st.sampled_from([2, 4, 8]), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_context_norms(length: int, dim: int, seed: int) -> None:
    words = word_vectors([str(i) for i in range(length)], dim, seed)
    states = encode(words, positions(length, dim))
    assert torch.allclose(states.norm(dim=1), torch.ones(length, dtype=torch.float64))
    products = torch.einsum("ja,jb->jab", states, states).cumsum(0).flatten(1).norm(dim=1)
    assert torch.allclose(context_norms(states), products[:-1], atol=1e-14)


def test_ranking_a_word_is_the_probability_of_the_longer_sentence() -> None:
    transformer = model(restarts=2)
    ranked = transformer.rank_next([1, 2, 3], torch.tensor([4, 0, 7]), restart=1)
    sentences = batch([1, 2, 3, 4], [1, 2, 3, 0], [1, 2, 3, 7])
    assert torch.allclose(ranked, transformer(sentences)[1], atol=1e-14)


def test_complex64_is_close() -> None:
    torch.manual_seed(0)
    half = QuantumTransformer(WORDS, 4, seed=3, dtype=torch.float32)
    double = QuantumTransformer(WORDS, 4, seed=3)
    with torch.no_grad():
        double.angles.copy_(half.angles)
    found = half(batch(*SENTENCES))
    assert found.dtype == torch.float32
    assert (found - double(batch(*SENTENCES))).abs().max() < 1e-5


def test_the_metric_is_how_fast_neighbouring_states_become_different() -> None:
    transformer = model()
    sentences = batch(*SENTENCES)
    states = transformer.encode(sentences.words)
    root = context_root(states, sentences.transitions)
    angles = transformer.angles.detach()[0]
    metric = fubini_study(angles, 2, root)
    assert (metric - metric.mT).abs().max() < 1e-14
    assert torch.linalg.eigvalsh(metric).min() > -1e-12

    def state(at: Tensor) -> Tensor:
        """The circuits' states of all sentences, one beside the other."""
        v, w = ansatz.unitaries(at, 2)
        rows = []
        for sentence, own in zip(SENTENCES, states, strict=True):
            for i in range(1, len(sentence)):
                psi = torch.einsum("ja,jb->ab", own[:i], own[:i])
                weight = len(SENTENCES) * (len(sentence) - 1)
                rows.append(w @ (psi / psi.norm()).to(w.dtype) @ v.mT / weight**0.5)
        return torch.stack(rows).flatten()

    torch.manual_seed(1)
    for _ in range(3):
        direction = torch.randn(angles.shape, dtype=torch.float64)
        step = 1e-3
        overlap = torch.vdot(state(angles - step * direction), state(angles + step * direction))
        distance = (1 - overlap.abs().item() ** 2) / (2 * step) ** 2
        flat = direction.flatten()
        assert (flat @ metric @ flat).item() == pytest.approx(distance, rel=1e-3)


def test_another_vocabulary_is_refused() -> None:
    state = model().state_dict()
    other = QuantumTransformer([w.upper() for w in WORDS], 4)
    with pytest.raises(CheckpointError, match=r"vocabulary: .* has the corpus changed"):
        other.load_state_dict(state)
    assert model().words == WORDS
