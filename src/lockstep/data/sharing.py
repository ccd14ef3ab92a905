"""Work that must be done once, shared out among all processes that need its results.

No process assigns it: each takes what no other has taken, and in the end waits for the rest. So it
does not matter how many there are, nor whether they know of each other. What a process was making
when it died is made by another one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from lockstep.errors import DataError
from lockstep.files import open_regular, temporary_beside


def share_out(folder: Path, names: list[str], make: Callable[[int, Path], None]) -> list[Path]:
    """Make files that are not there yet, each by one of the processes that call this.

    All must be able to lock files in `folder` (record locks, which network file systems have too).

    Args:
        folder: folder of the files; created if it is not there. Its file `lock` is used for locks.
        names: names of the files.
        make: function of a number and a path that writes file `names[number]` to that path; the
            file gets its name when the function has returned, so no process sees half of it.

    Returns:
        The files, all of them there.

    Raises:
        DataError: the folder cannot be written or locked.
    """
    paths = [folder / name for name in names]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(folder / "lock", os.O_RDWR | os.O_CREAT), "r+b") as lock:
            for wait in (False, True):
                for number, path in enumerate(paths):
                    if not path.exists():
                        _make(lock, number, path, make, wait)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return paths


def _make(
    lock: IO[bytes], number: int, path: Path, make: Callable[[int, Path], None], wait: bool
) -> None:
    """Make one file, unless another process is making it, or (with `wait`) has made it."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, number)
    except (BlockingIOError, PermissionError):  # which of both depends on the system
        if wait:
            raise
        return
    try:
        if not path.exists():
            temporary = temporary_beside(path)
            try:
                make(number, temporary)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    finally:
        fcntl.lockf(lock, fcntl.LOCK_UN, 1, number)
