"""The network connections of a library that gives no access to them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

_TABLE = Path("/proc/self/fd")


class Connections:
    """The TCP connections opened between `begin` and `end`, which can be shut down.

    Without /proc there are none.

    Args:
        host: address of this process's end of the connections; those of other addresses do not
            count.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._before: set[tuple[int, int]] = set()
        self._own: set[tuple[int, int]] | None = set()

    def begin(self) -> None:
        """Count the connections that are opened from now on."""
        self._before, self._own = self._open(), None

    def end(self) -> None:
        """Count no connections that are opened from now on."""
        self._own = self._open() - self._before

    def have_closed(self) -> bool:
        """Whether some of them are there no longer; costs a system call for each of them."""
        own = self._own
        return own is not None and not all(_inode(fd) == inode for fd, inode in own)

    def shut_down(self) -> None:
        """Have both ends of the connections see them closed; threads that wait for data wake up."""
        own = self._own
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
    """What tells the socket of a descriptor from all others; None if it is closed or no socket."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None
