"""Words as quantum states: a random vector and the sinusoidal position, normalised."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

WORD_SCALE = 0.1
"""Words are drawn from U(0, 0.1)^d, unless another scale is asked for."""


def word_vectors(words: Sequence[str], dim: int, seed: int, scale: float = WORD_SCALE) -> Tensor:
    """A vector for each word, drawn from U(0, scale).

    A word's vector depends on the word, `dim`, `seed` and `scale` only: not on the other words,
    their order, or the process.

    Args:
        words: words to draw vectors for.
        dim: number of elements of a vector.
        seed: seed of the draws, from 0 to 2^64 - 1.
        scale: upper bound of the draws, positive.

    Returns:
        Vectors [len(words), dim], float64.
    """
    vectors = np.empty((len(words), dim))
    for row, word in zip(vectors, words, strict=True):
        digest = hashlib.sha256(word.encode()).digest()
        key = np.array([seed, int.from_bytes(digest[:8], "little")], dtype=np.uint64)
        row[:] = np.random.Generator(np.random.Philox(key=key)).uniform(0.0, scale, dim)
    return torch.from_numpy(vectors)


def positions(length: int, dim: int) -> Tensor:
    """Sinusoidal position encoding (Vaswani et al. 2017, section 3.5).

    Column 2k of row p is sin(p · 10000^(-2k/dim)), column 2k + 1 the cosine.

    Args:
        length: number of positions.
        dim: number of elements of an encoding, even.

    Returns:
        Encodings [length, dim], float64.
    """
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def encode(vectors: Tensor, positions: Tensor) -> Tensor:
    """Real states [..., L, d] of norm 1: word vectors [..., L, d] plus positions [L, d]."""
    states = vectors + positions
    norms: Tensor = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return states / norms


def context_norms(states: Tensor) -> Tensor:
    """The norm of Σ_{j<i} t_j ⊗ t_j for i = 1..L-1, of states t [..., L, d].

    Its square is the sum of all (t_j · t_k)² with j, k < i.

    Args:
        states: real states [..., L, d].

    Returns:
        Norms [..., L - 1], in the dtype of the states.
    """
    squares = (states @ states.mT).square()
    sums = squares.cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)
    return sums[..., :-1].sqrt()
