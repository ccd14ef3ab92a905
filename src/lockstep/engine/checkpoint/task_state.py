"""State of a task's own (`Task.state_dict`), between the task and a checkpoint."""

from __future__ import annotations

import hashlib
import json
import traceback
from typing import Any

from torch import Tensor

from lockstep.engine.checkpoint.optimizer_state import is_savable
from lockstep.engine.step.flat import tensor_digest
from lockstep.engine.task import Task
from lockstep.errors import CheckpointError, LockstepError, TaskError


def capture_task(task: Task) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of a task's state: its tensors, on the CPU, and its other values as plain JSON.

    Raises:
        TaskError: `state_dict` raises an exception, its result is no dict by name, or a value is
            neither tensor nor JSON.
    """
    where = f"{type(task).__name__}.state_dict"
    try:
        state = task.state_dict()
    except LockstepError:
        raise
    except Exception as error:
        raise TaskError(_raised(where, error)) from None
    if not (isinstance(state, dict) and all(isinstance(name, str) for name in state)):
        raise TaskError(f"{where}: must return a dict with names as keys")
    tensors, values = {}, {}
    for name, value in state.items():
        if isinstance(value, Tensor) and is_savable(value):
            tensors[name] = value.detach().to("cpu", copy=True)
            continue
        try:
            values[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError):
            raise TaskError(
                f"{where}: {name!r} is a {type(value).__name__}; values must be dense tensors of "
                "numbers, or what JSON can hold"
            ) from None
        key = _other_key(value)
        if key is not None:
            raise TaskError(
                f"{where}: {name!r} has the key {key}, of which JSON would make text; keys must "
                "be text already"
            )
    return tensors, values


def check_task_state(task: Task) -> None:
    """Make sure that a task's state can be saved, and that the task says how to load it.

    Raises:
        TaskError: naming what is missing or cannot be saved.
    """
    kind = type(task)
    saves = kind.state_dict is not Task.state_dict
    if saves and kind.load_state_dict is Task.load_state_dict:
        raise TaskError(
            f"{kind.__name__}.load_state_dict: is missing; {kind.__name__}.state_dict saves state "
            "that a resumed run has to load"
        )
    capture_task(task)


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
        where = f"{type(task).__name__}.load_state_dict"
        raise CheckpointError(_raised(where, error)) from None


def task_digests(task: Task) -> dict[str, str]:
    """SHA-256 of each part of a task's state, by name."""
    tensors, values = capture_task(task)
    digests = {f"task state {n}": tensor_digest(n, t).hex() for n, t in tensors.items()}
    for name, value in values.items():
        text = json.dumps(value, sort_keys=True).encode()
        digests[f"task state {name}"] = hashlib.sha256(text).hexdigest()
    return digests


def _raised(where: str, error: Exception) -> str:
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{where}: raised an exception\n{trace}"


def _other_key(value: Any) -> str | None:
    """A key that is no text, of dicts in what JSON can hold; None if there is none."""
    if isinstance(value, dict):
        others = [repr(key) for key in value if not isinstance(key, str)]
        return others[0] if others else _other_key([*value.values()])
    if isinstance(value, (list, tuple)):
        return next((key for key in map(_other_key, value) if key is not None), None)
    return None
