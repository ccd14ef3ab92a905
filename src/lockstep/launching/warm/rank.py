"""A forked process that takes the place of an interpreter, to its end.

The system shows a forked process with the arguments and environment of the one that it was forked
from, unless it asks the kernel to show others. A launch finds its processes by their environment
(`launching.host.processes`), and people by their arguments.

An interpreter frees all modules, one by one. In a forked process this also copies the memory that
they lie in, which it shares with the server. So only those are freed that are its own.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import io
import mmap
import os
import random
import resource
import runpy
import signal
import sys
import threading
import types
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

from lockstep.comm.host import collect_as_usual, use_large_pages
from lockstep.launching.rank.early import prepare
from lockstep.launching.warm import Forked
from lockstep.launching.warm.proxy import limit_numbers

_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_SAME_EXECUTABLE = 0xFFFF_FFFF
_PLACES = {
    "start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46,
    "start_brk": 47, "arg_start": 48, "arg_end": 49, "env_start": 50, "env_end": 51,
}  # fmt: skip
"""Columns of /proc/self/stat, counted from 1 as in its manual page."""


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
            "arg_start", "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


def can_be_shown() -> bool:
    """Whether this system lets a process change what is shown of it; nothing is changed."""
    try:
        _show(_current())
    except (OSError, ValueError, AttributeError):
        return False
    return True


def show_as(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have the system show this process with these arguments and environment variables.

    Raises:
        OSError: it does not, as a kernel without CONFIG_CHECKPOINT_RESTORE.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    name = os.path.basename(argv[0])[:15].encode(errors="surrogateescape")
    libc.prctl(_PR_SET_NAME, name, 0, 0, 0)
    items = [f"{key}={value}" for key, value in environment.items()]
    arguments, variables = _joined(argv), _joined(items)
    size = len(arguments) + len(variables)
    text = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    text.write(arguments + variables)
    start = ctypes.addressof(ctypes.c_char.from_buffer(text))
    places = _current()
    places.arg_start, places.arg_end = start, start + len(arguments)
    places.env_start, places.env_end = start + len(arguments), start + size
    _show(places)
    # The kernel reads it as long as the process lives, so it is never given back.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(text))


def _joined(texts: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def _current() -> _Map:
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        # The name, in parentheses, may hold anything.
        columns = file.read().rpartition(")")[2].split()
    found = {name: int(columns[place - 3]) for name, place in _PLACES.items()}
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype, sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    return _Map(**found, brk=sbrk(0), exe_fd=_SAME_EXECUTABLE)


def _show(places: _Map) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_ulong(ctypes.sizeof(places))
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(places), size, zero):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def end(status: int, known: Collection[str]) -> NoReturn:
    """End this process.

    Args:
        status: exit code; negative for a signal.
        known: names of the modules that came from the server.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    imported = [module for name, module in sys.modules.items() if name not in known]
    for module in (sys.modules["__main__"], *reversed(imported)):
        if isinstance(module, ModuleType):
            _clear(module)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads it
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what extensions have written by the C library
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _clear(module: ModuleType) -> None:
    """Release a module's values, private ones first, so that open files are flushed."""
    values = vars(module)
    names = [name for name in values if name not in ("__builtins__", "__name__")]
    for name in sorted(names, key=lambda name: not name.startswith("_")):
        values[name] = None


def run(forked: Forked) -> NoReturn:
    """Become a process of its own, run its program, and end.

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
    """Take the open files of the proxy, under their numbers, and close all others."""
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
    """Reset what differs from one interpreter to the next, and what the server has changed."""
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
    """Handle, ignore and block signals as an interpreter that the proxy had become.

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
    """Run the arguments of `python` as its main program.

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
