"""How ranks get a task that is in their parent's memory: by the name of its class, or as a copy.

A copy is a pickle, and unpickling runs code. So it is never read from a named file or a network: it
lies in anonymous memory (or an unlinked file) of the parent, and ranks inherit its descriptor FD.
Only the parent can have written what is there. A rank that gets a copy is started as
`python -m lockstep.launching.transfer FD`.
"""

from __future__ import annotations

import ast
import inspect
import io
import mmap
import os
import pickle
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

from lockstep.config import TrainConfig
from lockstep.data.random import kept_generators
from lockstep.engine.audit.hidden_state import hidden_state
from lockstep.engine.task import Task
from lockstep.errors import LaunchError, LockstepError, TaskError, shortened
from lockstep.launching.api import Session, leave, run
from lockstep.launching.systems import recipe_of
from lockstep.launching.targets import make_task

_MAIN = "globals of __main__"
"""What stands in a copy for the global variables of `__main__`."""

_MOST_LEVELS = 8


def target_of(task: Task, resume: bool = False) -> tuple[str, str]:
    """The target whose class, made with the task's config, gives this very task.

    Args:
        task: the task.
        resume: whether to ignore its `state_dict`, since a checkpoint replaces it.

    Returns:
        The target, or an empty text and the reason why there is none.
    """
    kind = type(task)
    recipe = recipe_of(kind)
    target = recipe or _file_target(kind)
    if not target:
        where = "at the top level of a script, or of a module outside of packages"
        return "", f"{kind.__qualname__} is not a class {where}"
    if not _is_of_its_config(task, resume):
        return "", f"this {kind.__qualname__} holds more than its config makes of it"
    return target, ""


@contextmanager
def copied(task: Task, config: TrainConfig) -> Iterator[int]:
    """A copy of a task and its config in anonymous memory, as long as the context lasts.

    Yields:
        The descriptor of that memory, which processes may inherit.

    Raises:
        TaskError: something that the task holds cannot be pickled; the message has its name.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump((task, config))
    except Exception as error:  # a `__reduce__` of the user's may raise anything
        path, reason = _culprit("task", task, error)
        raise TaskError(
            f"{path}: cannot be copied to the ranks ({reason}); make it where it is used, in "
            "build_model, dataset or loss, or leave it out by a __getstate__ of its class"
        ) from None
    fd = _anonymous_file()
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(buffer.getbuffer())
        del buffer
        yield fd
    finally:
        os.close(fd)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it comes without types
    """Copies functions of `__main__` so that they share the global variables of the rank's.

    By itself, cloudpickle gives them a namespace of their own, where the engine would not find a
    counter that batches change.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # What cloudpickle keeps of the namespace of a function, here one that is not empty.
        self._main = {"__name__": "__main__"}
        self.globals_ref[id(vars(sys.modules["__main__"]))] = self._main

    def persistent_id(self, value: object) -> str | None:
        return _MAIN if value is self._main else None


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("lockstep-task")
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


def _file_target(kind: type[Task]) -> str:
    """`file.py:Class`, if ranks get this class by importing that file; else an empty text."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    # A module of a package may import its neighbours relative to itself.
    if not file or not file.endswith(".py") or getattr(module, "__package__", None):
        return ""
    path, name = Path(file).resolve(), kind.__qualname__
    functions = [value for value in vars(kind).values() if inspect.isfunction(value)]
    try:
        codes = [function.__code__.co_filename for function in functions]
        is_its = not codes or any(map(path.samefile, codes))  # and not of a prompt in it
        is_from_there = is_its and vars(module).get(name) is kind
        body = ast.parse(path.read_bytes()).body if is_from_there else []
    except (OSError, ValueError, SyntaxError):  # such as the cell of a notebook
        return ""
    # A class below `if __name__ == "__main__"` is not there for who imports the file.
    is_at_top = any(isinstance(node, ast.ClassDef) and node.name == name for node in body)
    return f"{path}:{name}" if is_at_top else ""


def _is_of_its_config(task: Task, resume: bool) -> bool:
    """Whether the class, called with the config alone, gives a task like this one."""
    kind = type(task)
    if [*inspect.signature(kind).parameters] not in ([], ["config"]):
        return False
    try:
        with kept_generators():
            fresh = make_task(kind, task.config)
            if resume:
                fresh.load_state_dict(task.state_dict())
    except Exception:
        return False
    try:
        return bool(cloudpickle.dumps(vars(task)) == cloudpickle.dumps(vars(fresh)))
    except Exception:  # it cannot be copied anyway
        return hidden_state({"task": task}) == hidden_state({"task": fresh})


def _culprit(
    path: str, value: object, error: Exception, within: tuple[object, ...] = ()
) -> tuple[str, str]:
    """The innermost part of a value that cannot be pickled, and why."""
    within = (*within, value)
    for name, part in _parts(value) if len(within) < _MOST_LEVELS else ():
        if any(part is outer for outer in within):
            continue
        try:
            _Pickler(io.BytesIO()).dump(part)
        except Exception as inner:
            place = name if name.startswith("global ") else path + name
            return _culprit(place, part, inner, within)
    reason = str(error).partition("\n")[0] or type(error).__name__
    return path, shortened(reason)


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif inspect.ismethod(value):
        yield "", value.__func__
    elif inspect.isfunction(value):
        outside = inspect.getclosurevars(value)
        yield from ((f".{name}", part) for name, part in outside.nonlocals.items())
        yield from ((f"global {name}", part) for name, part in outside.globals.items())
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", part) for name, part in vars(value).items())
        if not isinstance(value, type):
            yield "", type(value)


class _Unpickler(pickle.Unpickler):
    """Gives functions of the parent's `__main__` the global variables of this one's."""

    def persistent_load(self, name: Any) -> dict[str, Any]:
        if name != _MAIN:
            raise pickle.UnpicklingError(f"unknown persistent id {name!r}")
        return vars(sys.modules["__main__"])


def received(fd: int) -> tuple[Task, TrainConfig]:
    """The task and the config that the parent has put into anonymous memory.

    Raises:
        LaunchError: the descriptor is not one of anonymous memory, or what is there cannot be
            rebuilt here.
    """
    try:
        about = os.fstat(fd)
    except OSError as error:
        raise LaunchError(f"descriptor {fd}: {error.strerror}; call lockstep.launch") from None
    # A file that has a name may have been written by anybody, and unpickling it would run their
    # code. Memory that has none can only have come from the process that this one was started by.
    if about.st_nlink or about.st_uid != os.geteuid():
        raise LaunchError(
            f"descriptor {fd}: is not memory of the program that called lockstep.launch; a task is "
            "read from nowhere else"
        )
    # Mapped, since all ranks share one offset in the file.
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory:
        try:
            task, config = _Unpickler(io.BytesIO(memory)).load()
        except Exception as error:
            raise LaunchError(
                f"the task cannot be rebuilt in a rank: {type(error).__name__}: {error}"
            ) from error
    return task, config


def main(fd: int) -> None:
    """Train as a rank of the launch."""
    session = Session.from_env()
    if session is None:
        raise LaunchError("this module is for ranks that lockstep.launch starts; call that")
    session.extend_search_path()
    # Classes of the parent's script name this module as theirs.
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        run(*received(fd), session)
    except LockstepError as error:
        leave(error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
