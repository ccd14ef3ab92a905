"""One self-contained page about a trained model: scores, charts and puzzles as grids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.systems.hrm.data.arc_tasks import PAD
from lockstep.systems.hrm.reports.gathered import Gathered, Seen
from lockstep.systems.hrm.reports.kinds import Cells, Kind, Tokens
from lockstep.systems.hrm.reports.shown import probability

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


@dataclass(frozen=True)
class Window:
    """The part of a grid that is drawn.

    Attributes:
        rows: number of rows, from the first.
        columns: number of columns, from the first.
        cells: the cells in it, int64 [rows * columns].
    """

    rows: int
    columns: int
    cells: npt.NDArray[np.int64]


def window(kind: Kind, grids: Sequence[Tokens]) -> Window:
    """What is drawn of grids [cells]: all, but of ARC's no rows and columns of padding only."""
    rows, columns = kind.rows, kind.columns
    if kind.name == "arc":
        used = (np.stack(grids) != PAD).any(axis=0).reshape(rows, columns)
        rows = _extent(used.any(axis=1))
        columns = _extent(used.any(axis=0))
    cells = np.arange(kind.cells).reshape(kind.rows, kind.columns)[:rows, :columns]
    return Window(rows, columns, cells.reshape(-1))


def drawn_kind(kind: Kind, cut: Window) -> Kind:
    """The kind of grids that are cut to a window."""
    return replace(kind, rows=cut.rows, columns=cut.columns)


def drawn_symbols(kind: Kind) -> list[str]:
    """The text in the cell of each token; blanks, walls, paths and colours have none."""
    if kind.name == "arc":
        return [""] * kind.vocabulary
    silent = {"sudoku": ".", "maze": "# o"}.get(kind.name, "")
    return ["" if symbol in silent else symbol for symbol in kind.symbols]


def drawn(
    kind: Kind, tokens: Tokens, style: str, name: str, given: Cells, wrong: Cells | None = None
) -> str:
    """A grid.

    Args:
        kind: kind of the puzzle, of the size of the grid.
        tokens: tokens [cells].
        style: CSS class, beside that of the kind.
        name: what the grid is, for those who do not see it.
        given: clues [cells].
        wrong: mistakes [cells], to be marked; None for none.
    """
    symbols = drawn_symbols(kind)
    marked = np.zeros(len(tokens), np.bool_) if wrong is None else wrong
    cells = "".join(
        f'<i class="{" ".join(_classes(kind, cell, token, bool(given[cell]), bool(marked[cell])))}'
        f'">{escape(symbols[token])}</i>'
        for cell, token in enumerate(tokens.tolist())
    )
    return (
        f'<div class="grid {kind.name} {escape(style)}" style="--columns:{kind.columns}" '
        f'role="img" aria-label="{escape(name)}">{cells}</div>'
    )


def hexed(tokens: npt.NDArray[np.integer[Any]]) -> str:
    """Tokens as two hexadecimal digits each."""
    return tokens.astype(np.uint8).tobytes().hex()


def _classes(kind: Kind, cell: int, token: int, given: bool, wrong: bool) -> Iterator[str]:
    """`k` and the token; g: given, w: wrong; r, b: a Sudoku's box ends at its right or below."""
    if kind.name == "sudoku":
        board = kind.board
        row, column = divmod(cell, board.side)
        if column % board.box_columns == board.box_columns - 1:
            yield "r"
        if row % board.box_rows == board.box_rows - 1:
            yield "b"
        if given:
            yield "g"
    yield f"k{token}"
    if wrong:
        yield "w"


def _extent(used: Cells) -> int:
    """How many are needed from the first, so that all that are used are there; 1 at least."""
    return int(np.flatnonzero(used)[-1]) + 1 if used.any() else 1


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(
    title: str, facts: Mapping[str, str], kind: Kind, found: Gathered, shown: Sequence[Seen]
) -> str:
    """The HTML of a page, which loads nothing.

    Args:
        title: heading.
        facts: names and values to show below it.
        kind: kind of the puzzles.
        found: scores.
        shown: puzzles.
    """
    return "\n".join([*_head(title), *_body(title, facts, kind, found, shown), "</html>"]) + "\n"


def _head(title: str) -> Iterator[str]:
    yield "<!DOCTYPE html>"
    yield '<html lang="en">'
    yield '<head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>"
    yield f"<style>\n{_asset('page.css')}</style></head>"


def _body(
    title: str, facts: Mapping[str, str], kind: Kind, found: Gathered, shown: Sequence[Seen]
) -> Iterator[str]:
    yield "<body>"
    yield f"<h1>{escape(title)}</h1>"
    yield "<dl>"
    for name, value in facts.items():
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl>"
    yield from _charts(found)
    yield f"<h2>{len(shown)} of {len(found.inputs):,} puzzles</h2>"
    yield (
        '<p class="note">Those with mistakes first. Mistakes have a red frame; the slider goes '
        "through the segments, and marks what has changed since the one before.</p>"
    )
    yield (
        '<p id="filter" hidden><label><input type="checkbox"> only puzzles with mistakes'
        "</label></p>"
    )
    for seen in shown:
        yield from _puzzle(kind, seen)
    symbols = json.dumps(drawn_symbols(kind)).replace("<", "\\u003c")
    yield f'<script type="application/json" id="symbols">{symbols}</script>'
    yield f"<script>\n{_asset('page.js')}</script>"
    yield "</body>"


def _charts(found: Gathered) -> Iterator[str]:
    most = len(found.exact)
    curves = [
        ("exact", "exact", found.exact.tolist()),
        ("accuracy", "part", found.accuracy.tolist()),
    ]
    names = [*(str(number) for number in range(1, most + 1)), "not"]
    yield '<h2>By segment</h2><div class="charts">'
    yield "<figure>"
    yield from line_chart(curves, "exact and accuracy after each segment", "segments")
    yield "<figcaption>Right puzzles (exact) and cells (accuracy) after each segment.</figcaption>"
    yield "</figure><figure>"
    yield from histogram(names, found.halting.tolist(), "segments until halting", "segments")
    yield "<figcaption>After how many segments puzzles halt by themselves.</figcaption>"
    yield "</figure></div>"


def _puzzle(kind: Kind, seen: Seen) -> Iterator[str]:
    """A puzzle: its question, its right answer, and the model's that is scored."""
    cut = window(kind, [seen.question, seen.label, *seen.answers])
    small = drawn_kind(kind, cut)
    question, label = seen.question[cut.cells], seen.label[cut.cells]
    answers = seen.answers[:, cut.cells]
    most, last = len(answers), answers[seen.used - 1]
    halting = [f"{probability(float(logit)):.3f}" for logit in seen.q_halt]
    num_wrong = int(((label != 0) & (last != label)).sum())
    halted = f"halts by itself after {seen.halted}" if seen.halted else "does not halt by itself"
    yield (
        f'<section class="puzzle {"right" if seen.is_right else "wrong"}" '
        f'data-question="{hexed(question)}" data-label="{hexed(label)}" '
        f'data-answers="{" ".join(map(hexed, answers))}" data-halting="{" ".join(halting)}">'
    )
    verdict = "right" if seen.is_right else "with mistakes"
    yield f'<h3>Puzzle {seen.number} <span class="verdict">{verdict}, {halted}</span></h3>'
    given = kind.given(seen.question)[cut.cells]
    right = np.where(label == 0, question if kind.name != "arc" else 0, label)
    yield '<div class="grids">'
    for name, style, tokens, wrong in (
        ("question", "question", question, None),
        ("right answer", "label", right, None),
        ("answer of the model", "answer", last, (label != 0) & (last != label)),
    ):
        marks = given if style != "question" else np.ones_like(given)
        yield f"<figure>{drawn(small, tokens, style, name, marks, wrong)}"
        if style != "answer":
            yield f"<figcaption>{name}</figcaption></figure>"
    at = f"after segment {seen.used} of {most}, mistakes: {num_wrong}, "
    yield f'<figcaption class="at">{at}halting {halting[seen.used - 1]}</figcaption>'
    yield (
        f'<label class="control" hidden>segment <input type="range" min="1" max="{most}" '
        f'value="{seen.used}" autocomplete="off"></label></figure>'
    )
    yield "</div></section>"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
