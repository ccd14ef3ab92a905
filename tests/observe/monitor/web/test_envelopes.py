"""Envelopes hold what a reader of all values would find, whatever comes again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.observe.reading.large import envelopes
from lockstep.observe.reading.large.envelopes import (
    INFINITE,
    NAN,
    Row,
    Sheet,
    joined,
    merged,
    of_points,
)

VALUES = st.one_of(
    st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0])
)
ROWS = st.tuples(st.integers(0, 60), st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1))
FORWARD = st.lists(st.dictionaries(st.sampled_from("ab"), VALUES, min_size=1), max_size=90).map(
    lambda rows: list(enumerate(rows))
)
"""A run without interruptions; long enough for several halvings."""


class File:
    """Rows by their places, as a file has them; a number in the place of values is a cut."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float] | None]] = []

    def row(self, place: int) -> Row:
        step, values = self.rows[place]
        assert values is not None
        names = list(values)
        return Row(step, names, np.array([values[n] for n in names]), place, place + 1)

    def reread(self, start: int, end: int, last: int) -> list[Row]:
        found: list[Row] = []
        for place in range(start, end):
            step, values = self.rows[place]
            found = [row for row in found if row.step < step + (values is None)]
            if values is not None:
                found.append(self.row(place))
        return [row for row in found if row.step <= last]


def filled(rows: list[tuple[int, dict[str, float] | None]], most: int) -> tuple[Sheet, Any]:
    """A sheet of at most `most` buckets, and what is true: values by step, of each name."""
    file, truth = File(), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelopes, "MOST_BUCKETS", most)
        patch.setattr(envelopes, "_FIRST_BUCKETS", 2)
        sheet = Sheet(file.reread)
        for place, (step, values) in enumerate(rows):
            file.rows.append((step, values))
            if values is None:
                sheet.cut(step)
                truth = {s: v for s, v in truth.items() if s <= step}
            else:
                sheet.add(file.row(place))
                truth = {s: v for s, v in truth.items() if s < step} | {step: values}
    return sheet, truth


def check(envelope: Any, points: dict[int, float]) -> None:
    covered = 0
    for i in range(len(envelope.step)):
        first, last = envelope.first[i], envelope.step[i]
        inside = [value for step, value in points.items() if first <= step <= last]
        finite = [value for value in inside if math.isfinite(value)]
        covered += len(inside)
        assert inside
        assert repr(float(envelope.value[i])) == repr(inside[-1])
        assert float(envelope.low[i]) == min(finite) if finite else math.isnan(envelope.low[i])
        assert float(envelope.high[i]) == max(finite) if finite else math.isnan(envelope.high[i])
        signs = sum({NAN if math.isnan(v) else INFINITE for v in inside if not math.isfinite(v)})
        assert envelope.odd[i] == signs
    assert covered == len(points)
    assert list(envelope.step) == sorted(envelope.step)


@given(st.one_of(FORWARD, st.lists(ROWS, max_size=60)), st.sampled_from([2, 8, 2048]))
@example([(step, {"a": 1.0 * step}) for step in range(40)] + [(17, {"a": -1.0})], 8)
def test_least_greatest_and_last_are_those_of_all_values(rows, most):
    sheet, truth = filled(rows, most)
    assert sheet.count <= max(most, 2)
    for name in "abc":
        points = {step: values[name] for step, values in truth.items() if name in values}
        found = sheet.envelope(name, slice(0, sheet.count))
        assert (found is None) == (name not in sheet.columns)
        if found is not None:
            check(found, points)
            check(merged(found, 3), points)
            assert len(merged(found, 3).step) <= 3


@given(st.lists(st.one_of(ROWS, st.tuples(st.integers(0, 60), st.none())), max_size=60))
def test_a_resume_cuts_a_curve_also_inside_of_a_bucket(rows):
    sheet, truth = filled(rows, 4)
    for name in sheet.columns:
        points = {step: values[name] for step, values in truth.items() if name in values}
        check(sheet.envelope(name, slice(0, sheet.count)), points)


@given(FORWARD, st.integers(-1, 100), st.integers(0, 50))
def test_a_range_holds_all_buckets_that_reach_into_it(rows, first, width):
    sheet, _ = filled(rows, 8)
    buckets, start, end = sheet.range_of(first, first + width)
    places = [place for place, (step, _) in enumerate(rows) if first <= step <= first + width]
    assert not places or (start <= places[0] and places[-1] < end)
    assert end - start <= (buckets.stop - buckets.start) * sheet.width


def test_names_without_end_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(envelopes, "MOST_CURVES", 300)
    monkeypatch.setattr(envelopes, "_MOST_CELLS", 40_000)
    sheet = Sheet(lambda *_: ())
    for step in range(600):
        row = Row(step, [f"n{step}", "same"], np.array([1.0, step]), step, step + 1)
        sheet.add(row)
    assert sheet.dropped
    assert len(sheet.columns) == 300
    assert sheet.num_bytes < 300 * 200 * 25 * 2
    check(sheet.envelope("same", slice(0, sheet.count)), {s: float(s) for s in range(600)})


def test_parts_are_joined_by_steps():
    both = joined([of_points([5, 9], [1.0, math.nan]), of_points([1, 7], [2.0, 3.0])])
    assert list(both.step) == [1, 5, 7, 9]
    assert list(both.odd) == [0, 0, 0, NAN]
