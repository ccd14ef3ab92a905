"""Boards: their sizes, tokens, rules, and the symmetries that augmentations draw from.

A grid is flat, row by row: digits 1..side, 0 for a blank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError

Grid = npt.NDArray[np.uint8]
"""Digits [cells] or [n, cells]; 0 is a blank."""


@dataclass(frozen=True)
class Board:
    """The size of a board.

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
        """Whether rows may change places with columns: boxes must be square for that."""
        return self.box_rows == self.box_columns

    @property
    def boxes(self) -> npt.NDArray[np.int64]:
        """The box of each cell [cells]."""
        row, column = np.divmod(np.arange(self.cells), self.side)
        # There are box_rows boxes in a row of boxes: side = box_rows * box_columns.
        boxes: npt.NDArray[np.int64] = row // self.box_rows * self.box_rows + (
            column // self.box_columns
        )
        return boxes


_BOARDS: Mapping[int, Board] = MappingProxyType(
    {4: Board(4, 2, 2), 6: Board(6, 2, 3), 9: Board(9, 3, 3)}
)


def board_of(side: int) -> Board:
    """The board of 4, 6 or 9 rows.

    Raises:
        ConfigError: there is none of that size.
    """
    if side not in _BOARDS:
        raise ConfigError(f"size={side}: must be one of {', '.join(map(str, _BOARDS))}")
    return _BOARDS[side]


def to_tokens(grids: Grid) -> Grid:
    """Tokens of grids: digit + 1, since 0 is padding and 1 a blank."""
    return np.asarray(grids + np.uint8(1), np.uint8)


def to_grids(tokens: npt.NDArray[np.integer[Any]]) -> Grid:
    """Grids of tokens, the inverse of `to_tokens`; padding has no digit and must not be there."""
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
    """Some maps from solutions to solutions: cells change places, digits change names.

    Attributes:
        cells: where each cell of a result is taken from, int64 [n, cells].
        digits: the new name of each digit, uint8 [n, side + 1]; a blank stays a blank.
    """

    cells: npt.NDArray[np.int64]
    digits: Grid

    def __call__(self, grid: Grid) -> Grid:
        """What each symmetry makes of a grid [cells]: [n, cells]."""
        return np.take_along_axis(self.digits, grid[self.cells].astype(np.int64), axis=1)


def draw_symmetries(board: Board, generator: np.random.Generator, count: int) -> Symmetries:
    """Symmetries under which the split into training and test is closed; see `split`.

    Drawn evenly: transposition (square boxes only), bands, rows within bands, stacks, columns
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
    """Orders of rows (or columns): of bands of some thickness, and within each: [count, side]."""
    bands = np.tile(np.arange(side).reshape(-1, thickness), (count, 1, 1))
    bands = generator.permuted(bands, axis=2)
    orders = generator.permuted(np.tile(np.arange(bands.shape[1]), (count, 1)), axis=1)
    return np.take_along_axis(bands, orders[:, :, None], axis=1).reshape(count, side)
