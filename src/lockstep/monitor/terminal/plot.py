"""Curves in braille: each character is a field of two by four dots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.observe.text import number

_FIRST = 0x2800
_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.int64)
"""What a dot adds to a character, by its row and column in the field."""
_LEAST_WIDTH, _LEAST_HEIGHT = 8, 2


def plot(
    steps: Sequence[int],
    values: Sequence[float],
    width: int,
    height: int,
    logarithmic: bool = False,
) -> list[str]:
    """A curve as lines of text, with the range of its values and steps beside and below it.

    Of values that share a column, all are covered by a stroke from the least to the greatest, so
    a peak of one step is seen among a million. Between points that are further apart the stroke
    goes straight. Values that are not finite are left out.

    Args:
        steps: ascending.
        values: as many.
        width: columns of all lines together with the numbers at the left.
        height: number of lines with the one of steps at the bottom.
        logarithmic: whether the values' logarithms are drawn; those of zero and less are left out.

    Returns:
        `height` lines, none wider than `width`.
    """
    points = np.array(values, dtype=np.float64)
    is_drawn = np.isfinite(points)
    if logarithmic:
        is_drawn &= points > 0
    points, places = points[is_drawn], np.array(steps, dtype=np.float64)[is_drawn]
    if not len(points) or height < _LEAST_HEIGHT:
        return ["no values that can be drawn"[:width]] + [""] * (height - 1)
    least, most = float(points.min()), float(points.max())
    labels = [number(most), number(least)]
    if least == most or height == _LEAST_HEIGHT:
        labels = labels[:1]
    margin = max(map(len, labels)) + 1
    if width - margin < _LEAST_WIDTH:
        margin, labels = 0, []
    drawn = np.log10(points) if logarithmic else points
    dots = dotted(places, drawn, 2 * (width - margin), 4 * (height - 1))
    lines = _characters(dots)
    for place, label in zip((0, len(lines) - 1), labels, strict=False):
        lines[place] = f"{label:>{margin - 1}} {lines[place]}"
    lines = [line.rjust(width) for line in lines]
    first, last = f"{int(places[0]):,}", f"{int(places[-1]):,}"
    gap = width - margin - len(first) - len(last)
    below = " " * margin + first + " " * gap + last if gap > 0 else last.rjust(width)
    return [*lines, below if len(below) <= width else ""]


def dotted(
    places: NDArray[np.float64], values: NDArray[np.float64], width: int, height: int
) -> NDArray[np.bool_]:
    """Which dots a curve covers.

    Args:
        places: ascending float64 [n] with n > 0.
        values: finite float64 [n].
        width: number of dots from the first place to the last.
        height: number of dots from the least value to the greatest.

    Returns:
        bool [height, width]; the first row is the top.
    """
    columns = _scaled(places, width)
    rows = _scaled(values, height)
    low = np.full(width, height, dtype=np.int64)
    high = np.full(width, -1, dtype=np.int64)
    np.minimum.at(low, columns, rows)
    np.maximum.at(high, columns, rows)
    known = np.flatnonzero(high >= 0)
    between = np.arange(known[0], known[-1] + 1)
    for bound in (low, high):
        bound[between] = np.rint(np.interp(between, known, bound[known]))
    for column in between[1:]:  # no gap between neighbours
        if low[column] > high[column - 1] + 1:
            low[column] = high[column - 1] + 1
        elif high[column] < low[column - 1] - 1:
            high[column] = low[column - 1] - 1
    heights = np.arange(height)[:, None]
    covered: NDArray[np.bool_] = (heights >= low) & (heights <= high)
    return covered[::-1]


def _scaled(values: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """Numbers from 0 to `size` - 1, in the middle if all values are equal."""
    # Halves, for the difference of two floats may be more than any float can hold.
    least, most = values.min() / 2, values.max() / 2
    if least == most:
        return np.full(len(values), (size - 1) // 2, dtype=np.int64)
    part = (values / 2 - least) / (most - least)
    scaled: NDArray[np.int64] = np.rint(part * (size - 1)).astype(np.int64)
    return scaled


def _characters(dots: NDArray[np.bool_]) -> list[str]:
    height, width = dots.shape
    fields = dots.reshape(height // 4, 4, width // 2, 2)
    codes = np.einsum("arbc,rc->ab", fields.astype(np.int64), _BITS) + _FIRST
    return ["".join(map(chr, row)) for row in codes]
