from __future__ import annotations

from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep.systems.ufs.fields.rows import Moments

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
COLUMNS = arrays(np.float32, st.integers(0, 40), elements=FLOATS)


@given(COLUMNS)
def test_sums_are_exact(column: np.ndarray) -> None:
    numbers = [Fraction(float(value)) for value in column]
    found = Moments.of(column)
    assert found == Moments(len(column), sum(numbers), sum(x * x for x in numbers))


@given(COLUMNS, st.lists(st.integers(0, 40), max_size=4))
def test_cuts_do_not_matter(column: np.ndarray, cuts: list[int]) -> None:
    parts = [Moments.of(part) for part in np.split(column, sorted(cuts))]
    assert reduce(Moments.__add__, parts) == Moments.of(column)


def test_small_variations_of_large_numbers_are_not_lost() -> None:
    column = np.float32(1e6) + np.arange(10_000, dtype=np.float32) % 2
    found = Moments.of(column)
    assert (found.mean, found.deviation) == (1e6 + 0.5, 0.5)


def test_many_numbers_agree_with_numpy() -> None:
    column = np.random.default_rng(0).normal(270, 10, 5_000_000).astype(np.float32)
    found = Moments.of(column)
    assert found.mean == pytest.approx(column.mean(dtype=np.float64), rel=1e-13)
    assert found.deviation == pytest.approx(column.std(dtype=np.float64), rel=1e-12)
