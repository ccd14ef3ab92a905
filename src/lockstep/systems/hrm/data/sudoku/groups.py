"""The groups of a Sudoku dataset, from its own puzzles or the public CSV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from lockstep.config.parsing import shown
from lockstep.errors import DataError
from lockstep.systems.hrm.data.arrays import Use, keyed
from lockstep.systems.hrm.data.csv_rows import DEFAULT_COUNT, Pairs, Row, chosen, read_rows
from lockstep.systems.hrm.data.request import Group, NamesIdentifier, Options, Source, asked
from lockstep.systems.hrm.data.sudoku.board import (
    Board,
    SolutionSplit,
    are_solutions,
    board_of,
    draw_symmetries,
    to_tokens,
)
from lockstep.systems.hrm.data.sudoku.solver import Wanted, puzzles
from lockstep.systems.hrm.data.writer import Puzzle

_BLOCK_ROWS = 4096


def read_puzzles(path: Path, board: Board, least_rating: int = 0) -> Iterator[Pairs]:
    """The puzzles of a CSV file, block by block, as grids.

    That a puzzle has no second solution is not checked: it takes a second for some of them.

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
    """The grids of some rows: one look at all of them, another one at those that are wrong."""
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


DEFAULT_AUGMENT: Mapping[int, int] = MappingProxyType({4: 10, 6: 100, 9: 1000})
"""Augmentations of a puzzle by the size of the board; 1,000 for 9x9 as published."""


def sudoku_source(options: Options) -> Source:
    """Puzzles that are made, or chosen from CSV files.

    Augmentations are drawn with replacement, as published: one may be drawn twice.

    Raises:
        ConfigError: the size is none, or there are fewer puzzles than asked for.
        DataError: a CSV file is missing or damaged.
    """
    board = board_of(asked(options.size, 4))
    num_augment = asked(options.augment, DEFAULT_AUGMENT[board.side])
    found: Mapping[str, Iterable[Pairs]]
    if options.csv:
        lists = _from_csv(board, options)
        found, total = lists, sum(map(len, lists.values()))
    else:
        found, total = _made(board, options)

    def groups(_: NamesIdentifier) -> Iterator[Group]:
        for split, pairs in found.items():
            for number, pair in enumerate(pairs):
                generator = keyed(options.seed, Use.AUGMENT, number)
                count = num_augment if split == "train" else 0
                yield split, list(_group(board, pair, count, generator))

    return Source(board.vocab_size, board.cells, total, groups)


def _made(board: Board, options: Options) -> tuple[dict[str, Iterable[Pairs]], int]:
    """Puzzles of both splits, made when they are asked for, and how many there will be."""
    wanted = Wanted(asked(options.clues, 0), asked(options.rating, 0))
    counts = {
        Use.TRAIN: asked(options.train, DEFAULT_COUNT),
        Use.TEST: asked(options.test, DEFAULT_COUNT),
    }
    made = {
        use.name.lower(): (
            Pairs(puzzle.question[None], puzzle.answer[None])
            for puzzle in islice(puzzles(board, options.seed, use, wanted), count)
        )
        for use, count in counts.items()
    }
    return dict(made), sum(counts.values())


def _from_csv(board: Board, options: Options) -> dict[str, list[Pairs]]:
    split = SolutionSplit(board, options.seed)

    def read(path: Path) -> Iterator[Pairs]:
        return read_puzzles(path, board, asked(options.rating, 0))

    def divide(pairs: Iterator[Pairs]) -> Iterator[tuple[str, Pairs]]:
        for pair in pairs:
            yield "test" if split.is_test(pair.answers[0]) else "train", pair

    return chosen(options, read, divide)


def _group(
    board: Board, pair: Pairs, num_augment: int, generator: np.random.Generator
) -> Iterator[Puzzle]:
    """The puzzle and its augmentations; none has an identifier of its own."""
    symmetries = draw_symmetries(board, generator, num_augment)
    questions = np.concatenate([pair.questions, symmetries(pair.questions[0])])
    answers = np.concatenate([pair.answers, symmetries(pair.answers[0])])
    inputs, labels = to_tokens(questions), to_tokens(answers)
    for number in range(len(inputs)):
        yield Puzzle(0, inputs[number : number + 1], labels[number : number + 1])
