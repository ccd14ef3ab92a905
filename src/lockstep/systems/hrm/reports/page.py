"""A self-contained page about a trained model: scores, charts and puzzles as grids."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np
import numpy.typing as npt

from lockstep.config.files import leftovers, replacing, replacing_binary
from lockstep.errors import ConfigError, file_errors
from lockstep.systems.hrm.data.arc import PAD
from lockstep.systems.hrm.reports.rules import Cells, Kind, Tokens
from lockstep.systems.hrm.reports.scores import PuzzleAnswers, SplitAnswers
from lockstep.systems.hrm.reports.terminal import probability

PAGE_FILE = "index.html"
ARRAYS_FILE = "predictions.npz"

_WIDTH, _HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 14, 36
_INNER_WIDTH = _WIDTH - _LEFT - _RIGHT
_INNER_HEIGHT = _HEIGHT - _TOP - _BOTTOM
_MOST_LABELS = 16


@contextmanager
def page_folder(folder: Path) -> Iterator[None]:
    """Create a folder for a page, and remove a new one again if no page is written.

    Raises:
        ConfigError: it cannot be created, or has other files than those of a page.
    """
    was_there = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check(folder)
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be made: {error.strerror}") from None
    try:
        yield
    except BaseException:
        if not was_there:
            with suppress(OSError):
                folder.rmdir()
        raise


def _check(folder: Path) -> None:
    mine = {folder / PAGE_FILE, folder / ARRAYS_FILE}
    others = sorted(
        path.name
        for path in {*folder.iterdir()} - {*leftovers(folder)}
        if path not in mine or not stat.S_ISREG(path.lstat().st_mode)
    )
    if others:
        names = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        raise ConfigError(
            f"--output {folder}: holds what is not of a page ({names}); name a new folder"
        )


def write(folder: Path, page: str, arrays: Mapping[str, npt.NDArray[np.generic]]) -> list[Path]:
    """Write a page and its arrays, both or neither; the same bytes from the same values.

    Raises:
        ConfigError: they cannot be written.
    """
    paths = [folder / PAGE_FILE, folder / ARRAYS_FILE]
    with (
        file_errors(ConfigError, f"--output {folder}"),
        replacing(paths[0]) as text,
        replacing_binary(paths[1]) as binary,
    ):
        # np.savez dates all files of an archive 1980, so that bytes do not depend on the clock.
        np.savez(binary, allow_pickle=False, **arrays)
        text.write(page)
        text.flush()
    return paths


def page(
    title: str,
    facts: Mapping[str, str],
    kind: Kind,
    found: SplitAnswers,
    examples: Sequence[PuzzleAnswers],
) -> str:
    """The HTML of a page, which loads nothing.

    Args:
        title: heading.
        facts: names and values to show below it.
        kind: kind of the puzzles.
        found: scores.
        examples: puzzles to show.
    """
    template = Template(_asset("page.html"))
    return template.substitute(
        title=escape(title),
        style=_asset("page.css"),
        facts="".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>\n"
            for name, value in facts.items()
        ),
        charts="\n".join(_charts(found)),
        count=f"{len(examples)} of {len(found.inputs):,}",
        puzzles="".join(f"{line}\n" for example in examples for line in _puzzle(kind, example)),
        symbols=json.dumps(_symbols(kind)).replace("<", "\\u003c"),
        script=_asset("page.js"),
    )


def _charts(found: SplitAnswers) -> Iterator[str]:
    most = len(found.exact)
    curves = [
        ("exact", "exact", found.exact.tolist()),
        ("accuracy", "part", found.accuracy.tolist()),
    ]
    names = [*map(str, range(1, most + 1)), "not"]
    yield '<h2>By segment</h2><div class="charts">'
    yield "<figure>"
    yield from line_chart(curves, "exact and accuracy after each segment", "segments")
    yield "<figcaption>Right puzzles (exact) and cells (accuracy) after each segment.</figcaption>"
    yield "</figure><figure>"
    yield from histogram(names, found.halting.tolist(), "segments until halting", "segments")
    yield "<figcaption>After how many segments puzzles halt by themselves.</figcaption>"
    yield "</figure></div>"


def _puzzle(kind: Kind, example: PuzzleAnswers) -> Iterator[str]:
    """A puzzle: its question, its right answer, and the model's answer that is scored."""
    small, cells = cropped(kind, [example.question, example.label, *example.answers])
    question, label = example.question[cells], example.label[cells]
    answers = example.answers[:, cells]
    most, last = len(answers), answers[example.used - 1]
    halting = [f"{probability(float(logit)):.3f}" for logit in example.q_halt]
    wrong = (label != 0) & (last != label)
    halted = (
        f"halts by itself after {example.halted}" if example.halted else "does not halt by itself"
    )
    yield (
        f'<section class="puzzle {"right" if example.is_right else "wrong"}" '
        f'data-question="{hexed(question)}" data-label="{hexed(label)}" '
        f'data-answers="{" ".join(map(hexed, answers))}" data-halting="{" ".join(halting)}">'
    )
    verdict = "right" if example.is_right else "with mistakes"
    yield f'<h3>Puzzle {example.number} <span class="verdict">{verdict}, {halted}</span></h3>'
    is_given = kind.given(example.question)[cells]
    right = np.where(label == 0, question if kind.name != "arc" else 0, label)
    yield '<div class="grids">'
    yield f"<figure>{grid(small, question, 'question', 'question', np.ones_like(is_given))}"
    yield "<figcaption>question</figcaption></figure>"
    yield f"<figure>{grid(small, right, 'label', 'right answer', is_given)}"
    yield "<figcaption>right answer</figcaption></figure>"
    yield f"<figure>{grid(small, last, 'answer', 'answer of the model', is_given, wrong)}"
    at = f"after segment {example.used} of {most}, mistakes: {int(wrong.sum())}, "
    yield f'<figcaption class="at">{at}halting {halting[example.used - 1]}</figcaption>'
    yield (
        f'<label class="control" hidden>segment <input type="range" min="1" max="{most}" '
        f'value="{example.used}" autocomplete="off"></label></figure>'
    )
    yield "</div></section>"


def line_chart(
    curves: Sequence[tuple[str, str, Sequence[float]]], title: str, below: str
) -> Iterator[str]:
    """Lines of fractions from 0 to 1 over the numbers from 1.

    Args:
        curves: name, CSS class and values of each line; all of one length.
        title: label for screen readers.
        below: label of the horizontal axis.
    """
    count = len(curves[0][2])
    yield from _opened(title, below)
    for part in (0.0, 0.5, 1.0):
        y = _TOP + _INNER_HEIGHT * (1 - part)
        yield f'<path class="axis" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{part:.0%}</text>'
    yield from _ticks([*map(str, range(1, count + 1))], _points(count))
    xs = _points(count)
    for index, (name, style, values) in enumerate(curves):
        ys = [_TOP + _INNER_HEIGHT * (1 - value) for value in values]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        yield f'<polyline class="{style}" points="{joined}"/>'
        for number, (x, y, value) in enumerate(zip(xs, ys, values, strict=True), start=1):
            yield (
                f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{escape(name)}, {number}: {value:.2%}</title></circle>"
            )
        x = _LEFT + 8 + 110 * index
        yield f'<text class="{style}" x="{x}" y="{_TOP - 3}">{escape(name)}</text>'
    yield "</svg>"


def histogram(names: Sequence[str], counts: Sequence[int], title: str, below: str) -> Iterator[str]:
    """A bar for each name.

    Args:
        names: label of each bar.
        counts: heights of the bars.
        title: label for screen readers.
        below: label of the horizontal axis.
    """
    most = max(1, *counts)
    step = _INNER_WIDTH / len(names)
    centres = [_LEFT + step * (index + 0.5) for index in range(len(names))]
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
    """The horizontal positions of numbers; a single one is in the middle."""
    if count == 1:
        return [_LEFT + _INNER_WIDTH / 2]
    return [_LEFT + _INNER_WIDTH * index / (count - 1) for index in range(count)]


def _ticks(names: Sequence[str], positions: Sequence[float]) -> Iterator[str]:
    """Names below the axis, at most about 16 of them; the last one always."""
    every = -(-len(names) // _MOST_LABELS)
    y = _TOP + _INNER_HEIGHT + 14
    for index, (name, x) in enumerate(zip(names, positions, strict=True)):
        left = len(names) - 1 - index
        if left % every == 0:
            yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(name)}</text>'


def cropped(kind: Kind, grids: Sequence[Tokens]) -> tuple[Kind, npt.NDArray[np.int64]]:
    """The kind and the cells of grids [cells] without ARC's rows and columns of padding only."""
    rows, columns = kind.rows, kind.columns
    if kind.name == "arc":
        used = (np.stack(grids) != PAD).any(axis=0).reshape(rows, columns)
        rows, columns = _extent(used.any(axis=1)), _extent(used.any(axis=0))
    cells = np.arange(kind.cells).reshape(kind.rows, kind.columns)[:rows, :columns]
    return replace(kind, rows=rows, columns=columns), cells.reshape(-1)


def _extent(used: Cells) -> int:
    """The number of entries up to the last one in use; 1 at least."""
    return int(np.flatnonzero(used)[-1]) + 1 if used.any() else 1


def grid(
    kind: Kind, tokens: Tokens, style: str, name: str, given: Cells, wrong: Cells | None = None
) -> str:
    """A grid.

    Args:
        kind: kind of the puzzle, of the size of the grid.
        tokens: tokens [cells].
        style: CSS class, beside that of the kind.
        name: label for screen readers.
        given: clues [cells].
        wrong: mistakes [cells], to be marked; None for none.
    """
    symbols = _symbols(kind)
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


def _symbols(kind: Kind) -> list[str]:
    """The text in the cell of each token; blanks, walls, paths and colours have none."""
    if kind.name == "arc":
        return [""] * kind.vocabulary
    hidden = {"sudoku": ".", "maze": "# o"}.get(kind.name, "")
    return ["" if symbol in hidden else symbol for symbol in kind.symbols]


def hexed(tokens: Tokens) -> str:
    """Tokens as two hexadecimal digits each."""
    return tokens.astype(np.uint8).tobytes().hex()


def _classes(kind: Kind, cell: int, token: int, given: bool, wrong: bool) -> Iterator[str]:
    """`k` and the token; g: given, w: wrong; r, b: the right or lower end of a Sudoku's box."""
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


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
