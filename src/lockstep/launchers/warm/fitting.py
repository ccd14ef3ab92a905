"""Whether a process forked from a server is as a start of its own would be."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from lockstep.launchers.warm.server import Fits
from lockstep.launchers.warm.stand_in import surroundings

_PLACES = ("LOCKSTEP_", "OMPI_", "OPAL_", "PMIX_", "PRTE_")
"""Prefixes of the variables by which launchers tell ranks their places."""
_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")
"""Variables that shells and launchers set for any program, and that no library reads."""
_LIBRARIES = "LD_LIBRARY_PATH"


def fitting(environment: Mapping[str, str]) -> Fits:
    """What a server of this process asks of orders.

    Args:
        environment: variables that all processes are to have, but for those that tell a rank its
            place. They must be those that this process has read at its own start: libraries look
            at theirs when they are loaded.
    """
    here, executable = surroundings(), sys.executable
    known = _of_no_place(environment)

    def fits(order: dict[str, Any]) -> bool:
        program, *arguments = order["argv"]
        return (
            program == executable
            and is_simple(arguments)
            and order["surroundings"] == here
            and _of_no_place(order["environment"]) == known
        )

    return fits


def is_simple(arguments: list[str]) -> bool:
    """Whether they are a module, code or a file, with no option of the interpreter before."""
    if arguments[:1] in (["-m"], ["-c"]):
        return len(arguments) > 1
    return bool(arguments) and arguments[0].endswith(".py") and os.path.isfile(arguments[0])


def _of_no_place(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(_PLACES) and name not in _SHELL
    }
    # mpirun puts the folder of its own libraries in front, where it is not needed.
    own = environment.get("OMPI_LIBDIR_LOC")
    folders = [f for f in kept.pop(_LIBRARIES, "").split(os.pathsep) if f and f != own]
    return kept | {_LIBRARIES: os.pathsep.join(folders)}
