"""Worker processes that fetch ahead, and files that any one of many processes makes.

When a worker of a `DataLoader` dies, torch raises an exception from a handler of SIGCHLD, wherever
the main thread is: in a collective, or half-way through the optimizer. Here the handler is deferred
until the next batch is fetched, where an exception counts as the task's. It is restored when the
training ends, not earlier: signals of abandoned workers come late.

Shared files are assigned to no process: each one makes those that no other is making, and then
waits for the rest. So the number of processes does not matter, nor whether they know of each other.
If a process dies, another one makes its file.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar

import torch.utils.data
from torch.utils.data import DataLoader

from lockstep.config.files import open_regular, temporary_beside
from lockstep.errors import DataError, file_errors

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1


def fetched(loader: DataLoader[Any], user: object) -> Generator[Any, None, None]:
    """The batches of a loader that has worker processes.

    Args:
        loader: loader of the batches.
        user: object that is passed to `release` when no more batches will be fetched.

    Raises:
        RuntimeError: a worker has died.
    """
    loader.worker_init_fn = _end_with_rank
    batches = iter(loader)  # starts the workers, and installs torch's handler with the first
    handler = _deferred_handler()
    handler.users.add(id(user))
    while True:
        try:
            batch = handler.let_in(batches)
        except StopIteration:
            return
        yield batch


def release(user: object) -> None:
    """Restore the original handler of SIGCHLD, unless other users still fetch."""
    handler: object = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, _Deferred):
        handler.leave(user)


class _Deferred:
    """A signal handler that forwards its signal to another handler only during `let_in`.

    Attributes:
        users: ids of the objects that fetch.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self.users: set[int] = set()
        self._is_open = self._is_pending = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self._is_open and not _is_in_destructor(frame):
            self._handler(signum, frame)
        else:
            self._is_pending = True

    def leave(self, user: object) -> None:
        """Remove a user; after the last one, restore the original handler."""
        self.users.discard(id(user))
        if self.users or threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGCHLD, self._handler)
        if self._is_pending:
            self._is_pending = False
            with suppress(RuntimeError):  # torch's, about a worker that is no longer needed
                self._handler(signal.SIGCHLD, None)

    def let_in(self, batches: Iterator[T]) -> T:
        """The next of `batches`; pending signals are forwarded first."""
        self._is_open = True
        try:
            if self._is_pending:
                self._is_pending = False
                self._handler(signal.SIGCHLD, None)
            return next(batches)
        except (OSError, EOFError) as error:
            if "DataLoader worker process" in str(error):  # the dataset raised it there
                raise
            # Batches are in memory that the worker sends, and the worker may just have died.
            if callable(self._handler):
                self._handler(signal.SIGCHLD, None)
            message = "the connection to a worker process of the data loader broke; it has died"
            raise RuntimeError(message) from error
        finally:
            self._is_open = False


def _deferred_handler() -> _Deferred:
    """The process's handler of SIGCHLD, deferred from now on.

    Outside of the main thread, torch installs no handler: it then checks its workers every five
    seconds while it waits for a batch.
    """
    present = signal.getsignal(signal.SIGCHLD)
    if isinstance(present, _Deferred):
        return present
    deferred = _Deferred(present)
    if callable(present) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, deferred)
    return deferred


def _is_in_destructor(frame: FrameType | None) -> bool:
    """Whether an exception raised in a frame would only be printed, since a `__del__` called it."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _end_with_rank(_: int) -> None:
    """Let the kernel end this worker with its rank.

    A worker has copies of the rank's sockets and pipes, whose end shows the others that the rank
    has died. By themselves, torch's workers notice that within five seconds.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def hide_worker() -> None:
    """Let this worker process look like a rank: a stream would leave samples to other workers."""
    torch.utils.data._utils.worker._worker_info = None


def share_out(folder: Path, names: list[str], make: Callable[[int, Path], None]) -> list[Path]:
    """Make missing files, each in one of the processes that call this.

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
    with file_errors(DataError, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(folder / "lock", os.O_RDWR | os.O_CREAT), "r+b") as lock:
            for wait in (False, True):
                for number, path in enumerate(paths):
                    if not path.exists():
                        _make(lock, number, path, make, wait)
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
