"""The form of a solution grid that all its symmetric ones have in common."""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations, product

import numpy as np
import numpy.typing as npt

from lockstep.recipes.hrm.data.sudoku.board import Board, Grid


def relabelled(board: Board, solution: Grid) -> Grid:
    """A solution grid [cells] with digits renamed such that the first row is 1, 2, 3, …."""
    names = np.zeros(board.side + 1, np.uint8)
    names[solution[: board.side]] = np.arange(1, board.side + 1)
    return names[solution]


def canonical(board: Board, solution: Grid) -> Grid:
    """The least of all grids that symmetries make of a solution grid, read row by row.

    Symmetries are those of `board.draw_symmetries`, and on the 4x4 board all that it has. Once it
    is chosen which row is the first, how columns are ordered, and whether rows are columns, the
    first row names the digits and the first column orders the rows: so there are 23,328 grids to
    compare for 9x9, and not 3,359,232. Their second rows leave a few of them.

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
    made = [sum(order, ()) for choice in inner for order in permutations(choice)]
    return np.array(made, np.int64)


def _second_rows(
    board: Board, square: Grid, top: int, orders: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The second row for each order of columns with a row at the top, as a number: int64 [n]."""
    band = top // board.box_rows * board.box_rows
    others = [row for row in range(band, band + board.box_rows) if row != top]
    # names[c]: the position in the first row of the digit that a row has in column c.
    position = np.empty(board.side + 1, np.int64)
    position[square[top]] = np.arange(board.side)
    inverse = np.argsort(orders, axis=1)
    weights = (board.side + 1) ** np.arange(board.side)[::-1]
    numbers = [
        (np.take_along_axis(inverse, position[square[row]][orders], axis=1) + 1) @ weights
        for row in others
    ]
    least: npt.NDArray[np.int64] = np.min(numbers, axis=0)
    return least


def _finished(board: Board, square: Grid, top: int, order: npt.NDArray[np.int64]) -> Grid:
    """The least grid with a row at the top and an order of columns."""
    names = np.zeros(board.side + 1, np.uint8)
    names[square[top][order]] = np.arange(1, board.side + 1)
    named = names[square[:, order]]
    bands = named.reshape(-1, board.box_rows, board.side)
    # First column: the top row's is 1, so its band comes first and it is first in its band.
    ordered = [band[np.argsort(band[:, 0])] for band in bands]
    ordered.sort(key=lambda band: int(band[0, 0]))
    return np.concatenate(ordered).reshape(-1)
