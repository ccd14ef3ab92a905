"""Sleeping until another process changes a word of shared memory (futex(2))."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1
_NUMBER = 202
"""Of the system call, on x86-64."""

IS_THERE = sys.platform == "linux" and platform.machine() == "x86_64"
"""Whether this system has futexes, on a processor that keeps stores in order.

What a process has written before it changes a word is then seen by whoever sees that change.
"""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_system = _libc.syscall


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the word has a value; it may also return for no reason.

    Args:
        address: address of a word of 4 bytes, in memory that is shared.
        value: value that the word had a moment ago.
        seconds: longest time to sleep.

    Raises:
        OSError: there is no such memory.
    """
    whole = int(seconds)
    time = _Time(whole, int((seconds - whole) * 1e9))
    number, nothing = ctypes.c_long(_NUMBER), ctypes.c_void_p(None)
    word, expected = ctypes.c_void_p(address), ctypes.c_uint32(value)
    if _system(number, word, _WAIT, expected, ctypes.byref(time), nothing, 0) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, os.strerror(code))


class Waker:
    """Wakes all that sleep until a word changes."""

    def __init__(self, address: int) -> None:
        """Prepare the system call, of which each step makes one."""
        self._arguments = (
            ctypes.c_long(_NUMBER),
            ctypes.c_void_p(address),
            ctypes.c_int(_WAKE),
            ctypes.c_int(_EVERYONE),
        )

    def wake(self) -> None:
        """Wake them."""
        _system(*self._arguments)
