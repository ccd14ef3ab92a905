"""Grids as HTML: a cell for each token, whose look its class says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.recipes.hrm.data.arc.tokens import PAD
from lockstep.recipes.hrm.seeing.kinds import Cells, Kind, Tokens


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
