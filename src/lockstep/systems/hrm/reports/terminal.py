"""Puzzles as text that users type, and answers in a terminal, segment by segment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.text import Text

from lockstep.config.files import read_text
from lockstep.config.parsing import parse_int, shown
from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm.data import maze
from lockstep.systems.hrm.data.sudoku_board import to_tokens
from lockstep.systems.hrm.reports.rules import Cells, Kind, Tokens, is_solved, mistakes, repeated
from lockstep.systems.hrm.reports.trained_model import Answers

NUMBERED = "val:"
"""Prefix of the number of a validation puzzle."""

GIVEN, FILLED, CHANGED, MISTAKE = range(4)
"""What a cell is; of several, the last one is shown."""

_MARKS = " +*!"
_STYLES = ("dim", "bold", "bold black on yellow", "bold red")
_NAMES = ("given", "filled in", "changed since the segment before", "mistake")
_MOST_BYTES = 1 << 20
_SUDOKU = re.compile(r"[0-9.\s]*")


def numbered(puzzle: str, count: int) -> int | None:
    """The index, from 0, of the validation puzzle that `val:17` names; None for other texts.

    Args:
        puzzle: text from the command line.
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
    """The text of a puzzle, and its name in messages.

    Args:
        puzzle: the text itself, which consists of digits, dots and white space or has several
            lines; or the path of a file that contains it.

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


def parse(text: str, kind: Kind, where: str) -> Tokens:
    """The tokens [cells] of a text.

    Args:
        text: a Sudoku's digits, with 0 or '.' for blanks, white space ignored; or a maze's lines of
            '#', ' ', 'S' and 'G'.
        kind: kind of the model's puzzles.
        where: name of the text in messages.

    Raises:
        ConfigError: puzzles of this kind have no text form.
        DataError: it is not of this kind and size, or cannot have a solution.
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
    for number, character in enumerate(digits, start=1):
        if character not in known:
            raise DataError(
                f"{where}: cell {number} is {shown(character)}; cells must be digits 1 to "
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
    for cell, character in enumerate(whole):
        if character not in "# SG":
            raise DataError(
                f"{where}: line {cell // side + 1} has {shown(character)}; a maze is of '#', ' ', "
                "one 'S' and one 'G'"
            )
    for end in "SG":
        if whole.count(end) != 1:
            raise DataError(f"{where}: has {whole.count(end)} {end!r}; a maze has one")
    tokens = maze.to_tokens(whole)
    if maze.solved(tokens, side) is None:
        raise DataError(f"{where}: no way leads from S to G")
    return tokens


@dataclass(frozen=True)
class Puzzle:
    """A question, and the right answer if it is known.

    Attributes:
        question: tokens [cells].
        label: tokens [cells], 0 in cells without an answer; or None.
    """

    question: Tokens
    label: Tokens | None


def lines(
    kind: Kind, puzzle: Puzzle, answers: Answers, early: bool, in_colours: bool
) -> tuple[list[Text], bool]:
    """The lines about the answers to one puzzle, and whether the last answer is a solution.

    Args:
        kind: kind of the puzzle.
        puzzle: the puzzle.
        answers: answers to this puzzle alone.
        early: whether to end where the puzzle halts by itself.
        in_colours: whether to use styles, rather than marks.
    """
    most = len(answers.tokens)
    halted = int(answers.segments(most)[0])
    text = [_legend(in_colours)]
    before = puzzle.question
    for number in range(1, (halted if early else most) + 1):
        answer = answers.tokens[number - 1, 0]
        q_halt, num_changed = float(answers.q_halt[number - 1, 0]), int((before != answer).sum())
        text += [
            Text(""),
            Text(
                f"segment {number}: halting {probability(q_halt):.3f}, "
                f"{_counted(num_changed, 'cell')} changed, "
                f"{_counted(num_mistakes(kind, puzzle, answer), 'mistake')}"
            ),
        ]
        if num_changed or number == 1:
            text += grid(kind, answer, looks(kind, puzzle, before, answer), in_colours)
        before = answer
    solved = is_solved(kind, puzzle.question, before, puzzle.label)
    num_wrong = num_mistakes(kind, puzzle, before)
    result = "solved" if solved else f"not solved: {_counted(num_wrong, 'mistake')}"
    halts = (
        f"would have halted after {_counted(halted, 'segment')}"
        if answers.wants[:, 0].any()
        else f"would not have halted within {_counted(most, 'segment')}"
    )
    return [*text, Text(f"{result}; {halts}")], solved


def _legend(in_colours: bool) -> Text:
    """The meaning of styles or marks."""
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
    """The number of cells that differ from the right answer or, if it is unknown, are wrong."""
    if puzzle.label is None or is_solved(kind, puzzle.question, answer, puzzle.label):
        return int(wrong_cells(kind, puzzle, answer).sum())
    return int(((puzzle.label != 0) & (answer != puzzle.label)).sum())


def grid(kind: Kind, answer: Tokens, look: npt.NDArray[np.int64], in_colours: bool) -> list[Text]:
    """The rows of a grid, with space between a Sudoku's boxes."""
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
                text.append(f" {symbol}", _STYLES[style] if style >= 0 else "")
            else:
                text.append((_MARKS[style] if style >= 0 else " ") + symbol)
        if kind.name == "sudoku" and row and row % kind.board.box_rows == 0:
            rows.append(Text(""))
        rows.append(text)
    return rows


def probability(logit: float) -> float:
    """The probability of a logit."""
    return float(1 / (1 + np.exp(-np.float64(np.clip(logit, -700, 700)))))


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
