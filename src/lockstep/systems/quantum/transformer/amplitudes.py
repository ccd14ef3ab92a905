"""The quantum transformer's amplitudes and metric: in closed form, and as one circuit.

With t_p the state of word p, Ψ_i = Σ_{j<i} t_j t_jᵀ / n_i of norm 1, V on the first register and W
on the second, transition i = 1..T contributes

    a_i = t_{i-1}† W Ψ_i Vᵀ t_i* = (1/n_i) Σ_{j<i} (t_i† V t_j) (t_{i-1}† W t_j)

and the amplitude is A = (1/T) Σ_i a_i. The right-hand side is attention with two bilinear scores
and a causal mask: Ψ_i never has to be made.

The circuit has all transitions in superposition. Its control qubits are the transition's number.
Controlled on each value c, the context ψ of transition c + 1 is prepared on both registers; V and W
act once, for all transitions; controlled again, the preparation of the target is undone on the
first register, and that of the current word on the second. The amplitude of |0…0> is A.

Transition i of a sentence has, for each word v that may be at position i,

    a_i(v) = <t_{i-1}| <v_i| (W ⊗ V) |ψ_i> = v_i† Σ_{j<i} V t_j (t_{i-1}† W t_j) / n_i

It is √T times the circuit's amplitude of |0…0> and value i - 1 of the controls, if the controls are
measured without the final H, which makes them interfere. The sum over j is attention, and is
computed once for all words.

For a corpus, the circuit prepares Σ_i √p_i |i> (W ⊗ V) ψ_i, with p_i the weight of transition i.
Its metric needs the ψ_i only through ρ = Σ_i p_i ψ_i ψ_iᵀ, which is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer, parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate, unitary
from lockstep.systems.quantum.simulation.gradients import fubini_study_of
from lockstep.systems.quantum.simulation.parts import check_fits
from lockstep.systems.quantum.transformer.ansatz import angle_shape, context_norms, pairs, unitaries

EPSILON = 1e-12
"""Added to the probability before the logarithm."""


class Transitions(NamedTuple):
    """Transitions of B sentences, ready to be scored.

    Attributes:
        queries: states t_i and t_{i-1} of R transitions, [2, B, R, d].
        keys: states t_j, [B, K, d].
        factors: 1 / (n_i T) where j < i, else 0, [B, R, K].
    """

    queries: Tensor
    keys: Tensor
    factors: Tensor


def transitions(states: Tensor, count: Tensor, rows: Tensor | None = None) -> Transitions:
    """The transitions of sentences, or some of them.

    Args:
        states: real states of norm 1, [B, L, d]; entries beyond a sentence's end are not used.
        count: number T of transitions of each sentence, at most L - 1, [B], int64.
        rows: number i of each transition to take, 0 for none, [B, R], int64; all of 1..L-1 by
            default.
    """
    norms, keys = context_norms(states), states[:, :-1]
    columns = torch.arange(keys.shape[1], device=states.device)
    if rows is None:
        rows = (columns + 1).expand(len(states), -1)
        targets, currents = states[:, 1:], keys
    else:
        index = rows.clamp(min=1)[:, :, None].expand(-1, -1, states.shape[2])
        targets, currents = states.gather(1, index), states.gather(1, index - 1)
        norms = norms.gather(1, index[:, :, 0] - 1)
    mask = columns < (rows * (rows <= count[:, None]))[:, :, None]
    factors = mask / (norms * count[:, None])[:, :, None]
    return Transitions(torch.stack([targets, currents]), keys, factors)


def amplitudes(unitaries: Tensor, given: Transitions) -> Tensor:
    """The contributions of transitions to the amplitudes A of their sentences.

    Args:
        unitaries: V and W, complex, [..., 2, b, d, d]; b is 1, or B for those of each sentence.
        given: transitions of B sentences, in the precision of the unitaries.

    Returns:
        Complex [..., B]; with all transitions of a sentence, its amplitude A.
    """
    dtype = unitaries.dtype
    scores = given.queries.to(dtype) @ unitaries @ given.keys.mT.to(dtype)
    products = scores.select(-4, 0) * scores.select(-4, 1)
    return (products * given.factors).flatten(-2).sum(-1)


def probability(amplitude: Tensor) -> Tensor:
    """|A|², element-wise: real, of the shape of `amplitude`, which is complex."""
    return torch.view_as_real(amplitude).square().sum(-1)


def loss(probability: Tensor) -> Tensor:
    """-ln(P + 1e-12), element-wise: real, of the shape of `probability`."""
    return -torch.log(probability + EPSILON)


def next_word_amplitudes(unitaries: Tensor, states: Tensor, vocabulary: Tensor) -> Tensor:
    """The amplitude a_i(v) of each word after each beginning of each sentence.

    Args:
        unitaries: V and W, complex, [..., 2, 1, d, d].
        states: real states of norm 1 of the words of B sentences, [B, L, d].
        vocabulary: states of all N words at positions 1..L-1, real and of norm 1, [L - 1, N, d].

    Returns:
        Complex [..., B, L - 1, N]; entry i - 1 is that of transition i, and undefined where a
        sentence has no word i - 1.
    """
    dtype = unitaries.dtype
    keys = states[:, :-1].to(dtype)
    v, w = unitaries.unbind(-4)
    causal = torch.ones(keys.shape[1], keys.shape[1], dtype=states.dtype, device=states.device)
    factors = causal.tril() / context_norms(states)[:, :, None]
    attention = (keys @ w @ keys.mT) * factors
    mixed = attention @ (keys @ v.mT)
    return torch.einsum("...brd,rnd->...brn", mixed, vocabulary.to(dtype))


def of_sentences(amplitudes: Tensor, words: Tensor) -> Tensor:
    """The amplitudes of the sentences that end with each word.

    Args:
        amplitudes: a_i(v) as of `next_word_amplitudes`, [..., B, L - 1, N].
        words: numbers of the sentences' words, int64 [B, L].

    Returns:
        A of words 0..i-1 followed by v, (Σ_{k<i} a_k + a_i(v)) / i, complex, [..., B, L - 1, N].
    """
    chosen = words[:, 1:, None].expand(*amplitudes.shape[:-1], 1)
    of_chosen = amplitudes.gather(-1, chosen)
    numbers = torch.arange(1, of_chosen.shape[-2] + 1, device=of_chosen.device)[:, None]
    return (of_chosen.cumsum(-2) - of_chosen + amplitudes) / numbers


def log_likelihoods(amplitudes: Tensor) -> Tensor:
    """Ln of the Born probabilities |a|² + 1e-12, normalised over the last dimension.

    Args:
        amplitudes: complex, [..., N].

    Returns:
        Logarithms [..., N], real, of probabilities of sum 1.
    """
    likely = probability(amplitudes) + EPSILON
    logarithms: Tensor = likely.log() - likely.sum(-1, keepdim=True).log()
    return logarithms


_COPIES = 3
"""Copies of ρ in memory while its eigenvectors are computed."""
_NEGLIGIBLE = 1e-14
"""Eigenvalues of ρ below this part of the greatest are rounding."""


def context_root(states: Tensor, transitions: Tensor) -> Tensor:
    """Columns whose outer products add up to ρ of a corpus.

    Args:
        states: states of the words of S sentences, real, [S, L, d].
        transitions: number T of transitions of each sentence, [S], int64. A sentence counts 1 / S,
            each of its transitions 1 / (S T).

    Returns:
        Matrices [r, d, d] with r ≤ d (d + 1) / 2, in the dtype of the states.

    Raises:
        ConfigError: ρ does not fit into memory.
    """
    dim = states.shape[2]
    check_metric_fits(dim, states.dtype, states.device)
    density = states.new_zeros(dim * dim, dim * dim)
    for sentence, count in zip(states, transitions.tolist(), strict=True):
        keys = sentence[:count]
        contexts = torch.einsum("ja,jb->jab", keys, keys).cumsum(0).flatten(1)
        contexts = contexts / torch.linalg.vector_norm(contexts, dim=1, keepdim=True)
        density.addmm_(contexts.mT, contexts, alpha=1 / (len(states) * count))
    values, vectors = torch.linalg.eigh(density)
    is_large = values > _NEGLIGIBLE * values[-1]
    columns: Tensor = vectors[:, is_large] * values[is_large].sqrt()
    return columns.mT.reshape(-1, dim, dim)


def check_metric_fits(
    dim: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> None:
    """Check that ρ [d², d²] of words of dimension d fits into memory.

    Args:
        dim: dimension d of a word's state.
        dtype: real dtype of ρ.
        device: device of ρ.

    Raises:
        ConfigError: it does not; the message has the bytes needed and those there are.
    """
    check_fits(
        f"the metric of words of dimension {dim}",
        _COPIES * dim**4 * dtype.itemsize,
        device,
        "take a smaller dimension, or an optimizer other than natural",
    )


def fubini_study(angles: Tensor, num_qubits: int, root: Tensor) -> Tensor:
    """g_jk = Re(<∂_j Φ|∂_k Φ> - <∂_j Φ|Φ><Φ|∂_k Φ>) (Stokes et al. 2020, equation 4).

    Args:
        angles: angles of V and W, [2, *angle_shape], P elements in all.
        num_qubits: number of qubits of one register.
        root: the result of `context_root`, [r, d, d].

    Returns:
        Metric [P, P], real and symmetric.
    """

    def state(flat: Tensor) -> Tensor:
        v, w = unitaries(flat.view_as(angles), num_qubits)
        after = w @ root.to(w.dtype) @ v.mT
        return torch.view_as_real(after.flatten())

    return fubini_study_of(state, angles.detach().flatten())


_PREPARATION_COPIES = 4
"""Matrices in memory while the preparation of a transition is made and checked."""
_NORM_TOLERANCE = 1e-4
"""States may have been normalised in single precision."""


def superposition(states: Tensor, num_layers: int) -> Circuit:
    """The circuit of a sentence.

    Args:
        states: states of the sentence's words, real and of norm 1, [T + 1, d] with d = 2^n.
        num_layers: number of layers of the ansatz.

    Returns:
        A circuit on 2n qubits (first register, then second) and as many controls as T needs. Its
        parameters are the angles of V, then those of W, flat.

    Raises:
        ConfigError: there are fewer than two states, their dimension is not a power of two or their
            norm not 1, or the circuit does not fit into memory.
    """
    states = _checked(states)
    as_integer(num_layers, "num_layers")
    transitions, dim = len(states) - 1, states.shape[1]
    check_fits(
        f"the circuit of {transitions} transitions of dimension {dim}",
        (transitions + _PREPARATION_COPIES) * dim**4 * torch.complex128.itemsize,
        advice="take a smaller dimension, or the closed form, which needs no circuit",
    )
    num_qubits = dim.bit_length() - 1
    first, second = tuple(range(num_qubits)), tuple(range(num_qubits, 2 * num_qubits))
    controls = tuple(range(2 * num_qubits, 2 * num_qubits + (transitions - 1).bit_length()))
    spread = list(_spread(controls, transitions))
    gates = list(spread)
    context = torch.zeros(dim, dim, dtype=states.dtype)
    for number in range(transitions):
        context = context + torch.outer(states[number], states[number])
        psi = (context / context.norm()).flatten()
        gates.append(_selected(preparation(psi), (*first, *second), controls, number))
    size = torch.Size(angle_shape(num_qubits, num_layers)).numel()
    gates += _ansatz(first, num_layers, 0)
    gates += _ansatz(second, num_layers, size)
    for number in range(transitions):  # preparations are their own inverses
        gates.append(_selected(preparation(states[number + 1]), first, controls, number))
        gates.append(_selected(preparation(states[number]), second, controls, number))
    return Circuit(2 * num_qubits + len(controls), [*gates, *reversed(spread)], 2 * size)


def _checked(states: Tensor) -> Tensor:
    """The states in double precision.

    Raises:
        ConfigError: as `superposition`.
    """
    if not isinstance(states, Tensor) or states.dim() != 2 or states.is_complex():
        raise ConfigError("the states of a sentence must be a real tensor [words, dimension]")
    count, dim = states.shape
    if count < 2 or dim < 2 or dim & (dim - 1):
        raise ConfigError(
            f"states [{count}, {dim}]: must be at least two, of a dimension that is a power of two"
        )
    states = states.detach().cpu().double()
    if not bool(((states.norm(dim=1) - 1).abs() < _NORM_TOLERANCE).all()):
        raise ConfigError("the states of a sentence must have norm 1")
    return states


def preparation(state: Tensor) -> Tensor:
    """The reflection that exchanges |0…0> and a real state [N] of norm 1: [N, N]."""
    normal = -state
    normal[0] += 1
    square = normal @ normal
    identity = torch.eye(len(state), dtype=state.dtype)
    if square < torch.finfo(state.dtype).tiny:
        return identity
    return identity - torch.outer(normal, normal) * (2 / square)


def _spread(controls: tuple[int, ...], transitions: int) -> Iterator[Gate]:
    """Gates, their own inverses, that make all values below `transitions` equally likely."""
    if transitions == 1 << len(controls):
        yield from (gate("h", qubit) for qubit in controls)
        return
    uniform = torch.zeros(1 << len(controls), dtype=torch.float64)
    uniform[:transitions] = transitions**-0.5
    yield unitary(preparation(uniform), *controls)


def _selected(
    matrix: Tensor, qubits: tuple[int, ...], controls: tuple[int, ...], number: int
) -> Gate:
    made = unitary(matrix, *qubits)
    bits = [number >> i & 1 for i in range(len(controls))]
    return made.controlled(*controls, state=bits) if controls else made


def _ansatz(qubits: tuple[int, ...], num_layers: int, first: int) -> Iterator[Gate]:
    """The gates of `ansatz.unitaries` on these qubits, with parameters from `first` on."""
    number = first
    for _ in range(num_layers):
        for control, target in pairs(len(qubits)) or [(0, 0)]:
            for rotation in range(angle_shape(len(qubits), 1)[2]):
                qubit = qubits[(control, target)[rotation % 2]]
                for name in ("rx", "ry", "rz"):
                    yield gate(name, qubit, angle=parameter(number))
                    number += 1
                if rotation % 2:
                    yield gate("cx", qubits[control], qubits[target])
