"""A rank whose task is a copy of its parent's: `python -m lockstep.launching.transferred FD`.

FD is an inherited descriptor of memory that has no name; see `lockstep.launching.transfer`.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import types
from io import BytesIO
from typing import Any

from lockstep.config import TrainConfig
from lockstep.engine.task import Task
from lockstep.errors import LaunchError, LockstepError
from lockstep.launching.front import Session, leave, run
from lockstep.launching.transfer import MAIN


class _Unpickler(pickle.Unpickler):
    """Gives functions of the parent's `__main__` the global variables of this one's."""

    def persistent_load(self, name: Any) -> dict[str, Any]:
        if name != MAIN:
            raise pickle.UnpicklingError(f"unknown persistent id {name!r}")
        return vars(sys.modules["__main__"])


def received(fd: int) -> tuple[Task, TrainConfig]:
    """The task and the config that the parent has left in anonymous memory.

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
            task, config = _Unpickler(BytesIO(memory)).load()
        except Exception as error:
            raise LaunchError(
                f"the task cannot be rebuilt in a rank: {type(error).__name__}: {error}"
            ) from error
    return task, config


def main(fd: int) -> None:
    """Be a rank of the launch."""
    session = Session.from_env()
    if session is None:
        raise LaunchError("this module is for ranks that lockstep.launch starts; call that")
    session.extend_search_path()
    # The module that the parent's classes say they are of.
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        run(*received(fd), session)
    except LockstepError as error:
        leave(error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
