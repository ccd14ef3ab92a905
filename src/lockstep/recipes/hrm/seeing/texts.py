"""Puzzles that people type or keep in files: texts in, tokens out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from lockstep.errors import ConfigError, DataError
from lockstep.files import read_text
from lockstep.parsing import parse_int, shown
from lockstep.recipes.hrm.data.maze import grid as maze
from lockstep.recipes.hrm.data.sudoku.board import to_tokens
from lockstep.recipes.hrm.seeing.kinds import Kind, Tokens
from lockstep.recipes.hrm.seeing.rules import repeated, solved_maze

NUMBERED = "val:"
"""What the name of a validation puzzle begins with."""

_MOST_BYTES = 1 << 20
_SUDOKU = re.compile(r"[0-9.\s]*")


def numbered(puzzle: str, count: int) -> int | None:
    """The index, from 0, of the validation puzzle that `val:17` names; None for other texts.

    Args:
        puzzle: what was given.
        count: number of validation puzzles.

    Raises:
        ConfigError: there is no such puzzle.
    """
    if not puzzle.startswith(NUMBERED):
        return None
    try:
        return parse_int(puzzle.removeprefix(NUMBERED), least=1, most=count) - 1
    except ValueError as error:
        raise ConfigError(
            f"puzzle {shown(puzzle)}: {error}; there are {NUMBERED}1 to {NUMBERED}{count}"
        ) from None


def given_text(puzzle: str) -> tuple[str, str]:
    """The text of a puzzle, and what messages call it.

    Args:
        puzzle: the text itself, which is of digits, dots and white space or has several lines; or
            the path of a file that holds it.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    if _SUDOKU.fullmatch(puzzle) or "\n" in puzzle:
        return puzzle, "puzzle"
    path = Path(puzzle)
    try:
        return read_text(path, _MOST_BYTES, follow_links=True), str(path)
    except FileNotFoundError:
        raise DataError(
            f"puzzle {shown(puzzle)}: is neither a file, nor {NUMBERED} and a number, nor a Sudoku "
            "of digits, with 0 or '.' for blanks"
        ) from None
    except OSError as error:
        raise DataError(f"puzzle {shown(puzzle)}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"puzzle {shown(puzzle)}: is not text: {error}") from None


def parsed(text: str, kind: Kind, where: str) -> Tokens:
    """The tokens [cells] of a text.

    Args:
        text: a Sudoku's digits, with 0 or '.' for blanks, white space ignored; or a maze's lines of
            '#', ' ', 'S' and 'G'.
        kind: what puzzles the model solves.
        where: what messages call the text.

    Raises:
        ConfigError: puzzles of this kind have no text.
        DataError: it is none of this kind and size, or cannot have a solution.
    """
    if kind.name == "sudoku":
        return _sudoku(text, kind, where)
    if kind.name == "maze":
        return _maze(text, kind.rows, where)
    raise ConfigError(
        f"{where}: puzzles of this run cannot be given as text; name one of validation, such as "
        f"{NUMBERED}1"
    )


def _sudoku(text: str, kind: Kind, where: str) -> Tokens:
    digits, board = "".join(text.split()), kind.board
    known = "." + "".join(map(str, range(board.side + 1)))
    for place, character in enumerate(digits, start=1):
        if character not in known:
            raise DataError(
                f"{where}: cell {place} is {shown(character)}; cells must be digits 1 to "
                f"{board.side}, or 0 or '.' for a blank"
            )
    if len(digits) != board.cells:
        raise DataError(
            f"{where}: has {len(digits)} cells; this run's Sudokus have {board.cells} "
            f"({board.side}x{board.side})"
        )
    grid = np.array([0 if c == "." else int(c) for c in digits], np.uint8)
    clashing = np.flatnonzero(repeated(board, grid))
    if len(clashing):
        places = ", ".join(
            f"{grid[cell]} in row {cell // board.side + 1}, column {cell % board.side + 1}"
            for cell in clashing[:4].tolist()
        )
        raise DataError(f"{where}: clues contradict one another: {places}")
    return to_tokens(grid)


def _maze(text: str, side: int, where: str) -> Tokens:
    lines = [line for line in text.splitlines() if line]
    if len(lines) == 1 and len(lines[0]) == side**2:
        lines = [lines[0][start : start + side] for start in range(0, side**2, side)]
    if len(lines) != side:
        raise DataError(f"{where}: has {len(lines)} lines; this run's mazes have {side}")
    for number, line in enumerate(lines, start=1):
        if len(line) != side:
            raise DataError(
                f"{where}: line {number} has {len(line)} characters; this run's mazes have {side}"
            )
    whole = "".join(lines)
    for place, character in enumerate(whole):
        if character not in "# SG":
            raise DataError(
                f"{where}: line {place // side + 1} has {shown(character)}; a maze is of '#', ' ', "
                "one 'S' and one 'G'"
            )
    for end in "SG":
        if whole.count(end) != 1:
            raise DataError(f"{where}: has {whole.count(end)} {end!r}; a maze has one")
    tokens = maze.to_tokens(whole)
    if solved_maze(tokens, side) is None:
        raise DataError(f"{where}: no way leads from S to G")
    return tokens
