"""The quantum transformer's amplitude without a circuit.

With t_p the state of word p, Ψ_i = Σ_{j<i} t_j t_jᵀ / n_i of norm 1, V on the first register and W
on the second, transition i = 1..T contributes

    a_i = t_{i-1}† W Ψ_i Vᵀ t_i* = (1/n_i) Σ_{j<i} (t_i† V t_j) (t_{i-1}† W t_j)

and the amplitude is A = (1/T) Σ_i a_i. The right-hand side is attention with two bilinear scores
and a causal mask: Ψ_i never has to be made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.quantum.transformer.encoding import context_norms

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
        places = rows.clamp(min=1)[:, :, None].expand(-1, -1, states.shape[2])
        targets, currents = states.gather(1, places), states.gather(1, places - 1)
        norms = norms.gather(1, places[:, :, 0] - 1)
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
