"""State of a task and of its hooks (`state_dict`), as checkpoints have it."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lockstep.engine.digests import tensor_digest
from lockstep.engine.hook import Hook
from lockstep.engine.optimizer.optimizer_state import is_savable
from lockstep.engine.task import Task
from lockstep.errors import CheckpointError, LockstepError, TaskError

_HOOKS = "hooks/"
"""Prefix of the names of hooks' state."""


class TaskState:
    """The state of a task and of those hooks that every rank runs.

    Attributes:
        task: the task.
        hooks: all its hooks.
        is_driven: whether the body of a user's own loop runs between steps.
    """

    def __init__(self, task: Task, hooks: Sequence[Hook] = (), is_driven: bool = False) -> None:
        self.task = task
        self.hooks = tuple(hooks)
        self.is_driven = is_driven

    @property
    def may_change_model(self) -> bool:
        """Whether the model may change beside the optimizer's steps and forward passes."""
        has_own = type(self.task).after_step is not Task.after_step
        return has_own or any(hook.changes_model for hook in self.hooks)

    @property
    def may_change_optimizer(self) -> bool:
        """Whether the optimizer's state and groups may change beside its steps."""
        return self.may_change_model or any(not hook.first_only for hook in self.hooks)

    @property
    def may_change_data(self) -> bool:
        """Whether code of the user's runs between steps, which may change the training data.

        What runs on the first rank alone may not, and Lockstep's own hooks do not.
        """
        modules = {type(hook).__module__ for hook in self.hooks if not hook.first_only}
        has_own = type(self.task).after_step is not Task.after_step
        return self.is_driven or has_own or bool(modules - {"lockstep.hooks"})

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of all state: its tensors, on the CPU, and its other values as plain JSON.

        Raises:
            TaskError: a `state_dict` raises an exception, its result is no dict by name, or a value
                is neither tensor nor JSON.
        """
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for prefix, owner in self._owners():
            some_tensors, some_values = _captured(owner)
            tensors |= {prefix + name: tensor for name, tensor in some_tensors.items()}
            values |= {prefix + name: value for name, value in some_values.items()}
        return tensors, values

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Load what `capture` returned into task and hooks, if there is anything.

        Raises:
            CheckpointError: one cannot load it, or there is state of a hook that does not exist.
        """
        left = dict(sorted({**tensors, **values}.items()))  # the order in files is not fixed
        for prefix, owner in [*self._owners()][::-1]:  # the task's own names have no prefix
            mine = [name for name in left if name.startswith(prefix)]
            if not prefix and any(name.startswith(_HOOKS) for name in mine):
                name = next(name for name in mine if name.startswith(_HOOKS))
                raise CheckpointError(
                    f"{name}: is state of a hook that {type(self.task).__name__}.hooks does not "
                    "have; go on with the same hooks or start a new run"
                )
            _restore(owner, {name.removeprefix(prefix): left.pop(name) for name in mine})

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part of the state, by name."""
        tensors, values = self.capture()
        digests = {f"task state {n}": tensor_digest(n, t).hex() for n, t in tensors.items()}
        for name, value in values.items():
            text = json.dumps(value, sort_keys=True).encode()
            digests[f"task state {name}"] = hashlib.sha256(text).hexdigest()
        return digests

    def check(self) -> None:
        """Make sure that the state can be saved, and that code exists that loads it.

        Raises:
            TaskError: naming what is missing or cannot be saved.
        """
        for _, owner in self._owners():
            kind = type(owner)
            saves = kind.state_dict not in (Task.state_dict, Hook.state_dict)
            if saves and kind.load_state_dict in (Task.load_state_dict, Hook.load_state_dict):
                raise TaskError(
                    f"{kind.__name__}.load_state_dict: is missing; {kind.__name__}.state_dict "
                    "saves state that a resumed run has to load"
                )
        self.capture()

    def _owners(self) -> Iterator[tuple[str, Task | Hook]]:
        """Owners of state, each with the prefix of its names; the task first."""
        yield "", self.task
        names: list[str] = []
        for hook in self.hooks:
            if not hook.first_only:
                names.append(type(hook).__name__)
                count = names.count(names[-1])
                yield f"{_HOOKS}{names[-1]}{count if count > 1 else ''}/", hook


def _captured(owner: Task | Hook) -> tuple[dict[str, Tensor], dict[str, Any]]:
    where = f"{type(owner).__name__}.state_dict"
    try:
        state = owner.state_dict()
    except LockstepError:
        raise
    except Exception as error:
        raise TaskError(_raised(where, error)) from None
    if not (isinstance(state, dict) and all(isinstance(name, str) for name in state)):
        raise TaskError(f"{where}: must return a dict with names as keys")
    tensors, values = {}, {}
    for name, value in state.items():
        if name.startswith(_HOOKS):
            raise TaskError(f"{where}: {name!r}: names must not begin with {_HOOKS!r}")
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
                f"{where}: {name!r} has the key {key}, which JSON would convert to text; keys "
                "must be text"
            )
    return tensors, values


def _restore(owner: Task | Hook, state: dict[str, Any]) -> None:
    if not state:
        return
    try:
        owner.load_state_dict(state)
    except LockstepError:
        raise
    except Exception as error:
        where = f"{type(owner).__name__}.load_state_dict"
        raise CheckpointError(_raised(where, error)) from None


def _raised(where: str, error: Exception) -> str:
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{where}: raised an exception\n{trace}"


def _other_key(value: Any) -> str | None:
    """A key that is not a string, of dicts in a JSON value; None if there is none."""
    if isinstance(value, dict):
        others = [repr(key) for key in value if not isinstance(key, str)]
        return others[0] if others else _other_key([*value.values()])
    if isinstance(value, (list, tuple)):
        return next((key for key in map(_other_key, value) if key is not None), None)
    return None
