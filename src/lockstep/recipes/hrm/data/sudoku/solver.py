"""Solving by backtracking over bit masks, the cell with fewest digits first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lockstep.recipes.hrm.data.sudoku.board import Board, Grid


class Solver:
    """Solves grids of one board; deterministic, so that ratings are those of any machine.

    In each step the first empty cell is taken that has no more than one digit left, or else the
    first of those that have fewest; its digits are tried in ascending order. A backtrack is a digit
    that was tried in vain.
    """

    def __init__(self, board: Board) -> None:
        """Prepare for a board."""
        self.board = board
        self._all = (1 << board.side) - 1
        boxes = board.boxes.tolist()
        self._units = [
            (cell // board.side, cell % board.side, boxes[cell]) for cell in range(board.cells)
        ]

    @cached_property
    def _ascending(self) -> list[list[int]]:
        return [[1 << digit for digit in range(self.board.side)]] * self.board.cells

    def count(self, grid: Grid, limit: int = 2) -> int:
        """The number of solutions of a grid [cells], up to a limit."""
        return self._search(grid.tolist(), self._ascending, limit).num_found

    def solve(self, grid: Grid) -> Grid | None:
        """The first solution of a grid [cells]; None if there is none."""
        return self._first(grid.tolist(), self._ascending)

    def rating(self, grid: Grid) -> int:
        """How difficult a grid [cells] is: backtracks until its first solution."""
        return self._search(grid.tolist(), self._ascending, 1).num_backtracks

    def random_solution(self, generator: np.random.Generator) -> Grid:
        """A solution found with the digits of each cell tried in an order drawn for it."""
        digits = np.tile(1 << np.arange(self.board.side), (self.board.cells, 1))
        orders = generator.permuted(digits, axis=1).tolist()
        found = self._first([0] * self.board.cells, orders)
        assert found is not None
        return found

    def stays_unique(self, digits: list[int], cell: int) -> bool:
        """Whether a grid that has one solution has one only without the digit of a cell.

        It has another one only if there is one with another digit there: most are excluded by
        the row, the column or the box alone.

        Args:
            digits: the grid [cells]; unchanged afterwards.
            cell: a cell that is not blank.
        """
        own = digits[cell]
        row, column, box = self._units[cell]
        possible = self._all
        for place, digit in enumerate(digits):
            if digit and place != cell:
                units = self._units[place]
                if units[0] == row or units[1] == column or units[2] == box:
                    possible &= ~(1 << digit - 1)
        for digit in range(1, self.board.side + 1):
            if digit != own and possible >> digit - 1 & 1:
                digits[cell] = digit
                found = self._search(digits, self._ascending, 1).num_found
                digits[cell] = own
                if found:
                    return False
        return True

    def _first(self, digits: list[int], orders: list[list[int]]) -> Grid | None:
        search = self._search(digits, orders, 1)
        return np.array(search.digits, np.uint8) if search.num_found else None

    def _search(self, digits: Sequence[int], orders: list[list[int]], limit: int) -> _Search:
        search = _Search(self._all, self._units, orders, limit)
        if search.place(digits):
            search.run()
        return search


class _Search:
    """One search for solutions.

    Attributes:
        digits: the last solution that was found.
        num_found: number of solutions so far.
        num_backtracks: digits that were tried in vain, before the limit was reached.
    """

    def __init__(
        self, full: int, units: list[tuple[int, int, int]], orders: list[list[int]], limit: int
    ) -> None:
        side = full.bit_length()
        self._full, self._units, self._orders, self._limit = full, units, orders, limit
        self._rows, self._columns, self._boxes = [0] * side, [0] * side, [0] * side
        self._empty: list[int] = []
        self._grid: list[int] = []
        self.digits: list[int] = []
        self.num_found = self.num_backtracks = 0

    def place(self, digits: Sequence[int]) -> bool:
        """Take the digits that are given; False if they contradict one another."""
        self._grid = list(digits)
        for cell, digit in enumerate(digits):
            row, column, box = self._units[cell]
            if not digit:
                self._empty.append(cell)
                continue
            bit = 1 << digit - 1
            if bit & (self._rows[row] | self._columns[column] | self._boxes[box]):
                return False
            self._rows[row] |= bit
            self._columns[column] |= bit
            self._boxes[box] |= bit
        return True

    def run(self) -> None:
        """Fill what is empty, by recursion, until the limit is reached."""
        if not self._empty:
            self.num_found += 1
            self.digits = list(self._grid)
            return
        index, possible = self._choose()
        if not possible:
            return
        # Taken out where it stands, and put back there: the order of the others must not change.
        cell = self._empty.pop(index)
        row, column, box = self._units[cell]
        for bit in self._orders[cell]:
            if not bit & possible:
                continue
            self._rows[row] |= bit
            self._columns[column] |= bit
            self._boxes[box] |= bit
            self._grid[cell] = bit.bit_length()
            before = self.num_found
            self.run()
            self._rows[row] ^= bit
            self._columns[column] ^= bit
            self._boxes[box] ^= bit
            if self.num_found == self._limit:
                break
            if self.num_found == before:
                self.num_backtracks += 1
        self._grid[cell] = 0
        self._empty.insert(index, cell)

    def _choose(self) -> tuple[int, int]:
        """The place in `_empty` of the cell to fill next, and the digits it may have."""
        rows, columns, boxes, units = self._rows, self._columns, self._boxes, self._units
        fewest, chosen, digits = 99, 0, 0
        for index, cell in enumerate(self._empty):
            row, column, box = units[cell]
            possible = self._full & ~(rows[row] | columns[column] | boxes[box])
            count = possible.bit_count()
            if count < fewest:
                if count < 2:
                    return index, possible
                fewest, chosen, digits = count, index, possible
        return chosen, digits
