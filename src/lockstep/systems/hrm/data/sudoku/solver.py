"""Solving by backtracking over bit masks, and puzzles with one solution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lockstep.errors import ConfigError
from lockstep.systems.hrm.data.arrays import Use, keyed
from lockstep.systems.hrm.data.sudoku.board import Board, Grid, SolutionSplit


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
