"""Sudoku puzzles: a solver, puzzles with one solution, CSV files, and the groups of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.config.parsing import shown
from lockstep.errors import ConfigError, DataError
from lockstep.systems.hrm.data.arrays import Use, keyed
from lockstep.systems.hrm.data.format import Puzzle
from lockstep.systems.hrm.data.sources import (
    DEFAULT_COUNT,
    Options,
    Pairs,
    Row,
    Source,
    choose_pairs,
    pair_source,
    read_rows,
)
from lockstep.systems.hrm.data.sudoku_board import (
    Board,
    Grid,
    SolutionSplit,
    are_solutions,
    board_of,
    draw_symmetries,
    to_tokens,
)

DEFAULT_AUGMENT: Mapping[int, int] = {4: 10, 6: 100, 9: 1000}
"""Augmentations of a puzzle by the size of the board; 1,000 for 9x9 as published."""

_MOST_FAILURES = 2000
"""Draws in a row without a new puzzle, after which generation gives up."""

_BLOCK_ROWS = 4096


def sudoku_source(options: Options) -> Source:
    """Puzzles that are generated, or sampled from CSV files.

    Augmentations are drawn with replacement, as published: one may be drawn twice.

    Raises:
        ConfigError: there is no such size, or there are fewer puzzles than requested.
        DataError: a CSV file is missing or damaged.
    """
    board = board_of(options.size or 4)
    num_augment = DEFAULT_AUGMENT[board.side] if options.augment is None else options.augment
    splits = _from_csv(board, options) if options.csv else _generated(board, options)
    group = partial(_group, board)
    return pair_source(board.vocab_size, board.cells, splits, options.seed, num_augment, group)


def _generated(board: Board, options: Options) -> dict[str, Iterator[Pairs]]:
    counts = {Use.TRAIN: options.train, Use.TEST: options.test}
    return {
        use.name.lower(): islice(
            puzzles(board, options.seed, use, options.clues or 0, options.rating or 0),
            count or DEFAULT_COUNT,
        )
        for use, count in counts.items()
    }


def _from_csv(board: Board, options: Options) -> dict[str, list[Pairs]]:
    split = SolutionSplit(board, options.seed)

    def read(path: Path) -> Iterator[Pairs]:
        return read_puzzles(path, board, options.rating or 0)

    def divide(pairs: Iterator[Pairs]) -> Iterator[tuple[str, Pairs]]:
        for pair in pairs:
            yield "test" if split.is_test(pair.answers[0]) else "train", pair

    return choose_pairs(options, read, divide)


def _group(
    board: Board, pair: Pairs, num_augment: int, generator: np.random.Generator
) -> Iterator[Puzzle]:
    symmetries = draw_symmetries(board, generator, num_augment)
    questions = np.concatenate([pair.questions, symmetries(pair.questions[0])])
    answers = np.concatenate([pair.answers, symmetries(pair.answers[0])])
    inputs, labels = to_tokens(questions), to_tokens(answers)
    for number in range(len(inputs)):
        yield Puzzle(0, inputs[number : number + 1], labels[number : number + 1])


def read_puzzles(path: Path, board: Board, least_rating: int = 0) -> Iterator[Pairs]:
    """The puzzles of a CSV file, block by block, as grids.

    Uniqueness of solutions is not checked, which takes a second for some puzzles.

    Raises:
        DataError: as `read_rows`; or a question or answer is not of the board, breaks the rules, or
            the answer does not solve the question; with its line. Or there is no puzzle at all.
    """
    rows = read_rows(path, least_rating=least_rating)
    is_empty = True
    while block := list(islice(rows, _BLOCK_ROWS)):
        is_empty = False
        yield _checked(path, board, block)
    if is_empty:
        raise DataError(f"{path}: holds no puzzle of rating {least_rating} or more")


def _checked(path: Path, board: Board, rows: list[Row]) -> Pairs:
    """The grids of some rows, checked together: checking row by row would be slow."""
    questions = _grids(path, board, rows, "question")
    answers = _grids(path, board, rows, "answer")
    for problem, wrong in (
        ("a blank in the answer", (answers == 0).any(axis=1)),
        (
            "an answer that breaks the rules (a digit twice in a row, column or box)",
            ~are_solutions(board, answers),
        ),
        (
            "an answer that does not solve the question: a clue has another digit",
            ((questions != answers) & (questions != 0)).any(axis=1),
        ),
    ):
        if wrong.any():
            row = rows[int(np.argmax(wrong))]
            raise DataError(f"{path}: line {row.line}: {problem}: {shown(row.answer)}")
    return Pairs(questions, answers)


def _grids(path: Path, board: Board, rows: list[Row], column: str) -> npt.NDArray[np.uint8]:
    allowed = frozenset(".0" + "123456789"[: board.side])
    for row in rows:
        text = getattr(row, column)
        if len(text) != board.cells:
            raise DataError(
                f"{path}: line {row.line}: {column} of {len(text)} characters: must be "
                f"{board.cells} of a {board.side}x{board.side} board; see --size"
            )
        if not allowed.issuperset(text):
            raise DataError(
                f"{path}: line {row.line}: {column} {shown(text)}: must be of '.', 0 and digits "
                f"to {board.side}"
            )
    joined = "".join(getattr(row, column) for row in rows).replace(".", "0").encode("ascii")
    digits = np.frombuffer(joined, np.uint8) - np.uint8(ord("0"))
    return np.asarray(digits.reshape(len(rows), board.cells), np.uint8)


def puzzles(
    board: Board, seed: int, use: Use, num_clues: int = 0, rating: int = 0
) -> Iterator[Pairs]:
    """An endless sequence of different puzzles of one split, each as a pair of [1, cells].

    The n-th draw depends on the seed, the split and n only.

    Args:
        board: the board.
        seed: seed of all draws, and of the split.
        use: `TRAIN` or `TEST`: which solutions are used, see `SolutionSplit`.
        num_clues: number of clues to stop at; puzzles have more where no other one can be removed.
        rating: lowest rating of a puzzle.

    Raises:
        ConfigError: no more such puzzles can be found.
    """
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
        question = dig(solver, answer, generator, num_clues)
        if question.tobytes() in seen or solver.rating(question) < rating:
            continue
        seen.add(question.tobytes())
        failures = 0
        yield Pairs(question[None], answer[None])
    raise ConfigError(
        f"no more than {len(seen)} {board.side}x{board.side} puzzles were found that are as "
        "asked for; ask for fewer, for an easier rating, or take another seed"
    )


def dig(solver: Solver, answer: Grid, generator: np.random.Generator, num_clues: int = 0) -> Grid:
    """A puzzle with one solution, which is `answer`.

    Clues are removed in random order wherever one solution is left, down to `num_clues`, or until
    no other clue can be removed.

    Args:
        solver: solver of the board.
        answer: a solution grid [cells].
        generator: draws the order.
        num_clues: number of clues to stop at.
    """
    digits = answer.tolist()
    num_left = len(digits)
    for cell in generator.permutation(len(digits)).tolist():
        if num_left <= num_clues:
            break
        if solver.stays_unique(digits, cell):
            digits[cell] = 0
            num_left -= 1
    return np.array(digits, np.uint8)


class Solver:
    """Solves grids of one board; deterministic, so that ratings are those of any machine.

    Each step fills the first empty cell that has at most one possible digit, or else the first one
    with the fewest; its digits are tried in ascending order. A backtrack is a digit that led to no
    solution.
    """

    def __init__(self, board: Board) -> None:
        """Prepare for a board."""
        self.board = board
        self._all_digits = (1 << board.side) - 1
        boxes = board.boxes.tolist()
        self._units = [
            (cell // board.side, cell % board.side, boxes[cell]) for cell in range(board.cells)
        ]
        self._ascending = [[1 << digit for digit in range(board.side)]] * board.cells

    def count(self, grid: Grid, limit: int = 2) -> int:
        """The number of solutions of a grid [cells], up to a limit."""
        return self._search(grid.tolist(), self._ascending, limit).num_found

    def solve(self, grid: Grid) -> Grid | None:
        """The first solution of a grid [cells]; None if there is none."""
        return self.solve_rated(grid)[0]

    def rating(self, grid: Grid) -> int:
        """The difficulty of a grid [cells]: the number of backtracks to its first solution."""
        return self.solve_rated(grid)[1]

    def solve_rated(self, grid: Grid) -> tuple[Grid | None, int]:
        """What `solve` and `rating` give, by one search."""
        search = self._search(grid.tolist(), self._ascending, 1)
        return search.first, search.num_backtracks

    def random_solution(self, generator: np.random.Generator) -> Grid:
        """A solution that is found when each cell tries its digits in a random order."""
        digits = np.tile(1 << np.arange(self.board.side), (self.board.cells, 1))
        orders = generator.permuted(digits, axis=1).tolist()
        found = self._first([0] * self.board.cells, orders)
        assert found is not None
        return found

    def stays_unique(self, digits: list[int], cell: int) -> bool:
        """Whether a grid with one solution still has only one once a clue is removed.

        A second solution has another digit in that cell, and the row, the column and the box
        exclude most of the other digits.

        Args:
            digits: the grid [cells]; unchanged afterwards.
            cell: a cell that is not blank.
        """
        own = digits[cell]
        row, column, box = self._units[cell]
        possible = self._all_digits
        for other, digit in enumerate(digits):
            if digit and other != cell:
                units = self._units[other]
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
        return self._search(digits, orders, 1).first

    def _search(self, digits: Sequence[int], orders: list[list[int]], limit: int) -> _Search:
        search = _Search(self._all_digits, self._units, orders, limit)
        if search.place(digits):
            search.run()
        return search


class _Search:
    """A search for solutions.

    Attributes:
        digits: the last solution that was found.
        num_found: number of solutions so far.
        num_backtracks: number of digits that led to no solution, before the limit was reached.
    """

    def __init__(
        self,
        all_digits: int,
        units: list[tuple[int, int, int]],
        orders: list[list[int]],
        limit: int,
    ) -> None:
        side = all_digits.bit_length()
        self._all_digits, self._units, self._orders, self._limit = all_digits, units, orders, limit
        self._rows, self._columns, self._boxes = [0] * side, [0] * side, [0] * side
        self._empty: list[int] = []
        self._grid: list[int] = []
        self.digits: list[int] = []
        self.num_found = self.num_backtracks = 0

    @property
    def first(self) -> Grid | None:
        """The last solution that was found, [cells]; None if there is none."""
        return np.array(self.digits, np.uint8) if self.num_found else None

    def place(self, digits: Sequence[int]) -> bool:
        """Enter the clues; False if they contradict one another."""
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
        """Fill the empty cells, recursively, until the limit is reached."""
        if not self._empty:
            self.num_found += 1
            self.digits = list(self._grid)
            return
        index, possible = self._choose()
        if not possible:
            return
        # Reinserted at the same index below: the order of the others decides ratings.
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
        """The index in `_empty` of the cell to fill next, and the digits it may have."""
        rows, columns, boxes, units = self._rows, self._columns, self._boxes, self._units
        fewest, chosen, digits = 99, 0, 0
        for index, cell in enumerate(self._empty):
            row, column, box = units[cell]
            possible = self._all_digits & ~(rows[row] | columns[column] | boxes[box])
            count = possible.bit_count()
            if count < fewest:
                if count < 2:
                    return index, possible
                fewest, chosen, digits = count, index, possible
        return chosen, digits
