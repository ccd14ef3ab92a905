"""A lock by which others notice at once that its holder has begun to end.

A killed process closes its connections, and its parent hears of its end, only when all its memory
is free: 15 to 70 ms later where torch was imported, and more with large tensors. Before that the
kernel marks the robust mutexes that it holds, and wakes who waits for them, within 0.1 ms
(`pthread_mutexattr_setrobust(3)`; `exit_robust_list` in Linux's kernel/futex/core.c).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable

_NUM_BYTES = mmap.PAGESIZE
_ATTRIBUTE_BYTES = 64
"""More than any `pthread_mutexattr_t` has."""
_SHARED, _ROBUST = 1, 1
_OWNER_DIED = 130
"""EOWNERDEAD of Linux."""


class LifeLock:
    """A lock that the thread which makes it holds until `release`, or its end.

    Attributes:
        fd: file descriptor of its memory, for `watch` in another process; -1 where the system has
            no such locks.
    """

    def __init__(self) -> None:
        self.fd = -1
        # Without it deaths are noticed as the parent of any process notices them.
        with contextlib.suppress(OSError, AttributeError, ValueError):
            self._lock()

    def _lock(self) -> None:
        fd = os.memfd_create("lockstep-life")
        os.ftruncate(fd, _NUM_BYTES)
        self._memory = mmap.mmap(fd, _NUM_BYTES)
        self._mutex, attribute, libc = _address(self._memory), _attribute(), ctypes.CDLL(None)
        libc.pthread_mutexattr_init(attribute)
        libc.pthread_mutexattr_setpshared(attribute, _SHARED)
        is_robust = libc.pthread_mutexattr_setrobust(attribute, _ROBUST) == 0
        if not is_robust or libc.pthread_mutex_init(self._mutex, attribute):
            os.close(fd)
            return
        libc.pthread_mutex_lock(self._mutex)
        self.fd = fd

    def release(self) -> None:
        """Let who watches it know that this was no death."""
        if self.fd >= 0:
            ctypes.CDLL(None).pthread_mutex_unlock(self._mutex)
            os.close(self.fd)
            self.fd = -1


def watch(fd: int, on_death: Callable[[], None]) -> None:
    """Have a thread call a function as soon as the holder of a lock begins to end.

    Args:
        fd: file descriptor of the lock's memory; closed here.
        on_death: called in that thread; not after `release`.
    """
    with open(fd, "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), _NUM_BYTES)
    mutex, libc = _address(memory), ctypes.CDLL(None)

    def wait() -> None:
        if libc.pthread_mutex_lock(mutex) == _OWNER_DIED:
            on_death()
        memory.close()

    threading.Thread(target=wait, name="deaths", daemon=True).start()


def _address(memory: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def _attribute() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
