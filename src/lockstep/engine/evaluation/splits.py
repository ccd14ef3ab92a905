"""The splits that a task evaluates, and what their metrics are called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from lockstep.engine.task import Task
from lockstep.errors import TaskError

T = TypeVar("T")


class Scores(NamedTuple):
    """What the evaluation of a split has found.

    Attributes:
        metrics: numbers by name, `loss` among them.
        arrays: nested lists by name: metrics of more than one number.
    """

    metrics: dict[str, float]
    arrays: dict[str, Any]


_NAME = re.compile(r"(val|test)[A-Za-z0-9_.-]*")


def evaluated_splits(task: Task) -> tuple[str, ...]:
    """The names in `Task.splits`.

    Raises:
        TaskError: they are no such names.
    """
    names: object = task.splits
    where = f"{type(task).__name__}.splits"
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        hint = (names,) if isinstance(names, str) else ("val", "val_ood", "test")
        raise TaskError(f"{where}: must be a tuple of names, is {names!r}; write `splits = {hint}`")
    for name in names:
        if not _NAME.fullmatch(name):
            raise TaskError(
                f"{where}: {name!r}: a name must begin with `val` (evaluated while training) or "
                "`test` (evaluated at the end), and go on with letters, digits, `_`, `-` and `.`; "
                "such as `val_ood`"
            )
        if names.count(name) > 1:
            raise TaskError(f"{where}: {name!r}: comes twice")
    return names


def is_validation(split: str) -> bool:
    """Whether a split is evaluated while training goes on, rather than at the end."""
    return split.startswith("val")


def judged(metrics: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """What `watch` and rules of convergence go by: metrics of `val` by their own names.

    Args:
        metrics: by split and name.

    Returns:
        By name, those of other splits as "split/name".
    """
    return {
        name if split == "val" else f"{split}/{name}": value
        for split, values in metrics.items()
        for name, value in values.items()
    }


def by_split(metrics: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Metrics of validation splits that are called "split/name", by split and name."""
    found: dict[str, dict[str, T]] = {}
    for key, value in metrics.items():
        split, _, name = key.partition("/")
        if is_validation(split):
            found.setdefault(split, {})[name] = value
    return found
