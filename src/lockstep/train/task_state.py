"""State of a task's own (`Task.state_dict`), between the task and a checkpoint."""

from __future__ import annotations

import hashlib
import json
import traceback
from typing import Any

from torch import Tensor

from lockstep.errors import CheckpointError, LockstepError, TaskError, shared
from lockstep.train.flat import tensor_digest
from lockstep.train.optimizer_state import is_savable
from lockstep.train.task import Task


def capture_task(task: Task) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of a task's state: its tensors, on the CPU, and its other values as plain JSON.

    Raises:
        TaskError: the state is no dict by name, or a value is neither tensor nor JSON.
    """
    state = task.state_dict()
    where = f"{type(task).__name__}.state_dict"
    if not (isinstance(state, dict) and all(isinstance(name, str) for name in state)):
        raise TaskError(f"{where}: must return a dict with names as keys")
    tensors, values = {}, {}
    for name, value in state.items():
        if isinstance(value, Tensor) and is_savable(value):
            tensors[name] = value.detach().to("cpu", copy=True)
            continue
        try:
            values[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            raise TaskError(
                f"{where}: {name!r} is a {type(value).__name__}; values must be dense tensors of "
                "numbers, or what JSON can hold"
            ) from None
    return tensors, values


def restore_task(task: Task, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Give a task what `capture_task` took, if there is anything.

    Raises:
        CheckpointError: the task cannot take it.
    """
    if not (tensors or values):
        return
    try:
        task.load_state_dict({**tensors, **values})
    except LockstepError:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        raise shared(
            CheckpointError(f"{type(task).__name__}.load_state_dict: raised an exception\n{trace}")
        ) from None


def task_digests(task: Task) -> dict[str, str]:
    """SHA-256 of each part of a task's state, by name."""
    tensors, values = capture_task(task)
    digests = {f"task state {n}": tensor_digest(n, t).hex() for n, t in tensors.items()}
    for name, value in values.items():
        text = json.dumps(value, sort_keys=True).encode()
        digests[f"task state {name}"] = hashlib.sha256(text).hexdigest()
    return digests
