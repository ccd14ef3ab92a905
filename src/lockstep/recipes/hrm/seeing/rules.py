"""Whether an answer keeps the rules of its puzzle, and which cells do not."""

from __future__ import annotations

import numpy as np

from lockstep.recipes.hrm.data.maze import grid as maze
from lockstep.recipes.hrm.data.sudoku.board import Board, Grid, are_solutions, to_grids
from lockstep.recipes.hrm.seeing.kinds import BLANK, Cells, Kind, Tokens


def repeated(board: Board, grid: Grid) -> Cells:
    """The cells whose digit stands in their row, column or box again.

    Args:
        board: size of the board.
        grid: digits [cells]; 0 is a blank, which breaks no rule.
    """
    row, column = np.divmod(np.arange(board.cells), board.side)
    clashes = np.zeros((board.cells, board.cells), np.bool_)
    for unit in (row, column, board.boxes):
        clashes |= unit[:, None] == unit
    np.fill_diagonal(clashes, False)
    clashes &= (grid[:, None] == grid) & (grid > 0)
    return np.asarray(clashes.any(axis=1))


def mistakes(kind: Kind, question: Tokens, answer: Tokens, label: Tokens | None) -> Cells:
    """The cells of an answer that cannot stay.

    These are cells that the question determines and the answer changes; in a Sudoku also those
    without a digit, and those whose digit is repeated, clues excepted. Where the right answer is
    known, all cells that differ from it, too.

    Args:
        kind: kind of the puzzle.
        question: tokens [cells].
        answer: tokens [cells].
        label: the right answer [cells], 0 where there is nothing to answer; None: not known.
    """
    given = kind.given(question)
    wrong = given & (answer != question)
    if label is not None:
        wrong |= (label != 0) & (answer != label)
    if kind.name == "sudoku":
        digits = np.where(answer > BLANK, answer - BLANK, 0).astype(np.uint8)
        wrong |= (repeated(kind.board, digits) & ~given) | (digits == 0)
    return np.asarray(wrong)


def is_solved(kind: Kind, question: Tokens, answer: Tokens, label: Tokens | None) -> bool:
    """Whether an answer is a solution.

    That of a Sudoku or maze is one by its rules, even if it is not the dataset's; others must be
    equal to the label.
    """
    if kind.name == "sudoku":
        has_digits = bool((answer > BLANK).all())
        is_kept = not (kind.given(question) & (answer != question)).any()
        return has_digits and is_kept and bool(are_solutions(kind.board, to_grids(answer[None]))[0])
    if kind.name == "maze":
        return is_shortest_path(question, answer, kind.rows)
    assert label is not None
    return bool(((answer == label) | (label == 0)).all() and (label != 0).any())


def is_shortest_path(question: Tokens, answer: Tokens, side: int) -> bool:
    """Whether an answer is the question with a shortest path from start to goal.

    Args:
        question: a maze's tokens [side * side], with one start and one goal.
        answer: tokens [side * side].
        side: rows and columns.
    """
    is_path = answer == maze.PATH
    if not np.array_equal(np.where(is_path, maze.FREE, answer), question):
        return False
    start, goal = ends(question)
    least = maze.distances((question != maze.WALL).tolist(), side, start)[goal]
    is_way = is_path | (question == maze.START) | (question == maze.GOAL)
    along = maze.distances(is_way.tolist(), side, start)[goal]
    return least >= 0 and along == least and int(is_path.sum()) == max(least - 1, 0)


def ends(question: Tokens) -> tuple[int, int]:
    """The cells of a maze's start and goal."""
    return int(np.argmax(question == maze.START)), int(np.argmax(question == maze.GOAL))


def solved_maze(question: Tokens, side: int) -> Tokens | None:
    """A maze with a shortest path; None if no way leads from start to goal."""
    start, goal = ends(question)
    path = maze.path_between((question != maze.WALL).tolist(), side, start, goal)
    if not path:
        return None
    answer = np.array(question)
    answer[path[1:-1]] = maze.PATH
    return answer
