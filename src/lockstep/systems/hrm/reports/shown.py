"""Puzzles as texts that people type, and answers in a terminal, segment by segment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.text import Text

from lockstep.config.files import read_text
from lockstep.config.parsing import parse_int, shown
from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm.data import maze
from lockstep.systems.hrm.data.sudoku.board import to_tokens
from lockstep.systems.hrm.reports.kinds import (
    Cells,
    Kind,
    Tokens,
    is_solved,
    mistakes,
    repeated,
    solved_maze,
)
from lockstep.systems.hrm.reports.trained import Answers

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


GIVEN, FILLED, CHANGED, MISTAKE = range(4)
"""What a cell is; a later one hides those before."""

_MARKS = " +*!"
_STYLES = ("dim", "bold", "bold black on yellow", "bold red")
_NAMES = ("given", "filled in", "changed since the segment before", "mistake")
_OTHER = ""


@dataclass(frozen=True)
class Puzzle:
    """A question, and the right answer if it is known.

    Attributes:
        question: tokens [cells].
        label: tokens [cells], 0 where there is nothing to answer; or None.
    """

    question: Tokens
    label: Tokens | None


def lines(
    kind: Kind, puzzle: Puzzle, answers: Answers, early: bool, in_colours: bool
) -> tuple[list[Text], bool]:
    """The answers to one puzzle, and whether the last one is a solution.

    Args:
        kind: kind of the puzzle.
        puzzle: what is solved.
        answers: answers to this puzzle alone.
        early: whether to end where the puzzle halts by itself.
        in_colours: whether styles are seen; else marks say the same.
    """
    most = len(answers.tokens)
    halted = int(answers.segments(most)[0])
    would_halt = bool(answers.wants[:, 0].any())
    num_shown = halted if early else most
    shown = [legend(in_colours)]
    before = puzzle.question
    for number in range(1, num_shown + 1):
        answer = answers.tokens[number - 1, 0]
        q_halt = float(answers.q_halt[number - 1, 0])
        shown += _segment(kind, puzzle, number, before, answer, q_halt, in_colours)
        before = answer
    solved = is_solved(kind, puzzle.question, before, puzzle.label)
    shown.append(Text(_verdict(kind, puzzle, before, solved, halted if would_halt else None, most)))
    return shown, solved


def legend(in_colours: bool) -> Text:
    """What styles or marks mean."""
    items = zip(_NAMES, _STYLES, _MARKS, strict=True)
    if in_colours:
        return Text("  ").join(Text(name, style) for name, style, _ in items)
    return Text(", ".join(f"{mark} {name}" for name, _, mark in items if mark != " "))


def looks(kind: Kind, puzzle: Puzzle, before: Tokens, answer: Tokens) -> npt.NDArray[np.int64]:
    """What each cell of an answer is, [cells]: `GIVEN` to `MISTAKE`, or -1 for none of them."""
    wrong = wrong_cells(kind, puzzle, answer)
    look = np.where(kind.given(puzzle.question), GIVEN, -1)
    look[kind.filled(puzzle.question, answer)] = FILLED
    look[before != answer] = CHANGED
    look[wrong] = MISTAKE
    return look


def wrong_cells(kind: Kind, puzzle: Puzzle, answer: Tokens) -> Cells:
    """The mistakes of an answer [cells]; none if it is a solution, even another one."""
    if is_solved(kind, puzzle.question, answer, puzzle.label):
        return np.zeros(kind.cells, np.bool_)
    return mistakes(kind, puzzle.question, answer, puzzle.label)


def num_mistakes(kind: Kind, puzzle: Puzzle, answer: Tokens) -> int:
    """How many cells are not as in the right answer or, where that is unknown, cannot stay."""
    if puzzle.label is None or is_solved(kind, puzzle.question, answer, puzzle.label):
        return int(wrong_cells(kind, puzzle, answer).sum())
    return int(((puzzle.label != 0) & (answer != puzzle.label)).sum())


def grid(kind: Kind, answer: Tokens, look: npt.NDArray[np.int64], in_colours: bool) -> list[Text]:
    """The rows of a grid; a Sudoku's boxes stand apart."""
    symbols = kind.symbols
    width = max(map(len, symbols))
    rows = []
    for row in range(kind.rows):
        text = Text("  ")
        for column in range(kind.columns):
            cell = row * kind.columns + column
            symbol, style = f"{symbols[answer[cell]]:>{width}}", int(look[cell])
            if kind.name == "sudoku" and column and column % kind.board.box_columns == 0:
                text.append("  ")
            if in_colours:
                text.append(f" {symbol}", _STYLES[style] if style >= 0 else _OTHER)
            else:
                text.append((_MARKS[style] if style >= 0 else " ") + symbol)
        if kind.name == "sudoku" and row and row % kind.board.box_rows == 0:
            rows.append(Text(""))
        rows.append(text)
    return rows


def _segment(
    kind: Kind,
    puzzle: Puzzle,
    number: int,
    before: Tokens,
    answer: Tokens,
    q_halt: float,
    in_colours: bool,
) -> Iterator[Text]:
    """The lines of a segment; no grid if it is that of the segment before."""
    num_changed = int((before != answer).sum())
    num_wrong = num_mistakes(kind, puzzle, answer)
    what = f"{_counted(num_changed, 'cell')} changed, {_counted(num_wrong, 'mistake')}"
    yield Text("")
    yield Text(f"segment {number}: halting {probability(q_halt):.3f}, {what}")
    if num_changed or number == 1:
        yield from grid(kind, answer, looks(kind, puzzle, before, answer), in_colours)


def probability(logit: float) -> float:
    """The probability of a logit."""
    return float(1 / (1 + np.exp(-np.float64(np.clip(logit, -700, 700)))))


def _verdict(
    kind: Kind, puzzle: Puzzle, answer: Tokens, solved: bool, halted: int | None, most: int
) -> str:
    num_wrong = num_mistakes(kind, puzzle, answer)
    result = "solved" if solved else f"not solved: {_counted(num_wrong, 'mistake')}"
    if halted is None:
        return f"{result}; would not have halted within {_counted(most, 'segment')}"
    return f"{result}; would have halted after {_counted(halted, 'segment')}"


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
