"""Sudoku boards: sizes, tokens, rules, symmetries, and the split of solutions.

A grid is flat, row by row: digits 1..side, 0 for a blank.

A test puzzle could be answered from memory if training contains its solution up to a symmetry. So
all grids that the symmetries of the augmentation map to one another are in the same split, which is
a pure function of the seed and of their canonical form.

- 6x6 and 9x9: the form is `canonical`, up to all symmetries: digits, rows within bands, bands,
  columns within stacks, stacks, and transposition where boxes are square (not in 6x6). There are
  5,472,730,538 such classes for 9x9, and 49 for 6x6.
- 4x4: all 288 grids are in 2 such classes, of 96 and 192. With one of them for training and the
  other one for the test, a score would only measure how well one class transfers to the other. So
  the form is up to relabelling digits only: 12 classes of 24 grids, of which the seed assigns some
  to the test; and augmentations of 4x4 only relabel digits. They lose nothing by it: the puzzles
  that are drawn have solutions of all training classes already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError

Grid = npt.NDArray[np.uint8]
"""Digits [cells] or [n, cells]; 0 is a blank."""


@dataclass(frozen=True)
class Board:
    """A board of some size.

    Attributes:
        side: number of rows, of columns, of boxes and of digits.
        box_rows: rows of a box.
        box_columns: columns of a box.
    """

    side: int
    box_rows: int
    box_columns: int

    @property
    def cells(self) -> int:
        """Number of cells, and tokens of an example."""
        return self.side**2

    @property
    def vocab_size(self) -> int:
        """Number of tokens: padding, blank, digits."""
        return self.side + 2

    @property
    def can_transpose(self) -> bool:
        """Whether rows and columns may be swapped, for which boxes must be square."""
        return self.box_rows == self.box_columns

    @property
    def boxes(self) -> npt.NDArray[np.int64]:
        """The box of each cell [cells]."""
        row, column = np.divmod(np.arange(self.cells), self.side)
        # There are box_rows boxes in a row of boxes: side = box_rows * box_columns.
        return np.asarray(row // self.box_rows * self.box_rows + column // self.box_columns)


_BOARDS: Mapping[int, Board] = {4: Board(4, 2, 2), 6: Board(6, 2, 3), 9: Board(9, 3, 3)}


def board_of(side: int) -> Board:
    """The board of 4, 6 or 9 rows.

    Raises:
        ConfigError: there is no board of that size.
    """
    if side not in _BOARDS:
        raise ConfigError(f"size={side}: must be one of {', '.join(map(str, _BOARDS))}")
    return _BOARDS[side]


def to_tokens(grids: Grid) -> Grid:
    """Tokens of grids: digit + 1, since 0 is padding and 1 a blank."""
    return np.asarray(grids + np.uint8(1), np.uint8)


def to_grids(tokens: npt.NDArray[np.integer[Any]]) -> Grid:
    """Grids of tokens, the inverse of `to_tokens`; tokens must not contain padding."""
    assert tokens.min(initial=1) >= 1
    return np.asarray(tokens - 1, np.uint8)


def are_solutions(board: Board, grids: Grid) -> npt.NDArray[np.bool_]:
    """Whether each row, column and box has every digit once: bool [n] of grids [n, cells]."""
    wanted = np.arange(1, board.side + 1)
    square = grids.reshape(-1, board.side, board.side)
    by_box = grids[:, np.argsort(board.boxes, kind="stable")].reshape(square.shape)
    correct = np.ones(len(grids), np.bool_)
    for units in (square, square.transpose(0, 2, 1), by_box):
        correct &= (np.sort(units, axis=2) == wanted).all(axis=(1, 2))
    return correct


@dataclass(frozen=True)
class Symmetries:
    """Symmetries of solutions, each a permutation of cells and one of digits.

    Attributes:
        cells: index of the cell that each cell of a result is taken from, int64 [n, cells].
        digits: the new digit for each digit, uint8 [n, side + 1]; a blank stays a blank.
    """

    cells: npt.NDArray[np.int64]
    digits: Grid

    def __call__(self, grid: Grid) -> Grid:
        """A grid [cells] under each symmetry: [n, cells]."""
        return np.take_along_axis(self.digits, grid[self.cells].astype(np.int64), axis=1)


def draw_symmetries(board: Board, generator: np.random.Generator, count: int) -> Symmetries:
    """Random symmetries, under which `SolutionSplit` is closed.

    Uniform draws of transposition (square boxes only), bands, rows within bands, stacks, columns
    within stacks, and digits. On the 4x4 board, digits only.
    """
    digits = np.zeros((count, board.side + 1), np.uint8)
    names = np.arange(1, board.side + 1, dtype=np.uint8)
    digits[:, 1:] = generator.permuted(np.tile(names, (count, 1)), axis=1)
    if board.side == 4:
        return Symmetries(np.tile(np.arange(board.cells), (count, 1)), digits)
    rows = _lines(board.side, board.box_rows, generator, count)
    columns = _lines(board.side, board.box_columns, generator, count)
    cells = rows[:, :, None] * board.side + columns[:, None, :]
    if board.can_transpose:
        turned = generator.integers(2, size=count).astype(np.bool_)
        cells[turned] = cells[turned].transpose(0, 2, 1)
    return Symmetries(cells.reshape(count, board.cells), digits)


def _lines(
    side: int, thickness: int, generator: np.random.Generator, count: int
) -> npt.NDArray[np.int64]:
    """Random orders of rows (or columns), by bands and within each band: [count, side]."""
    bands = np.tile(np.arange(side).reshape(-1, thickness), (count, 1, 1))
    bands = generator.permuted(bands, axis=2)
    orders = generator.permuted(np.tile(np.arange(bands.shape[1]), (count, 1)), axis=1)
    return np.take_along_axis(bands, orders[:, :, None], axis=1).reshape(count, side)


def relabelled(board: Board, solution: Grid) -> Grid:
    """A solution grid [cells] with digits renamed such that the first row is 1, 2, 3, …."""
    names = np.zeros(board.side + 1, np.uint8)
    names[solution[: board.side]] = np.arange(1, board.side + 1)
    return names[solution]


def canonical(board: Board, solution: Grid) -> Grid:
    """The lexicographically smallest grid that symmetries map a solution grid to.

    Symmetries are those of `draw_symmetries`, and on the 4x4 board all that it has. The choice of
    the first row, of the order of columns and of transposition determines the rest: the first row
    names the digits, and the first column orders the rows. That leaves 23,328 grids to compare for
    9x9 instead of 3,359,232, and comparing their second rows leaves a few.

    Args:
        board: the board.
        solution: a solution grid [cells].
    """
    square = solution.reshape(board.side, board.side)
    squares = [square, square.T] if board.can_transpose else [square]
    orders = _column_orders(board)
    tops = [(s, top) for s in range(len(squares)) for top in range(board.side)]
    seconds = np.stack([_second_rows(board, squares[s], top, orders) for s, top in tops])
    least = seconds.min()
    candidates = (
        _finished(board, squares[tops[i][0]], tops[i][1], orders[j])
        for i, j in zip(*np.nonzero(seconds == least), strict=True)
    )
    return np.frombuffer(min(grid.tobytes() for grid in candidates), np.uint8)


@lru_cache(maxsize=4)
def _column_orders(board: Board) -> npt.NDArray[np.int64]:
    """All orders of columns that stacks allow: [n, side]."""
    stacks = np.arange(board.side).reshape(-1, board.box_columns).tolist()
    inner = product(*(permutations(stack) for stack in stacks))
    orders = [sum(order, ()) for choice in inner for order in permutations(choice)]
    return np.array(orders, np.int64)


def _second_rows(
    board: Board, square: Grid, top: int, orders: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The second row, as a number, for each order of columns with row `top` first: int64 [n]."""
    band = top // board.box_rows * board.box_rows
    others = [row for row in range(band, band + board.box_rows) if row != top]
    # The position of each digit in the first row.
    position = np.empty(board.side + 1, np.int64)
    position[square[top]] = np.arange(board.side)
    inverse = np.argsort(orders, axis=1)
    weights = (board.side + 1) ** np.arange(board.side)[::-1]
    numbers = [
        (np.take_along_axis(inverse, position[square[row]][orders], axis=1) + 1) @ weights
        for row in others
    ]
    return np.asarray(np.min(numbers, axis=0))


def _finished(board: Board, square: Grid, top: int, order: npt.NDArray[np.int64]) -> Grid:
    """The smallest grid with row `top` first and an order of columns."""
    names = np.zeros(board.side + 1, np.uint8)
    names[square[top][order]] = np.arange(1, board.side + 1)
    named = names[square[:, order]]
    bands = named.reshape(-1, board.box_rows, board.side)
    # The first column orders rows and bands; the top row has a 1 there, so it comes first.
    ordered = [band[np.argsort(band[:, 0])] for band in bands]
    ordered.sort(key=lambda band: int(band[0, 0]))
    return np.concatenate(ordered).reshape(-1)


NUM_SMALL_TEST_CLASSES = 3
"""Test classes among the 12 classes of the 4x4 board."""

TEST_SHARE = 1 / 4
"""Expected share of test classes on other boards."""


class SolutionSplit:
    """The split, training or test, of each solution grid."""

    def __init__(self, board: Board, seed: int) -> None:
        """Prepare the split of a board's solutions by a seed."""
        self._board, self._seed = board, seed
        if board.side == 4:
            classes = sorted(_small_classes(board), key=self._rank)
            self._small_test_classes = set(classes[:NUM_SMALL_TEST_CLASSES])

    def is_test(self, solution: Grid) -> bool:
        """Whether a solution grid [cells] is for the test."""
        form = self.common_form(solution)
        if self._board.side == 4:
            return form in self._small_test_classes
        return self._rank(form) < TEST_SHARE * 2**64

    def common_form(self, solution: Grid) -> bytes:
        """The form that a solution grid [cells] shares with all its augmentations."""
        if self._board.side == 4:
            return relabelled(self._board, solution).tobytes()
        return canonical(self._board, solution).tobytes()

    def _rank(self, form: bytes) -> int:
        """A pseudorandom number of 64 bits."""
        sha = hashlib.sha256(f"sudoku {self._seed} ".encode() + form)
        return int.from_bytes(sha.digest()[:8], "big")


def _small_classes(board: Board) -> list[bytes]:
    """The 12 solution grids of the 4x4 board whose first row is 1234."""
    rows = list(permutations(range(1, board.side + 1)))
    grids = np.array(list(product(rows[:1], rows, rows, rows)), np.uint8).reshape(-1, board.cells)
    return [grid.tobytes() for grid in grids[are_solutions(board, grids)]]
