"""One puzzle's answers in a terminal: a grid after each segment, in colours or with marks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.text import Text

from lockstep.recipes.hrm.seeing.kinds import Cells, Kind, Tokens
from lockstep.recipes.hrm.seeing.rules import is_solved, mistakes
from lockstep.recipes.hrm.seeing.trained import Answers

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
