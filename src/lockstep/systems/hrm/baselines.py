"""What answers puzzles without a model: copies, majorities, the nearest puzzle, and search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.systems.hrm.data import maze
from lockstep.systems.hrm.data.sudoku import Solver
from lockstep.systems.hrm.data.sudoku_board import to_grids, to_tokens
from lockstep.systems.hrm.puzzles import Puzzles
from lockstep.systems.hrm.reports.rules import Kind, Tokens, kind_of

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
        found[f"search by the rules, {remark} (limit)"] = _metrics(by_rules, labels)
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
    solved = [solver.solve(grid) for grid in grids]
    backtracks = np.mean([solver.rating(grid) for grid in grids])
    filled = [grid if found is None else found for grid, found in zip(grids, solved, strict=True)]
    return to_tokens(np.stack(filled)), f"{backtracks:.1f} backtracks a puzzle"


def _solved_mazes(kind: Kind, questions: Tokens) -> tuple[Tokens, str]:
    found: list[Any] = [maze.solved(question, kind.rows) for question in questions]
    rows = [q if one is None else one for q, one in zip(questions, found, strict=True)]
    cells = (questions != maze.WALL).sum(-1).mean()
    return np.stack(rows), f"at most {cells:.0f} cells a maze"


_SEARCHES: dict[str, Callable[[Kind, Tokens], tuple[Tokens, str]]] = {
    "sudoku": _solved_sudokus,
    "maze": _solved_mazes,
}
