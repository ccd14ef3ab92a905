"""Which solution grids are for training and which for the test.

A test puzzle whose solution occurs in training in another guise could be answered from memory. So
all grids that symmetries of the augmentation make of one another are on one side: the side is a
pure function of the seed and of their common form.

- 6x6 and 9x9: the common form is `canonical`, up to all symmetries: digits, rows within bands,
  bands, columns within stacks, stacks, and transposition where boxes are square (6x6: not). There
  are 5,472,730,538 such classes for 9x9, and 49 for 6x6.
- 4x4: all 288 grids are in 2 such classes, of 96 and 192. With one of them for training and the
  other one for the test, all that is measured would be how far one class leads to the other. So
  the common form is up to relabelling digits only: 12 classes of 24 grids, of which the seed
  gives a share to the test; and augmentations of 4x4 relabel digits and do nothing else. They
  lose nothing by it: the puzzles that are drawn have solutions of all training classes already.
"""

from __future__ import annotations

import hashlib
from itertools import permutations, product

import numpy as np

from lockstep.recipes.hrm.data.sudoku.board import Board, Grid, are_solutions
from lockstep.recipes.hrm.data.sudoku.canonical import canonical, relabelled

NUM_SMALL_TEST_CLASSES = 3
"""Of the 12 classes of the 4x4 board."""

TEST_SHARE = 1 / 4
"""Of the classes of other boards, in the mean."""


class SolutionSplit:
    """The side of each solution grid."""

    def __init__(self, board: Board, seed: int) -> None:
        """Prepare for a board.

        Args:
            board: the board.
            seed: seed that the sides depend on.
        """
        self._board, self._seed = board, seed
        self._sides: dict[bytes, bool] = {}
        if board.side == 4:
            classes = sorted(_small_classes(board), key=self._rank)
            self._sides = {
                form: number < NUM_SMALL_TEST_CLASSES for number, form in enumerate(classes)
            }

    def is_test(self, solution: Grid) -> bool:
        """Whether a solution grid [cells] is for the test."""
        form = self.common_form(solution)
        if self._board.side == 4:
            return self._sides[form]
        return self._rank(form) < TEST_SHARE * 2**64

    def common_form(self, solution: Grid) -> bytes:
        """What a solution grid [cells] has in common with all that augmentations make of it."""
        if self._board.side == 4:
            return relabelled(self._board, solution).tobytes()
        return canonical(self._board, solution).tobytes()

    def _rank(self, form: bytes) -> int:
        """64 bits that look random."""
        sha = hashlib.sha256(f"sudoku {self._seed} ".encode() + form)
        return int.from_bytes(sha.digest()[:8], "big")


def _small_classes(board: Board) -> list[bytes]:
    """The 12 solution grids of the 4x4 board whose first row is 1234."""
    rows = list(permutations(range(1, board.side + 1)))
    grids = np.array(list(product(rows[:1], rows, rows, rows)), np.uint8).reshape(-1, board.cells)
    return [grid.tobytes() for grid in grids[are_solutions(board, grids)]]
