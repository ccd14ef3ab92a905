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

_LAUNCHERS = (
    "prterun", "prted", "orterun", "orted", "mpirun", "mpiexec", "hydra_pmi_proxy", "slurmstepd",
    "torchrun", "pt_elastic",
)  # fmt: skip
"""Beginnings of the names of processes that start ranks on a host."""


def bound_to_parent(
    argv: Sequence[str], death_signal: signal.Signals = signal.SIGKILL
) -> list[str]:
    """The command that runs `argv` and gets `death_signal` when its parent process dies.

    Outside Linux, where there is no such request, this is `argv` itself.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", __file__, str(int(death_signal)), *argv]


def end_with_launcher() -> None:
    """Have this process killed when the launcher's process that has started it dies.

    For ranks that other launchers start: a daemon of mpirun that is killed, or has lost its
    connection, leaves its ranks behind. Where the parent is no launcher, such as a shell, this does
    nothing.
    """
    try:
        with open(f"/proc/{os.getppid()}/comm", encoding="utf-8", errors="replace") as file:
            name = file.read()
    except OSError:
        return
    if name.startswith(_LAUNCHERS):
        end_with_parent(signal.SIGKILL)


def end_with_parent(death_signal: int) -> None:
    """Have this process get a signal when its parent dies (Linux only)."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:  # it died before the request: the signal would never come
        sys.exit(1)


def main(death_signal: int, argv: list[str]) -> None:
    """Become `argv`, which ends with the parent."""
    end_with_parent(death_signal)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
