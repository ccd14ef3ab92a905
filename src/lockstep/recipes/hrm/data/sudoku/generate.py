"""Puzzles with one solution: a random solution grid, from which clues are taken away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.errors import ConfigError
from lockstep.recipes.hrm.data.draws import Use, keyed
from lockstep.recipes.hrm.data.sudoku.board import Board, Grid
from lockstep.recipes.hrm.data.sudoku.solver import Solver
from lockstep.recipes.hrm.data.sudoku.split import SolutionSplit

_MOST_FAILURES = 2000
"""Draws in a row that are of no use, before it is said that there are no more puzzles."""


@dataclass(frozen=True)
class Sudoku:
    """A puzzle and its solution, both [cells]; 0 is a blank."""

    question: Grid
    answer: Grid


def dig(
    solver: Solver,
    answer: Grid,
    generator: np.random.Generator,
    num_clues: int = 0,
    rating: int | None = None,
) -> Grid:
    """A puzzle with one solution, which is `answer`.

    Clues are taken away in random order, each that leaves one solution, until what is asked for is
    reached; else no clue can go any more at the end.

    Args:
        solver: solver of the board.
        answer: a solution grid [cells].
        generator: draws the order.
        num_clues: number of clues to stop at.
        rating: if given, the rating (`Solver.rating`) to stop at.
    """
    digits = answer.tolist()
    left = len(digits)
    for cell in generator.permutation(len(digits)).tolist():
        if left <= num_clues:
            break
        if not solver.stays_unique(digits, cell):
            continue
        digits[cell] = 0
        left -= 1
        if rating is not None and solver.rating(np.array(digits, np.uint8)) >= rating:
            break
    return np.array(digits, np.uint8)


@dataclass(frozen=True)
class Wanted:
    """What puzzles are asked for.

    Attributes:
        num_clues: number of clues to stop at; puzzles may have more, if no other one can go.
        rating: least rating of a puzzle; those that do not reach it are not taken.
    """

    num_clues: int = 0
    rating: int = 0


def puzzles(board: Board, seed: int, use: Use, wanted: Wanted | None = None) -> Iterator[Sudoku]:
    """Different puzzles without end, of one side of the split.

    The n-th draw depends on the seed, the side and n only.

    Args:
        board: the board.
        seed: seed of all draws, and of the split.
        use: `TRAIN` or `TEST`: which solutions are taken, see `split`.
        wanted: what is asked for; minimal puzzles by default.

    Raises:
        ConfigError: no more puzzles can be found that are as asked for.
    """
    wanted = wanted or Wanted()
    solver, split = Solver(board), SolutionSplit(board, seed)
    seen: set[bytes] = set()
    number = failures = 0
    while failures < _MOST_FAILURES:
        generator = keyed(seed, use, number)
        number += 1
        failures += 1
        answer = solver.random_solution(generator)
        if split.is_test(answer) != (use == Use.TEST):
            continue
        question = dig(solver, answer, generator, wanted.num_clues)
        if question.tobytes() in seen or solver.rating(question) < wanted.rating:
            continue
        seen.add(question.tobytes())
        failures = 0
        yield Sudoku(question, answer)
    raise ConfigError(
        f"no more than {len(seen)} {board.side}x{board.side} puzzles were found that are as "
        "asked for; ask for fewer, for an easier rating, or take another seed"
    )
