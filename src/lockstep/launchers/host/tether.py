"""Run a command that cannot outlive its parent process.

Ranks of mpirun and torchrun outlive a launcher that is killed with SIGKILL. So every
process of a launch asks the kernel for a signal at its parent's death and only then becomes
the command; the request survives `exec`. This file is run as a script, without site packages
and without importing `lockstep`, so that it costs milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def tethered(argv: Sequence[str], death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command that runs `argv` and gets `death_signal` when its parent process dies.

    Outside Linux, where there is no such request, this is `argv` itself.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", __file__, str(int(death_signal)), *argv]


def main(death_signal: int, argv: list[str]) -> None:
    """Become `argv`, tethered to the parent."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:  # it died before the request: nobody would ever be told
        sys.exit(1)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
