"""Small charts as inline SVG, whose colours are those of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

_WIDTH, _HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 14, 36
_INNER_WIDTH = _WIDTH - _LEFT - _RIGHT
_INNER_HEIGHT = _HEIGHT - _TOP - _BOTTOM
_MOST_LABELS = 16


def line_chart(
    curves: Sequence[tuple[str, str, Sequence[float]]], title: str, below: str
) -> Iterator[str]:
    """Lines of parts from 0 to 1 over the numbers from 1.

    Args:
        curves: name, CSS class and values of each line; all of one length.
        title: what is seen, for those who do not see it.
        below: what the horizontal axis is.
    """
    count = len(curves[0][2])
    yield from _opened(title, below)
    for part in (0.0, 0.5, 1.0):
        y = _TOP + _INNER_HEIGHT * (1 - part)
        yield f'<path class="axis" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{part:.0%}</text>'
    yield from _ticks([str(number) for number in range(1, count + 1)], _points(count))
    for place, (name, style, values) in enumerate(curves):
        xs = _points(count)
        ys = [_TOP + _INNER_HEIGHT * (1 - value) for value in values]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        yield f'<polyline class="{style}" points="{joined}"/>'
        for number, (x, y, value) in enumerate(zip(xs, ys, values, strict=True), start=1):
            yield (
                f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{escape(name)}, {number}: {value:.2%}</title></circle>"
            )
        x = _LEFT + 8 + 110 * place
        yield f'<text class="{style}" x="{x}" y="{_TOP - 3}">{escape(name)}</text>'
    yield "</svg>"


def histogram(names: Sequence[str], counts: Sequence[int], title: str, below: str) -> Iterator[str]:
    """A bar for each name.

    Args:
        names: what is below each bar.
        counts: heights of the bars.
        title: what is seen, for those who do not see it.
        below: what the horizontal axis is.
    """
    most = max(1, *counts)
    step = _INNER_WIDTH / len(names)
    centres = [_LEFT + step * (place + 0.5) for place in range(len(names))]
    yield from _opened(title, below)
    yield f'<path class="axis" d="M{_LEFT} {_TOP + _INNER_HEIGHT}H{_WIDTH - _RIGHT}"/>'
    yield f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end">{most:,}</text>'
    yield f'<text x="{_LEFT - 6}" y="{_TOP + _INNER_HEIGHT + 4}" text-anchor="end">0</text>'
    for name, x, count in zip(names, centres, counts, strict=True):
        height = _INNER_HEIGHT * count / most
        yield (
            f'<rect x="{x - 0.4 * step:.1f}" y="{_TOP + _INNER_HEIGHT - height:.1f}" '
            f'width="{0.8 * step:.1f}" height="{height:.1f}">'
            f"<title>{escape(name)}: {count:,}</title></rect>"
        )
    yield from _ticks(names, centres)
    yield "</svg>"


def _opened(title: str, below: str) -> Iterator[str]:
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
    x = _LEFT + _INNER_WIDTH / 2
    yield f'<text x="{x:.1f}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(below)}</text>'


def _points(count: int) -> list[float]:
    """Where numbers lie; a single one in the middle."""
    if count == 1:
        return [_LEFT + _INNER_WIDTH / 2]
    return [_LEFT + _INNER_WIDTH * place / (count - 1) for place in range(count)]


def _ticks(names: Sequence[str], places: Sequence[float]) -> Iterator[str]:
    """Names below the axis; some of them only where there are many, the last one always."""
    every = -(-len(names) // _MOST_LABELS)
    y = _TOP + _INNER_HEIGHT + 14
    for index, (name, x) in enumerate(zip(names, places, strict=True)):
        left = len(names) - 1 - index
        if left % every == 0:
            yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(name)}</text>'
