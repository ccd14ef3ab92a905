"""What is printed of a puzzle: each cell's look, each segment, the verdict."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.systems.hrm.data.maze import to_tokens
from lockstep.systems.hrm.reports.rules import kind_of
from lockstep.systems.hrm.reports.terminal import (
    CHANGED,
    FILLED,
    GIVEN,
    MISTAKE,
    Puzzle,
    lines,
    looks,
    num_mistakes,
    probability,
)
from lockstep.systems.hrm.reports.trained_model import Answers

SUDOKU, MAZE = kind_of(6, 16), kind_of(6, 9)
SOLUTION = np.array([int(digit) + 1 for digit in "1234341221434321"], np.uint8)
CLUES = np.where(np.arange(16) < 2, SOLUTION, 1).astype(np.uint8)


def test_each_cell_is_what_it_is() -> None:
    before, answer = SOLUTION.copy(), SOLUTION.copy()
    before[6] = 1
    answer[[1, 15]] = 5  # a clue is changed, and a digit wrong: 4, as in 3, 5, 10 and 12
    expected = np.full(16, FILLED)
    expected[0], expected[6], expected[[1, 3, 5, 10, 12, 15]] = GIVEN, CHANGED, MISTAKE
    look = looks(SUDOKU, Puzzle(CLUES, SOLUTION), before, answer)
    assert look.tolist() == expected.tolist()
    assert num_mistakes(SUDOKU, Puzzle(CLUES, SOLUTION), answer) == 2


def test_cells_of_a_maze_that_stay_free_are_nothing() -> None:
    question, answer = to_tokens("S    #  G"), to_tokens("So  o# oG")
    look = looks(MAZE, Puzzle(question, answer), question, answer)
    assert look.tolist() == [GIVEN, CHANGED, -1, -1, CHANGED, GIVEN, -1, CHANGED, GIVEN]
    look = looks(MAZE, Puzzle(question, answer), answer, answer)
    assert look.tolist() == [GIVEN, FILLED, -1, -1, FILLED, GIVEN, -1, FILLED, GIVEN]


def test_marks_of_a_whole_puzzle() -> None:
    wrong = SOLUTION.copy()
    wrong[15] = 3
    answers = Answers(
        np.stack([wrong, SOLUTION, SOLUTION])[:, None],
        np.array([[0.0], [2.0], [2.0]], np.float32),
        np.array([[False], [True], [True]]),
    )
    shown, solved = lines(SUDOKU, Puzzle(CLUES, SOLUTION), answers, False, False)
    assert solved
    assert [line.plain for line in shown] == [
        "+ filled in, * changed since the segment before, ! mistake",
        "",
        "segment 1: halting 0.500, 14 cells changed, 1 mistake",
        "   1 2  *3*4",
        "  *3*4  *1!2",
        "",
        "  *2*1  *4*3",
        "  *4*3  !2!2",
        "",
        "segment 2: halting 0.881, 1 cell changed, 0 mistakes",
        "   1 2  +3+4",
        "  +3+4  +1+2",
        "",
        "  +2+1  +4+3",
        "  +4+3  +2*1",
        "",
        "segment 3: halting 0.881, 0 cells changed, 0 mistakes",
        "solved; would have halted after 2 segments",
    ]


def test_styles_say_the_same_as_marks() -> None:
    answers = Answers(SOLUTION[None, None], np.zeros((1, 1), np.float32), np.zeros((1, 1), bool))
    shown, _ = lines(SUDOKU, Puzzle(CLUES, None), answers, False, True)
    row = shown[3]
    assert row.plain == "   1 2   3 4"
    styles = [str(span.style) for span in row.spans]
    assert styles == ["dim", "dim", "bold black on yellow", "bold black on yellow"]


@pytest.mark.parametrize(("logit", "value"), [(0, 0.5), (2, 0.880797), (-1e30, 0), (1e30, 1)])
def test_probabilities(logit: float, value: float) -> None:
    assert probability(logit) == pytest.approx(value)
