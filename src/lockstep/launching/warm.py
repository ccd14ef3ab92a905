"""Servers that the ranks of a command or a program are forked from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lockstep.launchers.job.commands import is_one_host, rank_environment
from lockstep.launchers.warm.ahead import is_wanted
from lockstep.launchers.warm.starting import can_serve, forked, spawned
from lockstep.recipes import load_recipe

_MODULES = ("lockstep.cli.main", "lockstep.commands.train")
"""What ranks import first."""
_LAUNCHERS = ("python", "local", "mpi")


@contextmanager
def fork_server(launcher: str, target: str) -> Iterator[str]:
    """A server for the ranks of a command, forked from it before it imports a user's code.

    Args:
        launcher: name of the launcher that will start ranks.
        target: recipe, file or script that they will train.

    Yields:
        Its name; empty where ranks have to start by themselves.
    """
    with ExitStack() as stack:
        server = ""
        if _is_possible(launcher):
            if ".py" not in target:
                load_recipe(target)
            server = stack.enter_context(forked(rank_environment(threads=1)))
        yield server


@contextmanager
def new_server(launcher: str, threads: int) -> Iterator[str]:
    """A server for the ranks of a program, in a process of its own that imports none of its code.

    Args:
        launcher: name of the launcher that will start ranks.
        threads: number of threads of each rank.

    Yields:
        Its name; empty where ranks have to start by themselves.
    """
    with ExitStack() as stack:
        server = ""
        if threads == 1 and _is_possible(launcher):
            server = stack.enter_context(spawned(rank_environment(threads), _MODULES))
        yield server


def _is_possible(launcher: str) -> bool:
    if launcher not in _LAUNCHERS or not is_wanted(os.environ) or not can_serve(os.environ):
        return False
    return launcher != "mpi" or is_one_host(os.environ)
