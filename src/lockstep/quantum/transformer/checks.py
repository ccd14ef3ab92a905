"""Arguments of a quantum transformer that cannot be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import as_integer
from lockstep.quantum.simulation.memory import check_fits
from lockstep.quantum.transformer.ansatz import angle_shape

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
    for name, value in (("num_layers", num_layers), ("restarts", restarts)):
        if as_integer(value, name) < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
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
    if _number(word_scale, "word_scale") <= 0:
        raise ConfigError(f"word_scale={word_scale}: must be positive")
    if _number(position_scale, "position_scale") < 0:
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
    """Check that the amplitudes of all words at all places of sentences fit into memory.

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


def _number(value: object, name: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value!r}")
    return float(value)
