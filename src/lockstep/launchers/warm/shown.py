"""What the system shows of this process: its name, arguments and environment.

A forked process is shown as the one that it was forked from, but for what it asks the kernel to
show instead. A launch finds its processes by their environment (`launchers.host.processes`), and so
do people by their arguments.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence

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
    """Whether this system lets a process say what is shown of it; nothing is changed."""
    try:
        _tell(_current())
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
    _tell(places)
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


def _tell(places: _Map) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_ulong(ctypes.sizeof(places))
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(places), size, zero):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
