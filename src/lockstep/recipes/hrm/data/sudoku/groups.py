"""The groups of a Sudoku dataset: a puzzle, in training with augmentations of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np

from lockstep.recipes.hrm.data.csv_source import DEFAULT_COUNT, chosen
from lockstep.recipes.hrm.data.draws import Use, keyed
from lockstep.recipes.hrm.data.request import Group, NamesIdentifier, Options, Source, asked
from lockstep.recipes.hrm.data.sample import Pairs
from lockstep.recipes.hrm.data.sudoku.board import Board, board_of, draw_symmetries, to_tokens
from lockstep.recipes.hrm.data.sudoku.generate import Wanted, puzzles
from lockstep.recipes.hrm.data.sudoku.split import SolutionSplit
from lockstep.recipes.hrm.data.sudoku.table import read_puzzles
from lockstep.recipes.hrm.data.writer import Puzzle

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
