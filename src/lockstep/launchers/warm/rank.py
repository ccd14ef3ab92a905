"""A forked process in the place of the interpreter that its stand-in was to be."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import io
import os
import random
import resource
import runpy
import signal
import sys
import types
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

from lockstep.allocation import collect_as_usual, use_large_pages
from lockstep.launchers.rank.early import prepare
from lockstep.launchers.warm.ending import end
from lockstep.launchers.warm.forked import Forked
from lockstep.launchers.warm.stand_in import limit_numbers


def run(forked: Forked) -> NoReturn:
    """Be a process of one's own, run its program, and end.

    Args:
        forked: what was raised in this process.
    """
    order, fds, known = forked.order, forked.fds, set(sys.modules)
    del forked
    _take_files(order["fds"], fds)
    _take_limits(order)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    _open_streams()
    _forget()
    _take_signals(order)
    end(_status(order["argv"]), known)


def _take_files(numbers: list[int], fds: list[int]) -> None:
    """Have the open files of the stand-in under their numbers, and no others."""
    first = max(2, *numbers, *fds) + 1
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, first) for fd in fds]
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in high:
            with contextlib.suppress(OSError):  # the folder itself, closed by now
                os.close(fd)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _take_limits(order: dict[str, Any]) -> None:
    """Hard limits are equal, or there would have been no fork."""
    for number, soft in zip(limit_numbers(), order["limits"], strict=True):
        resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))
    os.umask(order["umask"])
    os.sched_setaffinity(0, order["cores"])


def _open_streams() -> None:
    """Open the standard files as an interpreter does."""
    old = sys.__stdin__
    encoding, errors = (old.encoding, old.errors or "strict") if old else ("utf-8", "strict")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, name, encoding, "backslashreplace" if number == 2 else errors)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _stream(number: int, name: str, encoding: str, errors: str) -> io.TextIOWrapper | None:
    """One of them; see `create_stdio` in CPython's pylifecycle.c."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    is_direct = number > 0 and is_unbuffered
    try:
        raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
    except OSError:  # it was started without it
        return None
    raw.name = f"<{name}>"
    buffer: Any = raw
    if not is_direct:
        buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
    stream = io.TextIOWrapper(
        buffer,
        encoding,
        errors,
        newline="\n",
        line_buffering=not is_unbuffered and (number == 2 or raw.isatty()),
        write_through=is_unbuffered,
    )
    stream.mode = "w" if number else "r"  # type: ignore[misc]
    return stream


def _forget() -> None:
    """Be as an interpreter that begins: what differs from one to the next, and what was changed."""
    import multiprocessing

    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    sys.excepthook = sys.__excepthook__
    use_large_pages()  # as `import lockstep` has done in the server
    collect_as_usual()
    atexit.unregister(gc.freeze)


def _take_signals(order: dict[str, Any]) -> None:
    """Handle, ignore and block signals as an interpreter that the stand-in had become.

    From here on they come.
    """
    ignored = set(order["ignored"])
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        usual = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        if signum in (signal.SIGPIPE, signal.SIGXFSZ):
            usual = signal.SIG_IGN
        wanted = signal.SIG_IGN if signum in ignored else usual
        # Handlers of faulthandler, which Python does not know as its own, stay.
        if signal.getsignal(signum) not in (wanted, None):
            signal.signal(signum, wanted)
    prepare()
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])


def _status(argv: list[str]) -> int:
    """Run what `python` is started with, as its main program.

    Returns:
        The exit code that it ends with; negative for a signal.
    """
    try:
        try:
            _run(argv)
        except SystemExit:
            raise
        except BaseException as error:
            trace = error.__traceback__
            for _ in range(3):  # frames of this file
                trace = trace.tb_next if trace else None
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    return 0


def _run(argv: list[str]) -> None:
    executable, *arguments = argv
    sys.orig_argv = [executable, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    if arguments[0] == "-m":
        _module(arguments)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        _search_first("")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    else:
        _script(arguments)


def _module(arguments: list[str]) -> None:
    for name in (arguments[1], f"{arguments[1]}.__main__"):
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # it is run, not imported
    sys.argv = ["-m", *arguments[2:]]
    _search_first(os.getcwd())
    runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # what -m calls


def _script(arguments: list[str]) -> None:
    path = arguments[0]
    sys.argv = arguments
    _search_first(os.path.dirname(os.path.realpath(path)))
    main = vars(sys.modules["__main__"])
    main.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, main)


def _search_first(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)
