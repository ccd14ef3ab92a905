"""What an interpreter and the server say to each other."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
_MAX_FDS = 64


def send(line: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Send a message of JSON, and open files."""
    data = json.dumps(message).encode("utf-8", "surrogateescape")
    data = _LENGTH.pack(len(data)) + data
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = line.sendmsg([data], rights)
    line.sendall(data[sent:])


def receive(line: socket.socket) -> tuple[Any, list[int]]:
    """The next message, and its open files; None at the end."""
    data, ancillary, _, _ = line.recvmsg(_LENGTH.size, socket.CMSG_LEN(_MAX_FDS * 4))
    fds = array.array("i")
    for level, kind, rights in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    if len(data) < _LENGTH.size:
        return None, []
    (missing,) = _LENGTH.unpack(data)
    parts = []
    while missing and (part := line.recv(missing)):
        parts.append(part)
        missing -= len(part)
    return json.loads(b"".join(parts).decode("utf-8", "surrogateescape")), list(fds)


def inherited() -> list[int]:
    """The open files that a process started by this one would have, too."""
    fds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                fds.append(int(name))
        except OSError:  # the folder itself, closed by now
            continue
    return sorted(fds)
