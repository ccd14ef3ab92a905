"""The amplitudes of all words of a vocabulary as next word, without a circuit.

Transition i of a sentence has, for each word v that may be at place i,

    a_i(v) = <t_{i-1}| <v_i| (W ⊗ V) |ψ_i> = v_i† Σ_{j<i} V t_j (t_{i-1}† W t_j) / n_i

It is √T times the superposition circuit's amplitude of |0…0> and value i - 1 of the controls, when
these are measured as they are instead of being brought to interfere (no H at the end). The sum over
j is attention, and has to be made once for all words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.quantum.transformer.closed_form import EPSILON, probability
from lockstep.quantum.transformer.encoding import context_norms


def next_word_amplitudes(unitaries: Tensor, states: Tensor, vocabulary: Tensor) -> Tensor:
    """The amplitude a_i(v) of each word after each beginning of each sentence.

    Args:
        unitaries: V and W, complex, [..., 2, 1, d, d].
        states: real states of norm 1 of the words of B sentences, [B, L, d].
        vocabulary: states of all N words at places 1..L-1, real and of norm 1, [L - 1, N, d].

    Returns:
        Complex [..., B, L - 1, N]; entry i - 1 is that of transition i, and without a meaning where
        a sentence has no word i - 1.
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
    own = amplitudes.gather(-1, chosen)
    numbers = torch.arange(1, own.shape[-2] + 1, device=own.device)[:, None]
    return (own.cumsum(-2) - own + amplitudes) / numbers


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
