"""Ranks that start with torch imported already: they are forked from a process that has done so.

A *server* has imported torch and Lockstep, and no code of the user's. In place of an interpreter, a
launcher starts a *proxy* (`proxy.py`). It lets the server fork a process, passes its arguments,
environment, open files and limits to that, forwards signals, and ends as that process does. Where
the result would differ from a start of its own, the proxy becomes the interpreter.

This module has what is needed before anything slow is imported, and so imports nothing slow itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import EnvironError
from lockstep.launching.host.processes import THREAD_VARIABLES


class Forked(BaseException):
    """Raised in a forked process, to release what the frames of the server hold.

    Attributes:
        order: message of its proxy.
        fds: open files that came with the message.
    """

    def __init__(self, order: dict[str, Any], fds: list[int]) -> None:
        super().__init__("a forked process has to be run")
        self.order, self.fds = order, fds


WARM = "LOCKSTEP_WARM"
"""Variable that turns servers off if it is 0."""


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether ranks may be forked from a server.

    Raises:
        EnvironError: `LOCKSTEP_WARM` is neither 0 nor 1.
    """
    text = environment.get(WARM, "1")
    if text not in ("0", "1"):
        from lockstep.config.parsing import shown

        raise EnvironError(f"environment variable {WARM}={shown(text)[1:-1]}: must be 0 or 1")
    return text == "1"


def is_command() -> bool:
    """Whether this process is the `lockstep` command, with no option of the interpreter."""
    program = sys.orig_argv[1:3]
    return program == ["-m", "lockstep"] or (bool(program) and Path(program[0]).name == "lockstep")


def foresee_ranks(overrides: Sequence[str]) -> None:
    """Prepare this process, the command, for a server: before torch and numpy are imported.

    Libraries read their number of threads and start them when they are imported, and a process with
    several threads cannot be forked.

    Args:
        overrides: `key=value` items; ranks of several threads start by themselves.
    """
    several = any(o.startswith("threads=") and o != "threads=1" for o in overrides)
    if is_command() and not several and is_wanted(os.environ):
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
