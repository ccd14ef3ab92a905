"""The server of a launch: forks a process for each proxy, and lets both end together."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import selectors
import signal
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.launching.host.parent_watch import PR_SET_PDEATHSIG
from lockstep.launching.warm import Forked
from lockstep.launching.warm.proxy import PROXY, SERVER, address, is_own, receive, send
from lockstep.launching.warm.rank import show_as

_BACKLOG = 128
_ORDER_S = 10.0
"""Seconds that a proxy may take to send its order."""
_ALL = signal.valid_signals()

Fits = Callable[[dict[str, Any]], bool]
"""Whether a process forked from this one would equal a start of its own."""


def listener(name: str) -> socket.socket:
    """The socket of a server, on which proxies may call from now on.

    Raises:
        OSError: this system has no such sockets.
    """
    line = socket.socket(socket.AF_UNIX)
    line.bind(address(name))
    line.listen(_BACKLOG)
    return line


class Server:
    """Takes orders on a socket until this process is killed.

    Args:
        line: socket on which it listens.
        name: name of that socket.
        fits: whether an order can be carried out by a forked process.
    """

    def __init__(self, line: socket.socket, name: str, fits: Fits) -> None:
        self._listener, self._name, self._fits = line, name, fits
        # It has files of all ranks open, which then take their own limits.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing wakes
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, socket.socket] = {}
        for readable in (self._listener, self._wake):
            self._selector.register(readable, selectors.EVENT_READ)

    def serve(self) -> None:
        """Fork processes as long as this one lives.

        Raises:
            Forked: in each of these processes.
        """
        gc.freeze()  # a collection in a forked process would copy all pages that hold objects
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            _, function, *_ = finalizer.peek() or (None, None)
            if getattr(function, "__module__", "") == "torch.library":
                finalizer.atexit = False  # no operator need be taken back before a process ends
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    with contextlib.suppress(BlockingIOError):
                        self._wake.recv(4096)
                    self._reap()
                elif key.fileobj is self._listener:
                    self._take(self._listener.accept()[0])
                elif key.data in self._lines:  # the proxy is gone
                    os.kill(key.data, signal.SIGKILL)
                    self._selector.unregister(key.fileobj)

    def _take(self, line: socket.socket) -> None:
        """Carry out the order of a proxy, or close its line: it then becomes the program itself."""
        line.settimeout(_ORDER_S)
        order, fds = None, []
        with contextlib.suppress(OSError, ValueError):
            order, fds = receive(line) if is_own(line) else (None, [])
        try:
            pid = self._fork(order, fds, line) if order and self._fits(order) else None
        except (OSError, LookupError, TypeError, ValueError):  # no memory, or no such order
            pid = None
        finally:
            for fd in fds:
                os.close(fd)
        if pid is None:
            line.close()
            return
        self._lines[pid] = line
        self._selector.register(line, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):  # it is gone: its line is closed
            handle = os.pidfd_open(pid)
            try:
                send(line, pid, [handle])
            finally:
                os.close(handle)

    def _fork(self, order: dict[str, Any], fds: Sequence[int], line: socket.socket) -> int:
        """Fork a process for an order; its number.

        Raises:
            Forked: in the forked process.
        """
        # Signals wait until the process is set up as its proxy would be.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, _ALL)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return pid
        try:
            duplicates = [os.dup(fd) for fd in fds]
            self._become(order, line)
        except BaseException:
            os._exit(1)
        raise Forked(order, duplicates)

    def _become(self, order: dict[str, Any], line: socket.socket) -> None:
        """In a forked process: become findable, and end with the server and with the proxy."""
        server = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        environment = order["environment"] | {SERVER: self._name}
        show_as(order["argv"], environment | {PROXY: str(order["proxy"])})
        order["environment"] = environment
        # From here on, a search for the processes of the launch finds this one. An earlier search
        # has killed the proxy.
        line.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            if not line.recv(1, socket.MSG_PEEK):
                os._exit(1)
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for other in (line, self._listener, self._wake, self._waker, *self._lines.values()):
            other.close()

    def _reap(self) -> None:
        """Send proxies the exit statuses of their processes."""
        while self._lines:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            line = self._lines.pop(pid, None)
            if line is None:
                continue
            with contextlib.suppress(KeyError):
                self._selector.unregister(line)
            with contextlib.suppress(OSError):
                line.settimeout(_ORDER_S)
                send(line, status)
            line.close()
