"""The groups of a maze dataset: a maze, in training with some of its symmetric ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np

from lockstep.errors import ConfigError
from lockstep.recipes.hrm.data.csv_source import DEFAULT_COUNT, chosen
from lockstep.recipes.hrm.data.dihedral import NUM_SYMMETRIES, transformed
from lockstep.recipes.hrm.data.draws import Use, keyed
from lockstep.recipes.hrm.data.maze.generate import LEAST_LENGTH, mazes
from lockstep.recipes.hrm.data.maze.grid import SIDE, VOCAB_SIZE, Maze, common_form
from lockstep.recipes.hrm.data.maze.table import read_mazes
from lockstep.recipes.hrm.data.request import (
    Group,
    NamesIdentifier,
    OptionError,
    Options,
    Source,
    asked,
)
from lockstep.recipes.hrm.data.sample import Pairs
from lockstep.recipes.hrm.data.writer import Puzzle


def maze_source(options: Options) -> Source:
    """Mazes that are made, or chosen from CSV files.

    The least length of the path is that of the published mazes, in proportion to the cells.

    Raises:
        ConfigError: more augmentations are asked for than there are, or more mazes.
        DataError: a CSV file is missing or damaged.
    """
    num_augment = asked(options.augment, NUM_SYMMETRIES - 1)
    if num_augment >= NUM_SYMMETRIES:
        raise OptionError("augment", num_augment, f"a maze has {NUM_SYMMETRIES - 1} symmetric ones")
    found: Mapping[str, Iterable[Pairs]]
    if options.csv:
        lists = _from_csv(options)
        found, total = lists, sum(map(len, lists.values()))
        cells = lists["train"][0].questions.shape[1]
    else:
        side = asked(options.size, SIDE)
        found, total = _made(side, options)
        cells = side**2

    def groups(_: NamesIdentifier) -> Iterator[Group]:
        for split, pairs in found.items():
            for number, pair in enumerate(pairs):
                generator = keyed(options.seed, Use.AUGMENT, number)
                count = num_augment if split == "train" else 0
                yield split, list(_group(pair, count, generator))

    return Source(VOCAB_SIZE, cells, total, groups)


def _made(side: int, options: Options) -> tuple[dict[str, Iterable[Pairs]], int]:
    train = asked(options.train, DEFAULT_COUNT)
    test = asked(options.test, DEFAULT_COUNT)
    least = max(2, LEAST_LENGTH * side**2 // SIDE**2)
    return {
        "train": islice(mazes(options.seed, Use.TRAIN, 0, side, least), train),
        "test": islice(mazes(options.seed, Use.TEST, train, side, least), test),
    }, train + test


def _from_csv(options: Options) -> dict[str, list[Pairs]]:
    def read(path: Path) -> Iterator[Pairs]:
        return read_mazes(path, asked(options.rating, 0))

    def divide(pairs: Iterator[Pairs]) -> Iterator[tuple[str, Pairs]]:
        seen = set()
        for pair in pairs:
            form = common_form(_square(pair.questions[0]))
            if form not in seen:
                seen.add(form)
                yield "train" if len(seen) <= num_train else "test", pair

    num_train = asked(options.train, DEFAULT_COUNT)
    found = chosen(options, read, divide)
    sizes = {pair.questions.shape[1] for pairs in found.values() for pair in pairs}
    if len(sizes) > 1 or (options.size and sizes != {options.size**2}):
        raise ConfigError(
            f"--csv {options.csv}: mazes of {sorted(sizes)} cells: must be of one size, that of "
            "--size if it is given"
        )
    return found


def _group(pair: Pairs, num_augment: int, generator: np.random.Generator) -> Iterator[Puzzle]:
    """The maze and different symmetric ones; none has an identifier of its own."""
    question, answer = _square(pair.questions[0]), _square(pair.answers[0])
    others = 1 + generator.permutation(NUM_SYMMETRIES - 1)[:num_augment]
    for number in [0, *others.tolist()]:
        inputs, labels = (transformed(grid, number).reshape(1, -1) for grid in (question, answer))
        yield Puzzle(0, inputs, labels)


def _square(tokens: Maze) -> Maze:
    side = round(len(tokens) ** 0.5)
    return tokens.reshape(side, side)
