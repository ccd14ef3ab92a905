"""Amplitudes of next words, and words that are trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.circuit import Circuit
from lockstep.systems.quantum.simulation.statevector import statevector
from lockstep.systems.quantum.transformer.amplitudes import (
    log_likelihoods,
    loss,
    of_sentences,
    probability,
)
from lockstep.systems.quantum.transformer.model import QuantumTransformer, Sentences

WORDS = [f"w{i}" for i in range(7)]
SENTENCES = ([0, 1, 2, 3], [4, 5], [6, 1, 0, 2, 5])


def model(trainable: bool = True, dim: int = 4, **keys: object) -> QuantumTransformer:
    torch.manual_seed(dim)
    made = QuantumTransformer(WORDS, dim, 1, seed=3, trainable=trainable, **keys)
    with torch.no_grad():
        made.angles.mul_(10)
    return made


def batch(*sentences: list[int], part: int = 0) -> Sentences:
    longest = max(map(len, sentences))
    return Sentences(
        torch.tensor([s + [0] * (longest - len(s)) for s in sentences]),
        torch.tensor([len(s) - 1 for s in sentences]),
        torch.tensor([part] * len(sentences)),
    )


def before_interference(transformer: QuantumTransformer, words: list[int]) -> Tensor:
    """The amplitudes of |0…0> and each value of the controls, before these interfere."""
    circuit = transformer.circuit(words)
    count = len(words) - 1
    controls = (count - 1).bit_length()
    last = controls if count == 1 << controls else 1  # H on each, or one reflection
    gates = circuit.gates[: len(circuit.gates) - last] if controls else circuit.gates
    cut = Circuit(circuit.num_qubits, gates, circuit.num_parameters)
    state = statevector(cut, transformer.angles.detach()[0].flatten())
    return state.view(1 << controls, -1)[:count, 0]


@pytest.mark.parametrize("dim", [2, 4])
def test_transitions_are_amplitudes_of_the_circuit_with_measured_controls(dim: int) -> None:
    transformer = model(dim=dim, word_scale=2.0, position_scale=0.3)
    found = transformer.next_words(batch(*SENTENCES)).detach()[0]
    assert found.shape == (3, 4, 7)
    for row, sentence in enumerate(SENTENCES):
        count = len(sentence) - 1
        own = found[row, torch.arange(count), sentence[1:]]
        expected = before_interference(transformer, sentence) * count**0.5
        assert (own - expected).abs().max() < 1e-13


def test_amplitudes_of_sentences_are_those_of_longer_prefixes() -> None:
    transformer = model(trainable=False)
    amplitudes = transformer.next_words(batch(*SENTENCES))
    found = probability(of_sentences(amplitudes, batch(*SENTENCES).words))[0]
    for row, sentence in enumerate(SENTENCES):
        for place in range(1, len(sentence)):
            expected = transformer.rank_next(sentence[:place], torch.arange(7))
            assert (found[row, place - 1] - expected).abs().max() < 1e-14


def test_likelihoods_are_normalised_even_of_impossible_words() -> None:
    logarithms = log_likelihoods(torch.tensor([[0.0, 3.0, 4.0j], [0.0, 0.0, 0.0]]).cdouble())
    assert torch.allclose(logarithms.exp().sum(-1), torch.ones(2).double())
    assert logarithms[0, 1:].exp().tolist() == pytest.approx([9 / 25, 16 / 25])
    assert logarithms[1].exp().tolist() == pytest.approx([1 / 3] * 3)


def test_gradients_in_words_and_angles_are_those_of_finite_differences() -> None:
    transformer = model(word_scale=1.0)
    target = torch.tensor([[1, 2, 3, 0], [5, 0, 0, 0], [1, 0, 2, 5]])[None, ..., None]

    def likelihood(angles: Tensor, embeddings: Tensor) -> Tensor:
        own = {"angles": angles, "embeddings": embeddings}
        moved = {f"inner.{name}": value for name, value in own.items()}
        found = torch.func.functional_call(_Next(transformer), moved, ())
        return log_likelihoods(found).gather(-1, target)

    def fidelity(angles: Tensor, embeddings: Tensor) -> Tensor:
        own = {"angles": angles, "embeddings": embeddings}
        return loss(torch.func.functional_call(transformer, own, (batch(*SENTENCES),)))

    given = (transformer.angles, transformer.embeddings)
    assert torch.autograd.gradcheck(likelihood, given)
    assert torch.autograd.gradcheck(fidelity, given)


class _Next(torch.nn.Module):
    def __init__(self, inner: QuantumTransformer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self) -> Tensor:
        return self.inner.next_words(batch(*SENTENCES))


def test_parts_of_the_transitions_add_up_for_trained_words() -> None:
    transformer = model()
    loss(transformer(batch(*SENTENCES))).sum().backward()
    expected = transformer.embeddings.grad.clone()
    transformer.zero_grad()
    for part in range(2):
        found = transformer.by_transitions(batch(*SENTENCES, part=part), 2)
        loss(found).sum().backward()
    assert (transformer.embeddings.grad - expected).abs().max() < 1e-12


def test_circuits_agree_about_trained_words_and_have_no_gradient_in_them() -> None:
    transformer = model()
    for _ in range(2):  # the circuits follow when words change
        with torch.no_grad():
            found = transformer.by_circuits(batch(*SENTENCES))
            assert (found - transformer(batch(*SENTENCES))).abs().max() < 1e-13
            transformer.embeddings.add_(torch.rand_like(transformer.embeddings))
    with pytest.raises(ConfigError, match="no gradient in trainable embeddings"):
        transformer.by_circuits(batch(*SENTENCES))


def test_the_scales_are_what_words_and_positions_are_multiplied_by() -> None:
    plain = model(trainable=False)
    wide = model(trainable=False, word_scale=0.4, position_scale=2.0)
    assert torch.allclose(wide.embeddings, 4 * plain.embeddings)
    flat = model(trainable=False, position_scale=0)
    states = flat.encode(torch.tensor([3, 3]))
    assert torch.equal(states[0], states[1])
    vector = flat.embeddings[3]
    assert torch.allclose(states[0], vector / vector.norm())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"word_scale": 0}, "word_scale=0: must be positive"),
        ({"word_scale": float("nan")}, "word_scale must be a finite number"),
        ({"position_scale": -1}, "position_scale=-1: must not be negative"),
        ({"position_scale": "1"}, "position_scale must be a finite number, not '1'"),
        ({"trainable": True, "restarts": 2}, "restarts=2: trainable words would be shared"),
    ],
)
def test_wrong_arguments_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantumTransformer(WORDS, 4, **keys)


def test_what_does_not_fit_is_refused() -> None:
    transformer = model(trainable=False)
    words = torch.zeros(1, 1, dtype=torch.int64).expand(1 << 20, 1 << 12)
    huge = Sentences(words, torch.ones(1 << 20, dtype=torch.int64), torch.zeros(1 << 20).long())
    with pytest.raises(ConfigError, match="amplitudes of 7 words after 1048576 sentences"):
        transformer.next_words(huge)
