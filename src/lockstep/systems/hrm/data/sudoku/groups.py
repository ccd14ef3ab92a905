"""The groups of a Sudoku dataset: generated puzzles, or those of a public CSV file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.config.parsing import shown
from lockstep.errors import DataError
from lockstep.systems.hrm.data.arrays import Use
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
from lockstep.systems.hrm.data.sudoku.board import (
    Board,
    SolutionSplit,
    are_solutions,
    board_of,
    draw_symmetries,
    to_tokens,
)
from lockstep.systems.hrm.data.sudoku.solver import puzzles
from lockstep.systems.hrm.data.writer import Puzzle

DEFAULT_AUGMENT: Mapping[int, int] = {4: 10, 6: 100, 9: 1000}
"""Augmentations of a puzzle by the size of the board; 1,000 for 9x9 as published."""

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
