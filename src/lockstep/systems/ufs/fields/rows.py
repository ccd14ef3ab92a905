"""The rows of a run: a sample of all bands, split by blocks or times, and exact statistics."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.systems.ufs.fields.bands import draw, load

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

LEAST_DEVIATION = 1e-6
"""A column with a smaller deviation is not scaled."""

_HALF_BITS = 24
_CHUNK = 1 << 22
"""The sum of so many 24-bit integers is exact in float64."""


@dataclass(frozen=True)
class Rows:
    """N cells with their values; columns as in the `Selection`.

    Attributes:
        values: values in the variables' units, [N, variables], float32.
        cell: number of each row's cell in the grid, [N], int64.
        time: number of each row's scene, [N], int32.
        place: latitude and longitude in degrees, [N, 2], float32.
    """

    values: npt.NDArray[np.float32]
    cell: npt.NDArray[np.int64]
    time: npt.NDArray[np.int32]
    place: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.cell)

    def take(self, chosen: Bools | Ints) -> Rows:
        """The rows that a mask [N] or indices [M] choose."""
        return Rows(**{name: array[chosen] for name, array in vars(self).items()})


def num_rows(paths: Sequence[Path]) -> int:
    """The number of rows of all bands, from `keep_bands`."""
    return sum(int(load(path, "counts")[0][-1]) for path in paths)


def gather(paths: Sequence[Path], most: int) -> Rows:
    """At most `most` rows of all bands: those with the smallest numbers by `draw`.

    Each file is read twice, so that memory holds the chosen rows and one band only.

    Args:
        paths: the files of all bands, from `keep_bands`.
        most: greatest number of rows; of more rows, a uniform sample is taken.
    """
    draws = [draw(*load(path, "cell", "time")) for path in paths]
    all_draws = np.concatenate(draws)
    limit = np.partition(all_draws, most)[most] if len(all_draws) > most else np.inf
    parts = []
    for path, numbers in zip(paths, draws, strict=True):
        chosen = np.flatnonzero(numbers < limit)
        values, cell, time, place = load(path, "values", "cell", "time", "place")
        parts.append(Rows(values[:, chosen].T, cell[chosen], time[chosen], place[:, chosen].T))
    return joined(parts)


def digest(rows: Rows) -> str:
    """SHA-256 of all rows."""
    sha256 = hashlib.sha256()
    for array in vars(rows).values():
        sha256.update(f"{array.dtype.str}{array.shape}".encode())
        sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, of which there is at least one."""
    names = Rows.__dataclass_fields__
    return Rows(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


def blocks(rows: Rows, num_columns: int, size: int) -> Ints:
    """The number of each row's block, which has `size` x `size` cells of the grid at all times.

    Args:
        rows: N rows.
        num_columns: number of columns of the grid.
        size: rows and columns of a block.

    Returns:
        Numbers of blocks, [N], int64.
    """
    across = -(-num_columns // size)
    row, column = np.divmod(rows.cell, num_columns)
    return np.asarray(row // size * across + column // size)


def split(
    rows: Rows, group: Ints, by: Literal["blocks", "time"], val: float, test: float
) -> dict[str, Rows]:
    """Training, validation and test rows; neighbours stay together.

    Args:
        rows: all rows, N of them.
        group: number of each row's block, or its scene's index in time, [N], int64.
        by: kind of groups: `blocks` takes whole blocks in a pseudorandom order, `time` the last
            scenes.
        val: fraction of rows for validation, 0 for none.
        test: fraction of rows for testing, 0 for none.

    Returns:
        Rows by `train`, `val` and `test`; splits without rows are left out.

    Raises:
        DataError: there are too few blocks or scenes.
    """
    units, index, counts = np.unique(group, return_inverse=True, return_counts=True)
    order = (
        np.argsort(draw(units.astype(np.int64), -1))
        if by == "blocks"
        else np.arange(len(units))[::-1]
    )
    label = np.zeros(len(units), np.int8)
    position = 0
    for number, fraction in enumerate((val, test), start=1):
        # Whole units, until there are enough rows; at least one unless the fraction is 0.
        taken = 0
        while taken < fraction * len(rows) and position < len(order):
            label[order[position]] = number
            taken += int(counts[order[position]])
            position += 1
    if position >= len(units):
        parts_of = "blocks of the grid; lower split_block_cells" if by == "blocks" else "times"
        raise DataError(
            f"split={by}: val_fraction={val} and test_fraction={test} leave nothing to train on: "
            f"the {len(rows)} rows are of {len(units)} {parts_of}"
        )
    names = ("train", "val", "test")
    splits = {name: rows.take(label[index] == number) for number, name in enumerate(names)}
    return {name: part for name, part in splits.items() if len(part)}


def first_spread(rows: Rows, count: int) -> Rows:
    """The same rows with `count` evenly spaced ones (or all, if there are fewer) in front."""
    count = min(count, len(rows))
    front = (2 * np.arange(count) + 1) * len(rows) // max(1, 2 * count)
    rest = np.ones(len(rows), bool)
    rest[front] = False
    return rows.take(np.concatenate([front, np.flatnonzero(rest)]))


@dataclass(frozen=True)
class Scale:
    """Mean and population standard deviation of each variable.

    Attributes:
        mean: mean of each variable in its unit, [variables], float64.
        deviation: standard deviation of each variable in its unit, [variables], float64; 1 for a
            constant variable.
    """

    mean: npt.NDArray[np.float64]
    deviation: npt.NDArray[np.float64]


def scale_of(parts: Iterable[Rows]) -> Scale:
    """Statistics of all rows of all parts: the same to the last bit however they are cut."""
    columns = zip(
        *([Moments.of(column) for column in part.values.T] for part in parts), strict=True
    )
    moments = [reduce(Moments.__add__, column) for column in columns]
    deviation = np.array([m.deviation for m in moments])
    return Scale(
        np.array([m.mean for m in moments]),
        np.where(deviation > LEAST_DEVIATION, deviation, 1.0),
    )


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of numbers, without rounding.

    Attributes:
        count: number of numbers.
        total: exact sum of the numbers.
        squares: exact sum of their squares.
    """

    count: int = 0
    total: Fraction = Fraction(0)
    squares: Fraction = Fraction(0)

    @classmethod
    def of(cls, values: npt.NDArray[np.float32]) -> Moments:
        """The moments of finite numbers [N], float32."""
        assert values.dtype == np.float32
        moments = cls()
        for first in range(0, len(values), _CHUNK):
            chunk = values[first : first + _CHUNK].astype(np.float64)
            # The square of a 24-bit number has 48 bits: exact in float64.
            moments += cls(len(chunk), _exact_sum(chunk), _exact_sum(chunk * chunk))
        return moments

    def __add__(self, other: Moments) -> Moments:
        """The moments of both sets of numbers together."""
        return Moments(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    @property
    def mean(self) -> float:
        """The mean, correctly rounded to float64."""
        return float(self.total / self.count)

    @property
    def deviation(self) -> float:
        """The population standard deviation, within a rounding of float64."""
        mean = self.total / self.count
        return math.sqrt(self.squares / self.count - mean * mean)


def _exact_sum(values: npt.NDArray[np.float64]) -> Fraction:
    """The sum of numbers of at most 48 significant bits each."""
    mantissas, exponents = np.frexp(values)
    lowest = int(exponents.min(initial=0))
    integers = np.ldexp(mantissas, 2 * _HALF_BITS).astype(np.int64)
    # The 24-bit halves are summed separately for each exponent: below 2^53, so exact.
    high = np.bincount(exponents - lowest, integers >> _HALF_BITS)
    low = np.bincount(exponents - lowest, integers & ((1 << _HALF_BITS) - 1))
    total = sum(
        (int(h) * 2**_HALF_BITS + int(lo)) << k
        for k, (h, lo) in enumerate(zip(high, low, strict=True))
    )
    return Fraction(total) * Fraction(2) ** (lowest - 2 * _HALF_BITS)
