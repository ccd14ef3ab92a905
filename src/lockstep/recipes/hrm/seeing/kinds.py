"""Kinds of puzzles by their tokens: what each token looks like, and which cells are given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lockstep.recipes.hrm.data.arc import tokens as arc
from lockstep.recipes.hrm.data.maze import grid as maze
from lockstep.recipes.hrm.data.sudoku.board import Board, board_of

Tokens = npt.NDArray[np.integer[Any]]
"""Tokens [cells], row by row; with more dimensions in front if a docstring says so."""

Cells = npt.NDArray[np.bool_]
"""Something of each cell [cells]."""

Name = Literal["sudoku", "maze", "arc", "tokens"]

BLANK = 1
"""The token of a cell of a Sudoku without a digit."""

_SUDOKU_SIDES = (4, 6, 9)


@dataclass(frozen=True)
class Kind:
    """What puzzles of a dataset are.

    Attributes:
        name: `tokens` for those that are none of the known kinds.
        rows: rows of a grid.
        columns: columns of a grid.
        vocabulary: number of tokens.
    """

    name: Name
    rows: int
    columns: int
    vocabulary: int

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.rows * self.columns

    @property
    def board(self) -> Board:
        """The board of a Sudoku; of no other kind."""
        assert self.name == "sudoku"
        return board_of(self.rows)

    @property
    def symbols(self) -> list[str]:
        """What stands for each token: a character, but numbers for tokens of no known kind."""
        if self.name == "sudoku":
            return ["?", ".", *(str(digit) for digit in range(1, self.rows + 1))]
        if self.name == "maze":
            return ["?", *maze.CHARACTERS]
        if self.name == "arc":
            return [" ", "+", *(str(colour) for colour in range(arc.NUM_COLOURS))]
        return [str(token) for token in range(self.vocabulary)]

    def given(self, question: Tokens) -> Cells:
        """The cells of an answer that the question determines: clues; walls, start and goal."""
        if self.name == "sudoku":
            return np.asarray(question > BLANK)
        if self.name == "maze":
            return np.asarray(question != maze.FREE)
        return np.zeros(question.shape, np.bool_)

    def filled(self, question: Tokens, answer: Tokens) -> Cells:
        """The cells that an answer adds to the question."""
        if self.name == "sudoku":
            return np.asarray(~self.given(question) & (answer > BLANK))
        if self.name == "maze":
            return np.asarray(~self.given(question) & (answer == maze.PATH))
        return np.asarray(answer > (arc.END if self.name == "arc" else 0))


def kind_of(vocabulary: int, length: int) -> Kind:
    """The kind of puzzles with so many tokens, of so many cells.

    Puzzles that are none of the known kinds are shown as the numbers of their tokens: in a square
    if there are as many, or in one row.
    """
    side = math.isqrt(length)
    if side**2 != length:
        return Kind("tokens", 1, length, vocabulary)
    if side in _SUDOKU_SIDES and vocabulary == side + 2:
        return Kind("sudoku", side, side, vocabulary)
    if vocabulary == maze.VOCAB_SIZE:
        return Kind("maze", side, side, vocabulary)
    if (vocabulary, length) == (arc.VOCAB_SIZE, arc.SEQ_LEN):
        return Kind("arc", side, side, vocabulary)
    return Kind("tokens", side, side, vocabulary)
