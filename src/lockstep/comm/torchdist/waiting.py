"""Waiting for transfers of gloo that may never end, and the connections below them.

Gloo does not end a transfer that is partly done when its connection closes
(`Pair::signalException` of gloo/transport/tcp/pair.cc skips those): `wait` then lasts until the
timeout, and so does the destructor of the group. So waits are short here, and between them this
module checks whether the transfer can still end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

_TABLE = Path("/proc/self/fd")


class Connections:
    """The TCP connections opened between `begin` and `end`, which can be shut down.

    Without /proc there are none.

    Attributes:
        are_shut: whether this process has shut them down.

    Args:
        host: address of this process's end of the connections; those of other addresses do not
            count.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._before: set[tuple[int, int]] = set()
        self._own: set[tuple[int, int]] | None = set()
        self.are_shut = False

    def begin(self) -> None:
        """Count the connections that are opened from now on."""
        self._before, self._own, self.are_shut = self._open(), None, False

    def end(self) -> None:
        """Count no connections that are opened from now on."""
        self._own = self._open() - self._before

    def have_closed(self) -> bool:
        """Whether some of them are there no longer; costs a system call for each of them."""
        own = self._own
        return own is not None and not all(_inode(fd) == inode for fd, inode in own)

    def shut_down(self) -> None:
        """Have both ends of the connections see them closed; threads that wait for data wake up."""
        own, self.are_shut = self._own, True
        for fd, inode in self._open() - self._before if own is None else own:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                # By now the descriptor may be that of another socket.
                if _inode(connection.fileno()) == inode:
                    connection.shutdown(socket.SHUT_RDWR)

    def _open(self) -> set[tuple[int, int]]:
        """Descriptor and inode of each connection there is at the moment.

        A descriptor alone may be that of another socket by the time it is used.
        """
        connections = set()
        for fd in map(int, os.listdir(_TABLE) if _TABLE.exists() else ()):
            with contextlib.suppress(OSError):
                inode = _inode(fd)
                if inode is not None and self._is_connection(fd):
                    connections.add((fd, inode))
        return connections

    def _is_connection(self, fd: int) -> bool:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            if duplicate.family != socket.AF_INET or duplicate.type != socket.SOCK_STREAM:
                return False
            # A library may never recover from losing the socket that it listens on.
            listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return not listens and duplicate.getsockname()[0] == self._host


def _inode(fd: int) -> int | None:
    """The inode of a descriptor's socket; None if it is closed or no socket."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


# By the wall clock, as torch waits: if that is set back in the middle of a wait which never ends
# otherwise, the rank's watchdog ends it.
_LOOK = timedelta(seconds=0.2)

Finish = Callable[[Any, Callable[[], bool]], None]
"""`finish` or `finish_message`."""


class LeftBehind(RuntimeError):
    """A transfer was given up.

    Attributes:
        is_stuck: whether its destructor would still wait for it.
    """

    def __init__(self, is_stuck: Callable[[], bool]) -> None:
        super().__init__("a rank died, or has given the group up")
        self.is_stuck = is_stuck


def finish(work: Any, is_in_vain: Callable[[], bool]) -> None:
    """Wait for a collective of gloo; its error is raised.

    Raises:
        LeftBehind: it has not ended, and is not going to.
    """
    while not _ends_soon(work):
        if is_in_vain() and not work.is_completed():
            raise LeftBehind(lambda: not work.is_completed())


def finish_message(work: Any, is_in_vain: Callable[[], bool]) -> None:
    """As `finish`, for a message to or from one rank."""
    # In a thread, since gloo closes all connections when such a wait takes longer than it may.
    ended = threading.Event()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            work.wait()
        except Exception as error:
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=wait, name="message", daemon=True).start()
    while not ended.wait(_LOOK.total_seconds()):
        if is_in_vain() and not ended.is_set():
            raise LeftBehind(lambda: not ended.is_set())
    if errors:
        raise errors[0]


def never_destroy(groups: Iterable[Any]) -> None:
    """Keep process groups until the process ends, and longer than Python keeps anything."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _ends_soon(work: Any) -> bool:
    try:
        work.wait(_LOOK)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # the error may have been that of the time, and the work have ended since
    return True
