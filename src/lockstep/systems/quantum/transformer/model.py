"""The quantum transformer: words in, the probability of their sentence out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError, ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer
from lockstep.systems.quantum.circuits.circuit import Circuit
from lockstep.systems.quantum.simulation.adjoint import differentiable_once
from lockstep.systems.quantum.simulation.gradients import share, shifted
from lockstep.systems.quantum.simulation.statevector import Simulator
from lockstep.systems.quantum.transformer.amplitudes import (
    amplitudes,
    next_word_amplitudes,
    probability,
    superposition,
    transitions,
)
from lockstep.systems.quantum.transformer.ansatz import (
    WORD_SCALE,
    angle_shape,
    check_model,
    check_next_words,
    check_unitaries,
    check_words,
    encode,
    positions,
    unitaries,
    word_vectors,
)

_MOST_SIMULATORS = 512
"""Most sentences whose simulators are cached."""

_OF_PARTS = (
    "second derivatives of parts of the transitions are not supported: they are no sum over parts; "
    "take one part (num_parts=1)"
)

START_SCALE = 0.1
"""Angles start at 0.1 · N(0, 1)."""


class Sentences(NamedTuple):
    """A batch of B sentences.

    Attributes:
        words: rows of the embeddings, [B, L], int64; entries beyond a sentence's end are not used.
        transitions: number of words of each sentence minus one, [B], int64.
        parts: for each sentence, the number of the part of its work to do, [B], int64.
    """

    words: Tensor
    transitions: Tensor
    parts: Tensor


class QuantumTransformer(nn.Module):
    """V and W of one or more restarts, and the vectors of words.

    Attributes:
        angles: angles of V and W, [restarts, 2, *angle_shape]; 48 L in each restart for d = 4.
        embeddings: vectors of the words, [words, d], drawn once from the seed and kept in
            checkpoints; a parameter if they are trainable.
        vocabulary: the words as bytes, uint8 [bytes], one word a line, so that a checkpoint has the
            words of its rows.
    """

    angles: nn.Parameter
    embeddings: Tensor
    vocabulary: Tensor

    def __init__(
        self,
        words: Sequence[str],
        dim: int,
        num_layers: int = 1,
        *,
        restarts: int = 1,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        trainable: bool = False,
        word_scale: float = WORD_SCALE,
        position_scale: float = 1.0,
    ) -> None:
        """Draw embeddings from the seed, and angles from torch's generator.

        Args:
            words: words of the vocabulary, each of one line.
            dim: dimension d of a word's state, a power of two, at least 2.
            num_layers: number of layers of the ansatz, at least 1.
            restarts: number of independent sets of angles, at least 1.
            seed: seed of the embeddings, from 0 to 2^64 - 1.
            dtype: dtype of angles and embeddings, float32 or float64; amplitudes are complex
                numbers of twice the bytes.
            trainable: whether the vectors of words are parameters, too; with one restart only.
            word_scale: words are drawn from U(0, word_scale)^d.
            position_scale: factor of the position encoding, whose norm is √(d / 2).

        Raises:
            ConfigError: a number is out of range, a word is not a string of one line, vectors of
                words are trainable with several restarts, or the model does not fit into memory.
        """
        super().__init__()
        check_model(words, dim, num_layers, restarts, seed, dtype)
        check_words(trainable, restarts, word_scale, position_scale)
        self.num_qubits = dim.bit_length() - 1
        shape = (restarts, 2, *angle_shape(self.num_qubits, num_layers))
        self.angles = nn.Parameter(START_SCALE * torch.randn(shape, dtype=dtype))
        vectors = word_vectors(words, dim, seed, word_scale).to(dtype)
        if trainable:
            self.embeddings = nn.Parameter(vectors)
        else:
            self.register_buffer("embeddings", vectors)
        self.register_buffer(
            "vocabulary", torch.tensor(list("\n".join(words).encode()), dtype=torch.uint8)
        )
        self._position_scale = position_scale
        self._positions = positions(0, dim)
        self._simulators: dict[tuple[int, ...], Simulator] = {}
        self.register_load_state_dict_pre_hook(_check_vocabulary)  # type: ignore[no-untyped-call]

    @property
    def words(self) -> list[str]:
        """The vocabulary, in the order of the embeddings."""
        return bytes(self.vocabulary.tolist()).decode().split("\n")

    def encode(self, words: Tensor) -> Tensor:
        """The states of words at positions 0..L-1.

        Args:
            words: rows of the embeddings, [..., L], int64.

        Returns:
            States [..., L, d], real and of norm 1, in the dtype of the embeddings; differentiable
            in these if they are trainable.
        """
        return encode(self.embeddings[words], self._encodings(words.shape[-1]))

    def _encodings(self, length: int) -> Tensor:
        """The scaled encodings of positions 0..length - 1."""
        if len(self._positions) < length or self._positions.device != self.embeddings.device:
            table = self._position_scale * positions(length, self.embeddings.shape[1])
            self._positions = table.to(self.embeddings)
        return self._positions[:length]

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle has no simulators; it makes them when needed."""
        return {**self.__dict__, "_simulators": {}}

    def unitaries(self, restarts: Tensor | None = None) -> Tensor:
        """V and W of all restarts, or of some.

        Args:
            restarts: numbers of the restarts, int64 [R]; all by default.

        Returns:
            Complex matrices [R, 2, d, d].

        Raises:
            ConfigError: they do not fit into memory.
        """
        angles = self.angles if restarts is None else self.angles[restarts]
        check_unitaries(angles, self.num_qubits)
        return unitaries(angles, self.num_qubits)

    def forward(self, batch: Sentences) -> Tensor:
        """|A|² of each sentence, for each restart.

        Args:
            batch: B sentences.

        Returns:
            Probabilities [restarts, B], real, in the dtype of the angles.
        """
        given = transitions(self.encode(batch.words), batch.transitions)
        return probability(amplitudes(self.unitaries().unsqueeze(-3), given))

    def next_words(self, batch: Sentences) -> Tensor:
        """The amplitude a_i(v) of each transition i with each word v of the vocabulary as target.

        Args:
            batch: B sentences of at most L words.

        Returns:
            Complex [restarts, B, L - 1, words]; entry i - 1 is undefined from a sentence's end on.

        Raises:
            ConfigError: they do not fit into memory.
        """
        length = batch.words.shape[1]
        unitaries = self.unitaries().unsqueeze(-3)
        check_next_words(batch.words, len(self.embeddings), unitaries)
        vocabulary = encode(self.embeddings, self._encodings(length)[1:, None])
        return next_word_amplitudes(unitaries, self.encode(batch.words), vocabulary)

    def by_transitions(self, batch: Sentences, num_parts: int) -> Tensor:
        """As `forward`, but with gradients through some transitions of each sentence only.

        Part p of P has transitions p·T/P + 1 .. (p + 1)·T/P. The sum over all parts of the
        gradients of any function of the result is the gradient of that function. With more than
        one part, second derivatives are an error: they are not such a sum.

        Args:
            batch: B sentences, with the part p of each.
            num_parts: number P of parts.

        Returns:
            Probabilities [restarts, B], those of whole sentences.
        """
        states = self.encode(batch.words)
        matrices = self.unitaries().unsqueeze(-3)
        with torch.no_grad():
            whole = amplitudes(matrices, transitions(states, batch.transitions))
        first = batch.parts * batch.transitions // num_parts
        last = (batch.parts + 1) * batch.transitions // num_parts
        width = max(1, int((last - first).max()))
        rows = first[:, None] + torch.arange(1, width + 1, device=first.device)
        rows = rows * (rows <= last[:, None])
        part = amplitudes(matrices, transitions(states, batch.transitions, rows))
        if num_parts > 1:
            part = differentiable_once(part, _OF_PARTS)
        return probability(whole + (part - part.detach()))

    def by_restarts(self, batch: Sentences, num_parts: int) -> Tensor:
        """As `forward`, for a part of the restarts of each sentence.

        Args:
            batch: B sentences, with the part p of each.
            num_parts: number P of parts, a divisor of the number of restarts.

        Returns:
            Probabilities [restarts / P, B].
        """
        size = len(self.angles) // num_parts
        chosen, index = torch.unique(batch.parts, return_inverse=True)
        restarts = (chosen[:, None] * size + torch.arange(size, device=chosen.device)).flatten()
        matrices = self.unitaries(restarts)
        matrices = matrices.view(-1, size, *matrices.shape[1:])[index].permute(1, 2, 0, 3, 4)
        given = transitions(self.encode(batch.words), batch.transitions)
        return probability(amplitudes(matrices, given))

    def by_circuits(
        self,
        batch: Sentences,
        *,
        shift: bool = False,
        shots: int | None = None,
        num_parts: int = 1,
    ) -> Tensor:
        """As `forward`, by simulating each sentence's superposition circuit.

        Args:
            batch: sentences to simulate.
            shift: whether to compute gradients by the parameter-shift rule instead of adjoint
                differentiation.
            shots: number of measurements, drawn with torch's global generator, that estimate each
                probability; None is exact. Needs `shift`.
            num_parts: number P of parts of the gradient, with `shift`: part p has gradients in the
                angles p·N/P .. (p + 1)·N/P of a restart's N only.

        Returns:
            Probabilities [restarts, B], real; with `shots`, estimates of them.

        Raises:
            ConfigError: there are shots or parts without `shift`, a circuit does not fit into
                memory, or gradients are needed while embeddings are trainable: they are fixed
                matrices of a circuit.
        """
        if self.embeddings.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                "circuits have no gradient in trainable embeddings; take the closed form"
            )
        if not shift and (shots is not None or num_parts > 1):
            raise ConfigError("shots and parts are for gradients by shifts; set shift=True")
        angles = self.angles.flatten(1)

        def measure(states: Tensor) -> Tensor:
            exact = probability(states[:, :1])
            if shots is None:
                return exact
            counts = torch.binomial(torch.full_like(exact, shots), exact.clamp(0, 1))
            return counts / shots

        probabilities = []
        rows = zip(
            batch.words.tolist(), batch.transitions.tolist(), batch.parts.tolist(), strict=True
        )
        for words, count, part in rows:
            simulator = self._simulator(tuple(words[: count + 1]))
            if shift:
                only = share(angles.shape[1], part, num_parts) if num_parts > 1 else None
                probabilities.append(shifted(simulator, angles, measure, only)[:, 0])
            else:
                probabilities.append(measure(simulator.state(angles))[:, 0])
        return torch.stack(probabilities, dim=1)

    def circuit(self, words: Sequence[int]) -> Circuit:
        """The superposition circuit of a sentence, given as rows of the embeddings.

        Raises:
            ConfigError: there are fewer than two words, the embeddings have no such row, or the
                circuit does not fit into memory.
        """
        count = len(self.embeddings)
        wrong = [row for row in words if not 0 <= as_integer(row, "word") < count]
        if wrong:
            raise ConfigError(f"word {wrong[0]}: the embeddings have {count} rows")
        states = self.encode(torch.tensor(words, device=self.angles.device))
        return superposition(states, self.angles.shape[2])

    def _simulator(self, words: tuple[int, ...]) -> Simulator:
        cached = self._simulators.get(words)
        if cached is not None and cached.device == self.angles.device:
            return cached
        dtype = self.angles.dtype.to_complex()
        made = Simulator(self.circuit(words), dtype, self.angles.device)
        if not isinstance(self.embeddings, nn.Parameter):  # those change from step to step
            if len(self._simulators) == _MOST_SIMULATORS:
                self._simulators.clear()
            self._simulators[words] = made
        return made

    @torch.no_grad()
    def rank_next(self, prefix: Sequence[int], candidates: Tensor, restart: int = 0) -> Tensor:
        """|A|² of the prefix followed by each candidate.

        Args:
            prefix: rows of the embeddings for the words of the prefix, at least one.
            candidates: rows of the embeddings for the candidates, [C], int64.
            restart: number of the restart whose angles are used.

        Returns:
            Probabilities [C], real, in the order of the candidates.
        """
        start = torch.tensor(prefix, device=candidates.device).expand(len(candidates), -1)
        words = torch.cat([start, candidates[:, None]], dim=1)
        count = torch.full_like(candidates, len(prefix))
        given = transitions(self.encode(words), count)
        one = torch.tensor([restart], device=candidates.device)
        return probability(amplitudes(self.unitaries(one).unsqueeze(-3), given))[0]


def _check_vocabulary(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Refuse the parameters of another vocabulary, whose rows would mean other words."""
    assert isinstance(module, QuantumTransformer)
    theirs = state.get(prefix + "vocabulary")
    if theirs is not None and not torch.equal(theirs.cpu(), module.vocabulary.cpu()):
        raise CheckpointError(
            "vocabulary: the checkpoint's words are not those of the corpus; has the corpus "
            "changed? Train on it in a new run directory"
        )
    module._simulators.clear()
