"""Mazes of the public CSV: a square of characters in a row, read line by line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lockstep.errors import DataError
from lockstep.parsing import shown
from lockstep.recipes.hrm.data.csv_rows import Row, read_rows
from lockstep.recipes.hrm.data.maze.grid import FREE, GOAL, PATH, START, WALL, distances, to_tokens
from lockstep.recipes.hrm.data.sample import Pairs

_MOST_SIDE = 64


def read_mazes(path: Path, least_rating: int = 0) -> Iterator[Pairs]:
    """The mazes of a CSV file, all of one size; a pair of [1, cells] for each.

    Raises:
        DataError: as `read_rows`; or a text is no maze, or an answer no shortest path of its
            question; with its line. Or there is no maze at all.
    """
    cells = 0
    for row in read_rows(path, least_rating=least_rating):
        cells = cells or len(row.question)
        try:
            yield _checked(row, cells)
        except ValueError as error:
            raise DataError(f"{path}: line {row.line}: {error}") from None
    if not cells:
        raise DataError(f"{path}: holds no maze of rating {least_rating} or more")


def _checked(row: Row, cells: int) -> Pairs:
    """A row's maze. Raises `ValueError` for what is wrong with it."""
    side = math.isqrt(len(row.question))
    if side**2 != len(row.question) or not 3 <= side <= _MOST_SIDE:
        raise ValueError(
            f"question of {len(row.question)} characters: must be a square, of a side of 3 to "
            f"{_MOST_SIDE}"
        )
    if len(row.question) != cells or len(row.answer) != cells:
        raise ValueError(
            f"question of {len(row.question)}, answer of {len(row.answer)} characters: must be "
            f"{cells}, as in the first maze"
        )
    question, answer = to_tokens(row.question), to_tokens(row.answer)
    if not np.isin(question, (WALL, FREE, START, GOAL)).all():
        raise ValueError(f"question {shown(row.question)}: must be of '#', ' ', 'S' and 'G'")
    for token, name in ((START, "S"), (GOAL, "G")):
        if (question == token).sum() != 1:
            raise ValueError(f"question has {(question == token).sum()} {name}: must be one")
    is_path = answer == PATH
    if not np.array_equal(np.where(is_path, np.uint8(FREE), answer), question):
        raise ValueError("the answer is not the question with 'o' on free cells")
    start, goal = int(np.argmax(question == START)), int(np.argmax(question == GOAL))
    least = distances((question != WALL).tolist(), side, start)[goal]
    along = distances((is_path | (question == GOAL)).tolist(), side, start)[goal]
    if least < 0 or along != least or is_path.sum() != least - 1:
        raise ValueError(
            f"the answer's {is_path.sum()} 'o' are no shortest path from S to G "
            f"({'there is none' if least < 0 else f'of {least} steps'})"
        )
    return Pairs(question[None], answer[None])
