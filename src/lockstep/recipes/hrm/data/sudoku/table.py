"""Puzzles of the public CSV: digits in a row, `.` or `0` for a blank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.parsing import shown
from lockstep.recipes.hrm.data.csv_rows import Row, read_rows
from lockstep.recipes.hrm.data.sample import Pairs
from lockstep.recipes.hrm.data.sudoku.board import Board, are_solutions

_BLOCK_ROWS = 4096


def read_puzzles(path: Path, board: Board, least_rating: int = 0) -> Iterator[Pairs]:
    """The puzzles of a CSV file, block by block, as grids.

    That a puzzle has no second solution is not checked: it takes a second for some of them.

    Raises:
        DataError: as `read_rows`; or a question or answer is not of the board, breaks the rules, or
            the answer does not solve the question; with its line. Or there is no puzzle at all.
    """
    rows = read_rows(path, least_rating=least_rating)
    is_empty = True
    while block := list(islice(rows, _BLOCK_ROWS)):
        is_empty = False
        yield _checked(path, board, block)
    if is_empty:
        raise DataError(f"{path}: holds no puzzle of rating {least_rating} or more")


def _checked(path: Path, board: Board, rows: list[Row]) -> Pairs:
    """The grids of some rows: one look at all of them, another one at those that are wrong."""
    questions = _grids(path, board, rows, "question")
    answers = _grids(path, board, rows, "answer")
    for problem, wrong in (
        ("a blank in the answer", (answers == 0).any(axis=1)),
        (
            "an answer that breaks the rules (a digit twice in a row, column or box)",
            ~are_solutions(board, answers),
        ),
        (
            "an answer that does not solve the question: a clue has another digit",
            ((questions != answers) & (questions != 0)).any(axis=1),
        ),
    ):
        if wrong.any():
            row = rows[int(np.argmax(wrong))]
            raise DataError(f"{path}: line {row.line}: {problem}: {shown(row.answer)}")
    return Pairs(questions, answers)


def _grids(path: Path, board: Board, rows: list[Row], column: str) -> npt.NDArray[np.uint8]:
    allowed = frozenset(".0" + "123456789"[: board.side])
    for row in rows:
        text = getattr(row, column)
        if len(text) != board.cells:
            raise DataError(
                f"{path}: line {row.line}: {column} of {len(text)} characters: must be "
                f"{board.cells} of a {board.side}x{board.side} board; see --size"
            )
        if not allowed.issuperset(text):
            raise DataError(
                f"{path}: line {row.line}: {column} {shown(text)}: must be of '.', 0 and digits "
                f"to {board.side}"
            )
    joined = "".join(getattr(row, column) for row in rows).replace(".", "0").encode("ascii")
    digits = np.frombuffer(joined, np.uint8) - np.uint8(ord("0"))
    return np.asarray(digits.reshape(len(rows), board.cells), np.uint8)
