"""A process's sign of life, in memory that its watchdog reads."""

from __future__ import annotations

import mmap
import os
import weakref

NUM_BYTES = 24


class Pulse:
    """Counts what this process gets done, and says whether it waits for other ranks.

    Three integers of 64 bits: beats, whether it is waiting, whether it has got going.

    The memory becomes a file with the first use of `fd`: most processes are not watched.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(NUM_BYTES)).cast("q")
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """File descriptor of the memory, for a child process; -1 where there is no such memory.

        It is closed with this object.
        """
        if self._fd is None:
            self._fd = os.memfd_create("lockstep-pulse") if hasattr(os, "memfd_create") else -1
            if self._fd >= 0:
                weakref.finalize(self, os.close, self._fd)
                os.ftruncate(self._fd, NUM_BYTES)
                shared = memoryview(mmap.mmap(self._fd, NUM_BYTES)).cast("q")
                shared[:] = self._memory
                self._memory = shared
        return self._fd

    def beat(self) -> None:
        """Note that something was done."""
        self._memory[0] += 1

    def wait(self) -> None:
        """Note that from now on this process may stand still because of other ranks."""
        self._memory[1] = 1

    def go(self) -> None:
        """Note that from now on it works by itself again."""
        self._memory[0] += 1
        self._memory[1] = 0

    def arm(self) -> None:
        """Note that it has got going: from now on, a long time without a beat is a hang."""
        self._memory[2] = 1
