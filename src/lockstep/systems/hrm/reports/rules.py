"""Kinds of puzzles by their tokens, the rules of answers, and what answers without a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lockstep.observe.baselines import LIMIT
from lockstep.systems.hrm.data import arc, maze
from lockstep.systems.hrm.data.sudoku import Solver
from lockstep.systems.hrm.data.sudoku_board import (
    Board,
    Grid,
    are_solutions,
    board_of,
    to_grids,
    to_tokens,
)
from lockstep.systems.hrm.puzzles import Puzzles

Tokens = npt.NDArray[np.integer[Any]]
"""Tokens [cells], row by row; with more dimensions in front if a docstring says so."""

Cells = npt.NDArray[np.bool_]
"""A mask of cells [cells]."""

BLANK = 1
"""The token of a cell of a Sudoku without a digit."""

_SUDOKU_SIDES = (4, 6, 9)


@dataclass(frozen=True)
class Kind:
    """The kind of a dataset's puzzles.

    Attributes:
        name: `tokens` for puzzles of no known kind.
        rows: rows of a grid.
        columns: columns of a grid.
        vocabulary: number of tokens.
    """

    name: Literal["sudoku", "maze", "arc", "tokens"]
    rows: int
    columns: int
    vocabulary: int

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.rows * self.columns

    @property
    def board(self) -> Board:
        """The board of a Sudoku."""
        assert self.name == "sudoku"
        return board_of(self.rows)

    @property
    def symbols(self) -> list[str]:
        """The symbol of each token: a character, or its number if the kind is unknown."""
        if self.name == "sudoku":
            return ["?", ".", *map(str, range(1, self.rows + 1))]
        if self.name == "maze":
            return ["?", *maze.CHARACTERS]
        if self.name == "arc":
            return [" ", "+", *map(str, range(arc.NUM_COLOURS))]
        return [*map(str, range(self.vocabulary))]

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

    Puzzles of no known kind are shown as the numbers of their tokens: in a square if their count
    allows it, else in one row.
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


def repeated(board: Board, grid: Grid) -> Cells:
    """The cells whose digit occurs again in their row, column or box.

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
    """The wrong cells of an answer.

    These are cells that the question determines and the answer changes; in a Sudoku also those
    without a digit, and those other than clues whose digit is repeated. If the right answer is
    known, also all cells that differ from it.

    Args:
        kind: kind of the puzzle.
        question: tokens [cells].
        answer: tokens [cells].
        label: the right answer [cells], 0 in cells without an answer; None if it is unknown.
    """
    is_given = kind.given(question)
    wrong = is_given & (answer != question)
    if label is not None:
        wrong |= (label != 0) & (answer != label)
    if kind.name == "sudoku":
        digits = np.where(answer > BLANK, answer - BLANK, 0).astype(np.uint8)
        wrong |= (repeated(kind.board, digits) & ~is_given) | (digits == 0)
    return np.asarray(wrong)


def is_solved(kind: Kind, question: Tokens, answer: Tokens, label: Tokens | None) -> bool:
    """Whether an answer is a solution.

    The rules decide on Sudokus and mazes, even if an answer is not the dataset's; answers to other
    puzzles must be equal to the label.
    """
    if kind.name == "sudoku":
        has_digits = bool((answer > BLANK).all())
        is_kept = not (kind.given(question) & (answer != question)).any()
        return has_digits and is_kept and bool(are_solutions(kind.board, to_grids(answer[None]))[0])
    if kind.name == "maze":
        return maze.is_shortest_path(question, answer, kind.rows)
    assert label is not None
    return bool(((answer == label) | (label == 0)).all() and (label != 0).any())


_MOST_NEIGHBOURS = 5000
"""Training puzzles, evenly spaced, among which the nearest one is searched for."""
_AT_A_TIME = 64


def simple_answers(train: Puzzles, held_out: Puzzles) -> dict[str, dict[str, float]]:
    """How simple methods answer puzzles: metrics by their names.

    - the question, copied
    - the commonest answer of each cell, by the token of the question there
    - the answer of the training puzzle with the most tokens in common
    - for Sudokus and mazes a search by the rules, which needs no training. It finds all answers, so
      its name ends in `(limit)` and says what it takes.

    Args:
        train: puzzles to learn from.
        held_out: puzzles to answer.
    """
    questions, labels = held_out.inputs.numpy(), held_out.labels.numpy()
    known, answers = train.inputs.numpy(), train.labels.numpy()
    found = {
        "the question, copied": _metrics(questions, labels),
        "the commonest answer of each cell": _metrics(
            _commonest(known, answers, train.vocabulary)[np.arange(train.length), questions], labels
        ),
        "the nearest training puzzle": _metrics(_nearest(known, answers, questions), labels),
    }
    kind = kind_of(held_out.vocabulary, held_out.length)
    search = _SEARCHES.get(kind.name)
    if search is not None:
        by_rules, remark = search(kind, questions)
        found[f"search by the rules, {remark}{LIMIT}"] = _metrics(by_rules, labels)
    return found


def _metrics(answers: Tokens, labels: Tokens) -> dict[str, float]:
    """As `Hrm.evaluate` measures them."""
    is_label = labels != 0
    right = (answers == labels) & is_label
    exact = (right | ~is_label).all(-1) & is_label.any(-1)
    share = right.sum(-1) / np.maximum(is_label.sum(-1), 1)
    return {"exact": float(exact.mean()), "token_accuracy": float(share.mean())}


def _commonest(known: Tokens, answers: Tokens, vocabulary: int) -> npt.NDArray[np.int64]:
    """The commonest answer by cell and token of the question, [cells, tokens].

    Where a token has never been seen in a cell, it is the commonest one of the cell.
    """
    cells = known.shape[1]
    counts = np.zeros((cells, vocabulary, vocabulary), np.int64)
    where = np.broadcast_to(np.arange(cells), known.shape)
    np.add.at(counts, (where, known, answers), 1)
    counts[:, :, 0] = 0  # no answer
    of_cell = counts.sum(1).argmax(-1)[:, None]
    return np.asarray(np.where(counts.any(-1), counts.argmax(-1), of_cell), np.int64)


def _nearest(known: Tokens, answers: Tokens, questions: Tokens) -> Tokens:
    kept = np.linspace(0, len(known) - 1, min(len(known), _MOST_NEIGHBOURS)).astype(np.int64)
    rows = []
    for first in range(0, len(questions), _AT_A_TIME):
        some = questions[first : first + _AT_A_TIME]
        common = np.stack([(known[kept] == question).sum(-1) for question in some])
        rows.append(kept[common.argmax(-1)])
    return np.asarray(answers[np.concatenate(rows)])


def _solved_sudokus(kind: Kind, questions: Tokens) -> tuple[Tokens, str]:
    solver = Solver(kind.board)
    grids = to_grids(questions)
    solved = [solver.solve_rated(grid) for grid in grids]
    rows = [q if found is None else found for q, (found, _) in zip(grids, solved, strict=True)]
    backtracks = np.mean([number for _, number in solved])
    return to_tokens(np.stack(rows)), f"{backtracks:.1f} backtracks a puzzle"


def _solved_mazes(kind: Kind, questions: Tokens) -> tuple[Tokens, str]:
    found: list[Any] = [maze.solved(question, kind.rows) for question in questions]
    rows = [q if one is None else one for q, one in zip(questions, found, strict=True)]
    cells = (questions != maze.WALL).sum(-1).mean()
    return np.stack(rows), f"at most {cells:.0f} cells a maze"


_SEARCHES: dict[str, Callable[[Kind, Tokens], tuple[Tokens, str]]] = {
    "sudoku": _solved_sudokus,
    "maze": _solved_mazes,
}
