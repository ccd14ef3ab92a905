"""The eight symmetries of a square, numbered as in the published datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError

T = TypeVar("T", bound=np.generic)

NUM_SYMMETRIES = 8

_TRANSFORMS: tuple[Callable[[npt.NDArray[Any]], npt.NDArray[Any]], ...] = (
    lambda grid: grid,
    lambda grid: np.rot90(grid, 1),
    lambda grid: np.rot90(grid, 2),
    lambda grid: np.rot90(grid, 3),
    np.fliplr,
    np.flipud,
    np.transpose,
    lambda grid: np.fliplr(np.rot90(grid, 1)),
)
_INVERSES = (0, 3, 2, 1, 4, 5, 6, 7)


def transformed(grid: npt.NDArray[T], number: int) -> npt.NDArray[T]:
    """A grid [rows, columns] after a symmetry: turned left by 0-3 quarters, or mirrored (4-7).

    4 swaps left and right, 5 top and bottom, 6 rows and columns; 7 mirrors along the other
    diagonal.

    Raises:
        DataError: there is no symmetry of that number.
    """
    if not 0 <= number < NUM_SYMMETRIES:
        raise DataError(f"symmetry {number}: must be from 0 to {NUM_SYMMETRIES - 1}")
    return _TRANSFORMS[number](grid)


def inverse(number: int) -> int:
    """The number of the symmetry that undoes another one."""
    return _INVERSES[number]
