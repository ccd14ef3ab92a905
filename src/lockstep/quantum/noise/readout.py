"""Readout errors: what is read, where another outcome was found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.checks import kind_of

Confusion = tuple[tuple[float, float], tuple[float, float]]
"""Row v has the probabilities to read 0 and 1 where a qubit is found as v."""

_EXACT = 1e-9
"""How far the sum of a row may be from 1 and the row be taken as it is."""
_ROUNDED = 1e-6
"""How far it may be from 1 at all: as by numbers of float32. Such a row is divided by its sum."""


def confusion_matrix(rows: object) -> Confusion:
    """A confusion matrix [2, 2], from a tensor or from rows of numbers.

    Raises:
        ConfigError: a row is no distribution.
    """
    given = rows.tolist() if isinstance(rows, Tensor) else rows
    try:
        pairs = [list(row) for row in given]  # type: ignore[attr-defined]
        flat = [float(x) for pair in pairs for x in pair if isinstance(x, Real)]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"confusion must be [[P(0|0), P(1|0)], [P(0|1), P(1|1)]], not {given!r}"
        ) from error
    gaps = [abs(math.fsum(row) - 1) for row in (flat[:2], flat[2:])]
    if (
        [len(pair) for pair in pairs] != [2, 2]
        or len(flat) < 4
        or not all(x >= 0 for x in flat)
        or not all(gap < _ROUNDED for gap in gaps)
    ):
        raise ConfigError(f"confusion: both rows of {given!r} must be two probabilities of sum 1")
    return _of_sum_1(flat[0], flat[1]), _of_sum_1(flat[2], flat[3])


def _of_sum_1(zero: float, one: float) -> tuple[float, float]:
    total = math.fsum((zero, one))
    return (zero, one) if abs(total - 1) < _EXACT else (zero / total, one / total)


def misread(likely: Tensor, confusion: Sequence[object]) -> Tensor:
    """The distribution of what is read, of outcomes of a measurement of all qubits.

    Args:
        likely: probabilities of the outcomes, real, [..., 2^n].
        confusion: a confusion matrix as for `Measure`, for each of the n qubits.

    Returns:
        Probabilities [..., 2^n] of what is read; differentiable.

    Raises:
        ConfigError: there are not n confusion matrices, or one is none.
    """
    if not isinstance(likely, Tensor) or not likely.is_floating_point() or not likely.dim():
        raise ConfigError(f"probabilities must be a real tensor, not {kind_of(likely)}")
    size = likely.shape[-1]
    if size != 1 << len(confusion):
        raise ConfigError(f"{len(confusion)} confusion matrices for {size} outcomes")
    read = likely
    for qubit, rows in enumerate(confusion):
        matrix = likely.new_tensor(confusion_matrix(rows))
        axes = read.reshape(*likely.shape[:-1], size >> qubit + 1, 2, 1 << qubit)
        read = (matrix.mT @ axes).reshape(likely.shape)
    return read
