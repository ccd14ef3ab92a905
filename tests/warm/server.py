"""Forks processes that have torch and Lockstep imported; see the package's docstring."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
import warnings
from typing import Any

import protocol

_PRELOADED = (
    "torch.distributed.run", "pydantic.type_adapter", "lockstep.cli.main",
    "lockstep.commands.train", "lockstep.commands.evaluate", "lockstep.commands.verify",
    "lockstep.commands.chaos.command", "lockstep.commands.doctor.command",
    "lockstep.recipes.digits", "lockstep.recipes.quantum.commands", "lockstep.recipes.ufs.task",
    "lockstep.recipes.ufs.cli", "lockstep.recipes.sketched.conversion",
)  # fmt: skip
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_FIRST_FREE_FD = 512
_PR_SET_PDEATHSIG = 1


class Server:
    """Takes orders on a socket until its standard input ends."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._wake, wake = socket.socketpair()
        self._wake.setblocking(False)
        wake.setblocking(False)
        self._waker = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno())
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, socket.socket] = {}
        for readable in (self._listener, self._wake, sys.stdin.buffer):
            self._selector.register(readable, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Fork processes; what one of them is to do, in that process, or None in the end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin.buffer:
                    for pid in self._lines:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                    self._reap()
                elif key.fileobj is self._listener:
                    order = self._take(self._listener.accept()[0])
                    if order is not None:
                        return order
                elif key.data in self._lines:  # the interpreter that stands for it is gone
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGKILL)
                    self._selector.unregister(key.fileobj)

    def _take(self, line: socket.socket) -> dict[str, Any] | None:
        order, fds = protocol.receive(line)
        if order is None or not _is_like_ours(order["environment"]):
            for fd in fds:
                os.close(fd)
            line.close()
            return None
        pid = os.fork()
        if pid == 0:
            line.detach()  # freed, it would close whatever has its number by then
            _become(order, fds)
            return order
        for fd in fds:
            os.close(fd)
        self._lines[pid] = line
        self._selector.register(line, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):
            protocol.send(line, pid)
        return None

    def _reap(self) -> None:
        while self._lines:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            line = self._lines.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(line)
            with contextlib.suppress(OSError):
                protocol.send(line, status)
            line.close()


def _is_like_ours(environment: dict[str, str]) -> bool:
    """Whether what an interpreter takes from its environment at the start is as here."""
    names = {name for name in {**environment, **os.environ} if name.startswith("PYTHON")}
    names = (names | set(_THREADS)) - {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS"}
    return all(environment.get(name) == os.environ.get(name) for name in names)


def _become(order: dict[str, Any], fds: list[int]) -> None:
    """Give this process, which was just forked, the place of the interpreter that asked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for signum in order["ignored"]:
        signal.signal(signum, signal.SIG_IGN)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE_FD) for fd in fds]
    os.closerange(0, _FIRST_FREE_FD)
    for fd, number in zip(high, order["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    os.sched_setaffinity(0, order["cores"])
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = _text_stream(number)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed()


def _text_stream(number: int) -> io.TextIOWrapper | None:
    """As an interpreter opens its standard files."""
    try:
        raw = io.FileIO(number, "rb" if number == 0 else "wb", closefd=False)
    except OSError:  # it was started without it
        return None
    if number == 0:
        return io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8")
    is_direct = number == 2 or bool(os.environ.get("PYTHONUNBUFFERED"))
    return io.TextIOWrapper(
        raw if is_direct else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding="utf-8",
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=raw.isatty() or number == 2,
        write_through=is_direct,
    )


def _run(order: dict[str, Any]) -> None:
    """Run what the interpreter was started with, as its main program."""
    import numpy as np

    from lockstep.launchers.rank.early import prepare

    np.random.seed()
    executable, *arguments = order["argv"]
    sys.orig_argv = [executable, *arguments]
    here, site = os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "site")
    sys.path.remove(here)
    more = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != site]
    sys.path[:0] = more
    options = os.environ.get("PYTHONWARNINGS", "").split(",")
    warnings._processoptions([o for o in options if o])  # type: ignore[attr-defined]
    prepare()
    if arguments[0] == "-m":
        sys.argv = [arguments[1], *arguments[2:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        program = types.ModuleType("__main__")
        sys.modules["__main__"] = program
        exec(compile(arguments[1], "<string>", "exec"), vars(program))
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def _status(order: dict[str, Any]) -> int:
    """Run it; the exit code it ends with."""
    try:
        try:
            _run(order)
        except SystemExit:
            raise
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 1
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    return 0


def _end(status: int) -> None:
    """End as an interpreter does, but for freeing modules one by one, which takes 0.2 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    import importlib

    for _name in _PRELOADED:
        importlib.import_module(_name)
    _server = Server(sys.argv[1])
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be forked along"
    print("ready", flush=True)
    _order = _server.serve()
    if _order is not None:
        _end(_status(_order))
