"""A task with another config than it was made with, or with one that notes what is read of it."""

from __future__ import annotations

import inspect

from lockstep.config import TrainConfig
from lockstep.engine.task.asked import Asked, asked_of, plain, watched
from lockstep.engine.task.task import Task, check_config
from lockstep.errors import TaskError


def with_config(task: Task, config: TrainConfig) -> Task:
    """The task with another config; made anew if it may have used its present one when it was made.

    Raises:
        TaskError: `config` is not of the task's own config class; or the task would have to be
            made anew, and its `__init__` takes something else than `config`.
    """
    kind = type(task)
    check_config(kind, config)
    if plain(config) == plain(task.config):
        return task
    if kind.__init__ is not Task.__init__:
        anew = made_anew(task, config)
        if anew is not None:
            return anew
        own = kind.Config.model_fields.keys() - TrainConfig.model_fields.keys()
        changed = sorted(k for k in own if getattr(config, k) != getattr(task.config, k))
        if changed:
            key = changed[0]
            raise TaskError(
                f"{key}={getattr(config, key)}: {kind.__name__}.__init__ may have used "
                f"{key}={getattr(task.config, key)} already; let it take just the config, "
                "`def __init__(self, config=None)`, so that the task can be made anew"
            )
    task.config = config
    return task


def made_anew(task: Task, config: TrainConfig) -> Task | None:
    """Another task of the same class; None if its `__init__` takes something else than `config`."""
    kind = type(task)
    takes = [*inspect.signature(kind).parameters]
    return kind(config) if takes == ["config"] else None


def observed(task: Task, config: TrainConfig) -> Task:
    """As `with_config`, and the task's config notes whether its code asks where the run ends.

    Raises:
        TaskError: see `with_config`.
    """
    if asked_of(task.config) is not None and config == plain(task.config):
        return task
    asked = Asked()
    seen = watched(config, asked)
    made = with_config(task, seen)
    if made is task and type(task).__init__ is not Task.__init__:
        # It has read the config it was made with, and nobody knows what of it.
        asked.add([f"{type(task).__name__}.__init__ (made by a script)"])
    made.config = seen
    return made
