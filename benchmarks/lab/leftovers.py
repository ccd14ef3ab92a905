"""Names of what labs make, and its removal: when a lab ends, and after one was killed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import EnvironError

from .tools import call

PREFIX = "lockstep-lab"
NAMESPACES = Path("/run/netns")
STATE = Path("/run") / PREFIX
"""For each lab a folder: the name spaces of its host names, and the agent of mpirun."""
FILES = Path("/etc/netns")
"""For each network namespace a folder of files that processes in it see in the place of /etc's."""

_NAME = re.compile(rf"({PREFIX}-(\d+)-\d+)-(?:h\d+|switch)")
_END_S = 10.0


def switch_of(lab: str) -> str:
    """The namespace that stands for the switch: the first that a lab makes, and the last to go."""
    return f"{lab}-switch"


def host_of(lab: str, host: int) -> str:
    """The namespace of a host, from 0."""
    return f"{lab}-h{host}"


def remove_leftovers() -> list[str]:
    """Remove the labs whose processes have ended without doing so; their names.

    Raises:
        EnvironError: something of them cannot be removed.
    """
    found = {match[1]: int(match[2]) for path in _namespaces() if (match := _NAME.fullmatch(path))}
    dead = sorted(lab for lab, pid in found.items() if not _lives(pid))
    for lab in dead:
        remove(lab)
    return dead


def remove(lab: str) -> None:
    """End all processes of a lab, and remove its namespaces and files; some may be gone already.

    Raises:
        EnvironError: something cannot be removed.
    """
    own = [path for path in _namespaces() if (match := _NAME.fullmatch(path)) and match[1] == lab]
    switch = switch_of(lab)
    there = {namespace for namespace in own if (NAMESPACES / namespace).exists()}
    for namespace in there:
        _end_processes(namespace)
    for namespace in sorted(own, key=lambda name: name == switch):
        if namespace == switch:
            _remove_state(lab)
        shutil.rmtree(FILES / namespace, ignore_errors=True)
        if namespace in there:
            _while_true((NAMESPACES / namespace).exists, ["ip", "netns", "delete", namespace])
    for parent in (STATE, FILES):
        with contextlib.suppress(OSError):  # other labs are in it
            parent.rmdir()


def _remove_state(lab: str) -> None:
    folder = STATE / lab
    for path in folder.glob("h*"):
        if os.path.ismount(path):
            _while_true(functools.partial(os.path.ismount, path), ["umount", str(path)])
    shutil.rmtree(folder, ignore_errors=True)


def _namespaces() -> list[str]:
    """Namespaces that are there, or of which files are: these outlive a restart of the machine."""
    folders = (NAMESPACES, FILES)
    return sorted({path.name for folder in folders for path in folder.glob(f"{PREFIX}-*")})


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end_processes(namespace: str) -> None:
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        try:
            pids = [int(pid) for pid in call(["ip", "netns", "pids", namespace]).split()]
        except EnvironError:
            return  # somebody else has removed the namespace
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    raise EnvironError(f"lab: processes {pids} of {namespace} do not end; see `ps`")


def _while_true(is_there: Callable[[], bool], argv: list[str]) -> None:
    """Run a command that removes something; another lab may do the same at the same time."""
    try:
        call(argv)
    except EnvironError:
        if is_there():
            raise
