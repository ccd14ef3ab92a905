"""Signals to a process that is still starting, before `StopRequest` takes them.

Importing torch takes seconds, and an exception that a signal handler raises in the middle of an
import may come out of an extension module as anything. Before the first step there is nothing to
save, so Ctrl-C then ends the process at once, with one line. This module imports the standard
library only, for it must come before everything slow.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, TracebackType
from typing import NoReturn

NOTHING_SAVED = "stopped before the first step; nothing was saved"

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a process that Ctrl-C has ended."""

_PLACES = ("LOCKSTEP_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "TORCHELASTIC_", "SLURM_STEP_ID")
"""Prefixes of the environment variables with the places of ranks."""

_WARM = "LOCKSTEP_WARM"
"""A variable that users set; see `launching.warm`."""


_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command in order too, unless its parent has set them to be ignored."""


class Interrupted(BaseException):
    """Ctrl-C in a command, SIGTERM or SIGHUP.

    No `KeyboardInterrupt`, which the argument parser swallows.

    Attributes:
        exit_code: exit code of a process that ends for it.
    """

    def __init__(self, signum: int = signal.SIGINT) -> None:
        super().__init__()
        self.exit_code = 128 + signum


class EarlyNotice:
    """A handler that only records that its signal came; `StopRequest` reads it when it begins.

    Attributes:
        came: whether the signal has come.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal."""
        self.came = True


def is_rank() -> bool:
    """Whether a launcher has started this process, according to its environment."""
    return any(name.startswith(_PLACES) and name != _WARM for name in os.environ)


@contextlib.contextmanager
def ending_at_interrupt(before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end this process at once, with one line: for slow imports.

    Only where Ctrl-C would otherwise raise an exception: a program with a handler of its own, a
    notebook and an interactive interpreter keep theirs.

    Args:
        before: function that is called in the signal handler before the process ends.
    """
    previous = signal.getsignal(signal.SIGINT)
    if not _is_ours() or previous not in (signal.default_int_handler, _raise):
        yield
        return
    with _handled(partial(_end, before)):
        yield


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP raise `Interrupted`: for commands.

    Raises:
        Interrupted: one of them came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled(_raise):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], NoReturn]) -> Iterator[None]:
    """Install a handler for Ctrl-C, and in a command for the other signals that end it."""
    previous = {signal.SIGINT: signal.signal(signal.SIGINT, handler)}
    for signum in () if is_rank() else _ENDING:  # a rank is ended by its launcher
        if signal.getsignal(signum) in (signal.SIG_DFL, _raise):  # nohup has SIGHUP ignored
            previous[signum] = signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, one in previous.items():
            signal.signal(signum, one)


def prepare() -> None:
    """Let a script end with one line at a `LockstepError` or, before it trains, at Ctrl-C.

    Both are still raised, and can be caught. A rank also records a preemption notice, which would
    end it otherwise, and stops after its first step.
    """
    if not _is_ours():
        return
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _say
    if is_rank() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, EarlyNotice())


def begin_training() -> None:
    """From here on, Ctrl-C that ends a script is shown with its traceback."""
    if sys.excepthook is _say:
        sys.excepthook = _say_error


def tell_on_each_rank() -> None:
    """From here on, an error of the script's own is told by each rank that raises it.

    Before the ranks have met, all raise the same error; after that, one may be the only one.
    """
    if getattr(sys.excepthook, "func", None) is not _say_alone:
        sys.excepthook = partial(_say_alone, sys.excepthook)


def _is_ours() -> bool:
    """Whether this is the main thread of a program without a prompt."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and not hasattr(sys, "ps1") and not sys.flags.interactive


def _end(before: Callable[[], None], signum: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(Exception):
        before()
        sys.stdout.flush()
    os.write(2, f"{NOTHING_SAVED}\n".encode())
    os._exit(128 + signum)  # the imports that are under way need not be unwound


def _raise(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(signum)


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows an exception that ends a script before it trains."""
    if issubclass(kind, KeyboardInterrupt):
        # Else the interpreter ends itself with SIGINT, which is no exit code.
        print(f"{NOTHING_SAVED}{_place(trace)}", file=sys.__stderr__, flush=True)
        raise SystemExit(INTERRUPTED)
    _say_error(kind, error, trace)


def _say_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Shows an exception that ends a script; a `LockstepError` is one message."""
    from lockstep.errors import LockstepError
    from lockstep.launching.rank.process import tell

    if not isinstance(error, LockstepError):
        sys.__excepthook__(kind, error, trace)
        return
    # torch.distributed puts a buffer in the place of sys.stderr here, and forgets it at SystemExit.
    with contextlib.redirect_stderr(sys.__stderr__):
        tell(error, _place(trace) if error.rank is None else "")
    raise SystemExit(error.exit_code)


def _say_alone(
    say: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Shows an exception by `say`, which may be a hook of torch.distributed around ours."""
    from lockstep.errors import LockstepError, alone

    if isinstance(error, LockstepError) and error.rank is None:
        alone(error)
    say(kind, error, trace)


def _place(trace: TracebackType | None) -> str:
    where = traceback.extract_tb(trace, limit=1)
    return f" (in {where[0].filename}:{where[0].lineno})" if where else ""
