"""Splits keep neighbours together; statistics are of the training rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.systems.ufs.fields.rows import Rows, blocks, first_spread, scale_of, split

COLUMNS = 20


def made(count: int, times: int = 4) -> Rows:
    generator = np.random.default_rng(count)
    place = np.sort(generator.choice(400 * times, count, replace=False))
    return Rows(
        values=generator.normal(size=(count, 3)).astype(np.float32),
        cell=place % 400,
        time=(place // 400).astype(np.int32),
        place=np.zeros((count, 2), np.float32),
    )


@given(st.integers(50, 900), st.sampled_from(["blocks", "time"]), st.floats(0, 0.3))
def test_splits_are_disjoint_and_whole(count: int, by: str, val: float) -> None:
    rows = made(count)
    group = blocks(rows, COLUMNS, 4) if by == "blocks" else rows.time
    found = split(rows, group, by, val, 0.1)
    assert sum(map(len, found.values())) == count
    assert ("val" in found) == (val > 0)
    units = [
        set(blocks(part, COLUMNS, 4) if by == "blocks" else part.time) for part in found.values()
    ]
    assert sum(map(len, units)) == len(set.union(*units))
    if val:
        assert len(found["val"]) >= val * count


def test_times_are_split_in_order() -> None:
    rows = made(800)
    found = split(rows, rows.time, "time", 0.2, 0.2)
    assert found["train"].time.max() < found["test"].time.min() < found["val"].time.min()
    backwards = split(rows, 3 - rows.time, "time", 0.2, 0.2)
    assert backwards["train"].time.min() > backwards["test"].time.max()


def test_a_block_is_square() -> None:
    rows = Rows(*(np.arange(400),) * 4)  # type: ignore[arg-type]
    group = blocks(rows, COLUMNS, 8).reshape(20, 20)
    assert group[0, 0] == group[7, 7] != group[8, 7]
    assert group[7, 7] != group[7, 8]
    assert len(np.unique(group)) == 9


def test_nothing_left_to_train_on() -> None:
    rows = made(300)
    with pytest.raises(DataError, match=r"leave nothing .* 1 blocks .*lower split_block_cells"):
        split(rows, blocks(rows, COLUMNS, 20), "blocks", 0.1, 0.0)
    one = rows.take(rows.time == 0)
    with pytest.raises(DataError, match="are of 1 times"):
        split(one, one.time, "time", 0.1, 0.0)


@given(st.integers(1, 200), st.integers(0, 250))
def test_spread_rows_come_first_and_none_is_lost(count: int, front: int) -> None:
    rows = made(count)
    found = first_spread(rows, front)
    assert np.array_equal(np.sort(found.values, axis=0), np.sort(rows.values, axis=0))
    steps = np.diff(found.cell[:front] + 400 * found.time[:front])
    assert (steps > 0).all()


def test_statistics_are_the_same_however_rows_are_cut() -> None:
    rows = made(900)
    rows.values[:, 2] = 5
    whole = scale_of([rows])
    cut = scale_of([rows.take(np.arange(900) % 7 == k) for k in range(7)])
    assert np.array_equal(whole.mean, cut.mean)
    assert np.array_equal(whole.deviation, cut.deviation)
    assert whole.mean == pytest.approx(rows.values.astype(np.float64).mean(0), rel=1e-12)
    assert whole.deviation[2] == 1.0
