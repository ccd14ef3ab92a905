"""A process's sign of life, in memory that its watchdog reads."""

from __future__ import annotations

import mmap
import os

NUM_BYTES = 24


class Pulse:
    """Counts what this process gets done, and says whether it waits for other ranks.

    Three integers of 64 bits: beats, whether it is waiting, whether it has got going.

    Attributes:
        fd: of the memory, for a child process.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("lockstep-pulse") if hasattr(os, "memfd_create") else -1
        if self.fd >= 0:
            os.ftruncate(self.fd, NUM_BYTES)
        self._memory = memoryview(mmap.mmap(self.fd, NUM_BYTES)).cast("q")

    def beat(self) -> None:
        """Something was done."""
        self._memory[0] += 1

    def wait(self) -> None:
        """From here on this process may stand still because of others."""
        self._memory[1] = 1

    def go(self) -> None:
        """From here on it works by itself again."""
        self._memory[0] += 1
        self._memory[1] = 0

    def arm(self) -> None:
        """It has got going: from now on it counts as hanging when it does not beat for long."""
        self._memory[2] = 1
