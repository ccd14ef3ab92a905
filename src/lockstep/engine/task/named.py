"""What a task names by texts: values that batches may change, buffers set from the data."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from lockstep.engine.task.task import Task
from lockstep.errors import TaskError


def is_scratch(task: Task, path: str) -> bool:
    """Whether a value may change between steps, since the task names it or what it is part of.

    Raises:
        TaskError: `scratch` is no tuple of texts.
    """
    return is_part_of(path, _texts(task, "scratch", "paths", "task.calls"))


def is_part_of(path: str, wholes: Iterable[str]) -> bool:
    """Whether a path is one of some others, or of something that lies inside of one."""
    return any(path == one or path.startswith((f"{one}.", f"{one}[", f"{one}!")) for one in wholes)


def data_buffers(task: Task, model: nn.Module) -> set[str]:
    """The names of the buffers of a task's model that are set from the data, as the task says.

    Raises:
        TaskError: `data_buffers` is no tuple of texts, or one of them is the name of no buffer.
    """
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    found: set[str] = set()
    for pattern in _texts(task, "data_buffers", "names", "mean"):
        named = [name for name in buffers if fnmatchcase(name, pattern)]
        if not named:
            raise TaskError(
                f"{type(task).__name__}.data_buffers: {pattern!r} is the name of no buffer of the "
                f"model; it has {', '.join(buffers) or 'none'}"
            )
        found.update(named)
    return found


def _texts(task: Task, attribute: str, what: str, example: str) -> tuple[str, ...]:
    """The value of a task's attribute that must be a tuple of texts.

    Args:
        task: task that has it.
        attribute: name of the attribute.
        what: what the texts are, for the message.
        example: one of them, for the message.
    """
    texts: object = getattr(task, attribute)
    if not isinstance(texts, tuple) or not all(isinstance(one, str) for one in texts):
        hint = (texts,) if isinstance(texts, str) else (example,)
        raise TaskError(
            f"{type(task).__name__}.{attribute}: must be a tuple of {what}, is {texts!r}; write "
            f"`{attribute} = {hint!r}`"
        )
    return texts
