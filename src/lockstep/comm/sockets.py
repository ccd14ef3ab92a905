"""The network connections of a library that does not tell which ones are its own."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

_TABLE = Path("/proc/self/fd")


class Connections:
    """The TCP connections opened between `begin` and `end`, which can be shut down.

    Where /proc is not, there are none.
    """

    def __init__(self) -> None:
        self._before: set[tuple[int, int]] = set()
        self._own: set[tuple[int, int]] | None = set()

    def begin(self) -> None:
        """From here on, connections count."""
        self._before, self._own = _open_sockets(), None

    def end(self) -> None:
        """Up to here."""
        self._own = _open_sockets() - self._before

    def shut_down(self) -> None:
        """Have both ends of the connections see them closed; whoever waits for data is woken."""
        present = _open_sockets()
        own = present - self._before if self._own is None else present & self._own
        for fd, _ in own:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> set[tuple[int, int]]:
    """Descriptor and inode of each TCP socket of this process that does not listen.

    A number alone may belong to another socket by the time it is used.
    """
    found = set()
    for name in os.listdir(_TABLE) if _TABLE.exists() else ():
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as opened:
                if opened.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add((int(name), status.st_ino))
    return found
