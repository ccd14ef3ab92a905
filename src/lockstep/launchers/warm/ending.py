"""The end of a forked process: as an interpreter's, but for what takes long and nobody sees.

An interpreter frees all modules, one by one. In a forked process this also copies the memory that
they lie in, which it shares with the server. So only those are freed that are its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Collection
from types import ModuleType
from typing import NoReturn


def end(status: int, known: Collection[str]) -> NoReturn:
    """End this process.

    Args:
        status: exit code; negative for a signal.
        known: names of the modules that came from the server.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    own = [module for name, module in sys.modules.items() if name not in known]
    for module in (sys.modules["__main__"], *reversed(own)):
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
    """Let go of a module's values, private ones first: files that are open get what is written."""
    values = vars(module)
    names = [name for name in values if name not in ("__builtins__", "__name__")]
    for name in sorted(names, key=lambda name: not name.startswith("_")):
        values[name] = None
