"""The proxy of a process that a warm server forks: `proxy.py SERVER PROGRAM ARGUMENTS…`.

The process gets everything that this one was started with: arguments, environment, folder, open
files, cores, limits and ignored signals. This one forwards signals to it; both end in the same way,
and neither outlives the other. Where the server cannot be reached, or refuses since the process
would differ from a start of its own, this one becomes the program.

This file is run as a script, without site packages and without importing `lockstep`, so that it
costs milliseconds.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

SERVER = "LOCKSTEP_WARM_SERVER"
"""Variable of a forked process: the server, for processes that it starts itself."""

PROXY = "LOCKSTEP_WARM_PROXY"
"""Variable that /proc shows for a forked process, but that the process does not have: the number of
its proxy."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that every interpreter ignores."""

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
MOST_FDS = 200
"""Open files that go in one message; Linux takes 253."""
_ANSWER_S = 120.0
_NO_PROCESS = 70
_STATUS = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd")
"""Lines of /proc/self/status that a process cannot change freely."""


def through_proxy(argv: Sequence[str], server: str) -> list[str]:
    """The command that has a server run `argv`; without a server, `argv` itself."""
    if not server:
        return list(argv)
    return [sys.executable, "-I", "-S", __file__, server, *argv]


def address(server: str) -> str:
    """The address of a server's socket: a name that goes with it, in this network namespace."""
    return f"\0{server}"


def is_own(line: socket.socket) -> bool:
    """Whether the other side of a connection belongs to this user."""
    peer = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(peer)[1] == os.geteuid())


def send(line: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send a message of JSON, and open files."""
    data = json.dumps(message).encode()
    data = _LENGTH.pack(len(data)) + data
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = line.sendmsg([data], rights)
    line.sendall(data[sent:])


def receive(line: socket.socket) -> tuple[Any, list[int]]:
    """The next message, and its open files; None at the end.

    Raises:
        OSError: the line is broken, or its timeout is over.
    """
    data, ancillary, _, _ = line.recvmsg(_LENGTH.size, socket.CMSG_LEN(MOST_FDS * 4))
    fds = array.array("i")
    for level, kind, rights in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    if len(data) < _LENGTH.size:
        return None, list(fds)
    (missing,) = _LENGTH.unpack(data)
    parts = []
    while missing and (part := line.recv(missing)):
        parts.append(part)
        missing -= len(part)
    return (None if missing else json.loads(b"".join(parts))), list(fds)


def surroundings() -> dict[str, Any]:
    """What a process inherits and cannot change; it must be equal in proxy and server."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        status = dict(line.rstrip("\n").partition(":")[::2] for line in file)
    with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
        group = file.read()
    spaces = sorted(os.listdir("/proc/self/ns"))
    return {
        "status": [status.get(name, "") for name in _STATUS],
        "cgroup": group,
        "namespaces": [[name, os.readlink(f"/proc/self/ns/{name}")] for name in spaces],
        "root": list(os.stat("/")[1:3]),
        "encoding": sys.getfilesystemencoding(),  # of the names that an order is made of
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
        "hard_limits": [most for _, most in _limits()],
    }


def hand_over(server: str, argv: Sequence[str]) -> None:
    """Let a process of the server run `argv`, and end as it does; return if none runs it."""
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(address(server))
        if not is_own(line):
            return
        fds = _inherited()
        if len(fds) > MOST_FDS:
            return
        order = _order(argv, fds)
        # The process may be known, and signalled, before there is anything to forward to.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        line.settimeout(_ANSWER_S)
        send(line, order, fds)
        answer, handles = receive(line)
    except (OSError, ValueError):
        answer, handles = None, []
    if not answer or not handles:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        line.close()
        return
    _proxy(line, handles[0], fds)


def _order(argv: Sequence[str], fds: Sequence[int]) -> dict[str, Any]:
    """The message with all that the forked process takes over from this one."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    known = {s: signal.getsignal(s) for s in signal.valid_signals()}
    ignored = [s for s, handler in known.items() if handler is signal.SIG_IGN]
    umask = os.umask(0)
    os.umask(umask)
    return {
        "argv": list(argv),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "fds": list(fds),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [soft for soft, _ in _limits()],
        "umask": umask,
        "ignored": sorted(int(s) for s in ignored if s not in _OF_PYTHON),
        "blocked": sorted(map(int, blocked)),
        "proxy": os.getpid(),
        "surroundings": surroundings(),
    }


def _proxy(line: socket.socket, handle: int, fds: Sequence[int]) -> None:
    """Forward signals to a process until it ends, and end as it does."""

    def forward(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # it has ended
            signal.pidfd_send_signal(handle, signum)

    for signum in _FORWARDED:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    for fd in fds:
        os.close(fd)  # a pipe must end when the process that writes to it does
    line.settimeout(None)
    try:
        status, _ = receive(line)
    except OSError:
        status = None
    if status is None:
        status = int(signal.SIGKILL)  # the server is gone, and its processes with it
    if os.WIFSIGNALED(status):
        _die(os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _die(signum: int) -> None:
    """End by a signal, without a core dump: the process that did the work has its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if signum != signal.SIGKILL:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signum])
    os.kill(os.getpid(), signum)
    os._exit(_NO_PROCESS)


def limit_numbers() -> list[int]:
    """The kinds of limits of a process that this system has, in order."""
    return sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


def _limits() -> list[tuple[int, int]]:
    """Soft and hard limits, in the order of `limit_numbers`."""
    return [resource.getrlimit(number) for number in limit_numbers()]


def _inherited() -> list[int]:
    """The open files that a program started by this process would have, too."""
    fds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                fds.append(int(name))
        except OSError:  # the folder itself, closed by now
            continue
    return sorted(fds)


def main(server: str, argv: list[str]) -> None:
    """Have the server run `argv`, else become it."""
    hand_over(server, argv)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
