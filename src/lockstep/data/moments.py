"""Exact means and deviations: the same to the last bit however the rows are cut and combined."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

_HALF_BITS = 24
_CHUNK = 1 << 22
"""Sums of so many 24-bit integers are exact in float64."""


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of numbers, without any rounding.

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
    # Halves of 24 bits, added up apart for each exponent: below 2^53, so exact.
    high = np.bincount(exponents - lowest, integers >> _HALF_BITS)
    low = np.bincount(exponents - lowest, integers & ((1 << _HALF_BITS) - 1))
    total = sum(
        (int(h) * 2**_HALF_BITS + int(lo)) << k
        for k, (h, lo) in enumerate(zip(high, low, strict=True))
    )
    return Fraction(total) * Fraction(2) ** (lowest - 2 * _HALF_BITS)
