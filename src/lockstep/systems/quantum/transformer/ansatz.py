"""Words as quantum states, the trainable unitary of a register, and checks of arguments.

A layer has one block for each pair of `pairs`. A block on (c, t) rotates both qubits and applies
CNOT(c, t), twice. A rotation is RX, then RY, then RZ. Qubit 0 is the least significant bit of a
row's number, as in Qiskit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_count, as_integer, as_number
from lockstep.systems.quantum.simulation.parts import check_fits

WORD_SCALE = 0.1
"""Words are drawn from U(0, 0.1)^d by default."""


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


_CX = torch.tensor([0, 3, 2, 1])
"""CNOT(c, t) as a permutation of 2t + c."""


def _rotation_terms() -> Tensor:
    """The 8 terms of (cos - i sin Z)(cos - i sin Y)(cos - i sin X), as 8 real numbers each."""
    identity = torch.eye(2, dtype=torch.complex128)
    paulis = ([[1, 0], [0, -1]], [[0, -1j], [1j, 0]], [[0, 1], [1, 0]])
    z, y, x = (torch.stack([identity, -1j * torch.tensor(p).to(identity)]) for p in paulis)
    return torch.view_as_real(torch.einsum("aij,bjk,ckl->abcil", z, y, x)).reshape(8, 8)


_TERMS = _rotation_terms()


def pairs(num_qubits: int) -> list[tuple[int, int]]:
    """The (control, target) pairs of a layer: (q, q + 1) for even q, for odd q, and around the end.

    There are `num_qubits` pairs, and none for a single qubit.
    """
    if num_qubits < 2:
        return []
    firsts = [*range(0, num_qubits - 1, 2), *range(1, num_qubits - 1, 2), num_qubits - 1]
    return [(q, (q + 1) % num_qubits) for q in firsts]


def angle_shape(num_qubits: int, num_layers: int) -> tuple[int, int, int, int]:
    """The shape of a register's angles: (layers, blocks, rotations of a block, 3).

    The rotations of a block are on c, t, c, t. A single qubit has one rotation in each layer.
    """
    return (num_layers, num_qubits, 4, 3) if num_qubits > 1 else (num_layers, 1, 1, 3)


def rotations(angles: Tensor) -> Tensor:
    """RZ(angles[2]) RY(angles[1]) RX(angles[0]) as matrices.

    Args:
        angles: angles of RX, RY and RZ in radians, real, [..., 3].

    Returns:
        Matrices [..., 2, 2], complex.
    """
    half = angles * 0.5
    x, y, z = torch.stack([half.cos(), half.sin()], dim=-1).unbind(-2)
    factors = (
        z[..., :, None, None] * (y[..., :, None] * x[..., None, :])[..., None, :, :]
    ).flatten(-3)
    entries = factors @ _TERMS.to(angles)
    return torch.view_as_complex(entries.view(*angles.shape[:-1], 2, 2, 2))


def unitaries(angles: Tensor, num_qubits: int) -> Tensor:
    """The ansatz as matrices.

    Args:
        angles: angles in radians, real, [..., *angle_shape(num_qubits, layers)].
        num_qubits: number of qubits of the register, at least 1.

    Returns:
        Unitary matrices [..., 2^num_qubits, 2^num_qubits], complex.
    """
    single = rotations(angles)
    if num_qubits == 1:
        return _product(single[..., 0, 0, :, :])
    blocks = _blocks(single)
    if num_qubits == 2:
        first, second = blocks.unbind(-3)
        # A block on (1, 0) has its two bits the other way round.
        bits = second.view(*second.shape[:-2], 2, 2, 2, 2)
        swapped = bits.transpose(-1, -2).transpose(-3, -4).reshape(second.shape)
        return _product(swapped @ first)
    return _apply_blocks(blocks, num_qubits)


def _blocks(single: Tensor) -> Tensor:
    """CX (R ⊗ R) CX (R ⊗ R) from rotations [..., 4, 2, 2] on c, t, c, t, rows ordered by 2t + c."""
    controls, targets = single[..., 0::2, :, :], single[..., 1::2, :, :]
    both = targets[..., :, None, :, None] * controls[..., None, :, None, :]
    both = both.flatten(-4, -3).flatten(-2)
    first, second = both.unbind(-3)
    cx = _CX.to(single.device)
    second = second.index_select(-2, cx).index_select(-1, cx)
    blocks: Tensor = second @ first
    return blocks


def _product(layers: Tensor) -> Tensor:
    """The product of matrices [..., L, d, d], the first one rightmost."""
    return reduce(lambda product, layer: layer @ product, layers.unbind(-3))


def _apply_blocks(blocks: Tensor, num_qubits: int) -> Tensor:
    lead, dim = blocks.shape[:-4], 1 << num_qubits
    identity = torch.eye(dim, dtype=blocks.dtype, device=blocks.device)
    product = identity.expand(*lead, dim, dim).view(*lead, *(2,) * num_qubits, dim)
    bits = len(lead) + num_qubits - 1
    for layer in range(blocks.shape[-4]):
        for index, (control, target) in enumerate(pairs(num_qubits)):
            front = (len(lead), len(lead) + 1)
            moved = product.movedim((bits - target, bits - control), front)
            matrix = blocks[..., layer, index, :, :]
            after = matrix @ moved.flatten(len(lead), len(lead) + 1).flatten(len(lead) + 1)
            product = after.view(moved.shape).movedim(front, (bits - target, bits - control))
    whole: Tensor = product.flatten(len(lead), bits)
    return whole


_LARGE_REGISTER = 8
"""Qubits from which on V and W might not fit into memory."""
_MANY_AMPLITUDES = 1 << 24
"""Amplitudes of next words from which on they might not fit into memory."""
_COPIES = 4
"""Copies in memory: of V and of W while they are multiplied up from their blocks, or of the
amplitudes of next words."""
_COPIES_OF_A_BLOCK = 2
"""Further copies of V and W for the gradient, for each block."""


def check_model(
    words: Sequence[str],
    dim: int,
    num_layers: int,
    restarts: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Check the arguments of `QuantumTransformer`, which says what they are.

    Raises:
        ConfigError: as `QuantumTransformer`.
    """
    if isinstance(words, str) or not all(isinstance(w, str) and "\n" not in w for w in words):
        raise ConfigError("the vocabulary must be a sequence of words, each of one line")
    if as_integer(dim, "dim") < 2 or dim & (dim - 1):
        raise ConfigError(f"dim={dim}: must be a power of two from 2 on")
    as_count(num_layers, "num_layers")
    as_count(restarts, "restarts")
    if not 0 <= as_integer(seed, "seed") < 1 << 64:
        raise ConfigError(f"seed={seed}: must be from 0 to 2^64 - 1")
    if dtype not in (torch.float64, torch.float32):
        raise ConfigError(f"dtype={dtype}: must be torch.float64 or torch.float32")
    num_angles = 2 * restarts * math.prod(angle_shape(dim.bit_length() - 1, num_layers))
    check_fits(
        f"a model of {len(words)} words of dimension {dim} with {num_angles:,} angles",
        2 * (len(words) * dim + num_angles) * torch.float64.itemsize,
        advice="take a smaller dimension, fewer layers or fewer restarts",
    )


def check_words(trainable: bool, restarts: int, word_scale: float, position_scale: float) -> None:
    """Check the arguments of `QuantumTransformer` about words.

    Raises:
        ConfigError: as `QuantumTransformer`.
    """
    if trainable and restarts > 1:
        raise ConfigError(
            f"restarts={restarts}: trainable words would be shared by restarts that are to be "
            "independent; take one"
        )
    if as_number(word_scale, "word_scale") <= 0:
        raise ConfigError(f"word_scale={word_scale}: must be positive")
    if as_number(position_scale, "position_scale") < 0:
        raise ConfigError(f"position_scale={position_scale}: must not be negative")


def check_unitaries(angles: Tensor, num_qubits: int) -> None:
    """Check that V and W of some restarts fit into memory.

    Args:
        angles: their angles, [R, 2, *angle_shape].
        num_qubits: number of qubits of a register.

    Raises:
        ConfigError: they do not.
    """
    if num_qubits < _LARGE_REGISTER:  # small steps take less than a millisecond
        return
    copies = _COPIES
    if torch.is_grad_enabled():
        copies += _COPIES_OF_A_BLOCK * num_qubits * angles.shape[2]
    matrix = angles.dtype.to_complex().itemsize << (2 * num_qubits)
    check_fits(
        f"V and W on {num_qubits} qubits each",
        2 * len(angles) * copies * matrix,
        angles.device,
        f"take fewer than {1 << num_qubits} dimensions, fewer layers or fewer restarts",
    )


def check_next_words(words: Tensor, num_words: int, unitaries: Tensor) -> None:
    """Check that the amplitudes of all words at all positions of sentences fit into memory.

    Args:
        words: rows of the embeddings, int64 [B, L].
        num_words: number of words of the vocabulary.
        unitaries: V and W of R restarts, complex, [R, ...].

    Raises:
        ConfigError: they do not.
    """
    count, length = words.shape
    elements = len(unitaries) * count * (length - 1) * num_words
    if elements >= _MANY_AMPLITUDES:
        check_fits(
            f"the amplitudes of {num_words} words after {count} sentences",
            elements * _COPIES * unitaries.dtype.itemsize,
            unitaries.device,
            "take a smaller batch_size, or num_microbatches higher",
        )
