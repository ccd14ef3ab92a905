"""Curves in braille: what is drawn is what was given."""

import itertools
import math

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.observe.monitor.terminal.drawing import dotted, plot

POINTS = st.lists(
    st.tuples(st.integers(0, 10**6), st.floats(allow_nan=False, allow_infinity=False)),
    min_size=1, max_size=60, unique_by=lambda point: point[0],
)  # fmt: skip


def dots_of(lines):
    """The set of dots in braille characters by column and row from the top, read one by one."""
    places = {
        0: (0, 0),
        1: (0, 1),
        2: (0, 2),
        3: (1, 0),
        4: (1, 1),
        5: (1, 2),
        6: (0, 3),
        7: (1, 3),
    }
    found = set()
    for row, line in enumerate(lines):
        for column, sign in enumerate(line):
            for bit, (x, y) in places.items():
                if (ord(sign) - 0x2800) >> bit & 1:
                    found.add((2 * column + x, 4 * row + y))
    return found


def fields_of(lines):
    """The braille part of each line but the last."""
    return ["".join(sign for sign in line if 0x2800 <= ord(sign) < 0x2900) for line in lines[:-1]]


@given(POINTS, st.integers(10, 70), st.integers(2, 12))
def test_every_point_is_covered_and_the_stroke_has_no_gap(points, width, height):
    points.sort()
    places = np.array([float(step) for step, _ in points])
    values = np.array([value for _, value in points])
    dots = dotted(places, values, 2 * width, 4 * height)
    assert dots.shape == (4 * height, 2 * width)
    assert dots.any()
    span, low = places[-1] - places[0], float(values.min())
    rise = float(values.max()) / 2 - low / 2
    for place, value in zip(places, values, strict=True):
        x = round((place - places[0]) / span * (2 * width - 1)) if span else (2 * width - 1) // 2
        part = (float(value) / 2 - low / 2) / rise if rise else None
        y = round(part * (4 * height - 1)) if part is not None else (4 * height - 1) // 2
        near = dots[max(0, 4 * height - 1 - y - 1) : 4 * height - y + 1, max(0, x - 1) : x + 2]
        assert near.any(), "within a dot, for halves are rounded either way"
    columns = np.flatnonzero(dots.any(axis=0))
    assert list(columns) == list(range(columns[0], columns[-1] + 1))
    for one, other in itertools.pairwise(columns):
        rows = [np.flatnonzero(dots[:, column]) for column in (one, other)]
        assert rows[0].min() <= rows[1].max() + 1
        assert rows[1].min() <= rows[0].max() + 1


@example([0.0] * 11, 1, 2, False)
@given(st.lists(st.floats(), max_size=40), st.integers(1, 90), st.integers(1, 14), st.booleans())
def test_no_line_is_wider_than_the_room_and_there_are_as_many_as_asked(
    values, width, height, logarithmic
):
    lines = plot(range(len(values)), values, width, height, logarithmic)
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)


def test_a_peak_of_one_step_among_a_million_reaches_the_top():
    values = np.zeros(10**6)
    values[777_777] = 5.0
    lines = plot(range(10**6), values, 60, 10)
    assert lines[0].startswith("5 ")
    assert lines[-2].startswith("0 ")
    assert lines[-1].split() == ["0", "999,999"]
    top = {x for x, y in dots_of(fields_of(lines)) if y == 0}
    width = 2 * len(fields_of(lines)[0])
    assert top == {round(777_777 / 999_999 * (width - 1))}


def test_a_straight_line_is_drawn_straight():
    lines = plot([0, 100], [0.0, 1.0], 22, 6)
    drawn = dots_of(fields_of(lines))
    assert (0, 19) in drawn
    assert (2 * len(fields_of(lines)[0]) - 1, 0) in drawn
    by_column = {x: [y for other, y in drawn if other == x] for x, _ in drawn}
    lowest = [max(by_column[x]) for x in sorted(by_column)]
    assert lowest == sorted(lowest, reverse=True)


def test_logarithms_of_an_exponential_are_a_line():
    steps = range(0, 41)
    exponential = plot(steps, [math.exp(-step) for step in steps], 40, 8, logarithmic=True)
    line = plot(steps, [-step for step in steps], 40, 8)
    assert {x - y for x, y in dots_of(fields_of(line))}
    widths = [len(fields_of(lines)[0]) for lines in (exponential, line)]
    again = plot(steps, [-step for step in steps], 40 + widths[0] - widths[1], 8)
    assert dots_of(fields_of(exponential)) == dots_of(fields_of(again))


def test_what_is_not_finite_is_left_out():
    assert plot([1, 2, 3], [math.nan, 2.0, math.inf], 40, 4)[0].startswith("2 ")
    assert plot([1], [math.nan], 40, 3) == ["no values that can be drawn", "", ""]
    assert plot([1], [-1.0], 40, 3, logarithmic=True)[0] == "no values that can be drawn"
