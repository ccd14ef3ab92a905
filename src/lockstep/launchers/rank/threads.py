"""The threads each rank computes with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from lockstep.launchers.host.cores import THREAD_VARIABLES, thread_warnings, usable_cores
from lockstep.launchers.host.processes import children
from lockstep.launchers.rank.environment import Environment


@contextlib.contextmanager
def num_threads(threads: int, environment: Environment) -> Iterator[list[str]]:
    """Compute with this many threads in this process while in here.

    Args:
        threads: number of threads of each rank.
        environment: place of this process among the ranks.

    Yields:
        Warnings: more threads than cores on this host, or cores left idle.
    """
    before = torch.get_num_threads()
    variables = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    torch.set_num_threads(threads)
    if environment.world_size > 1:
        # It cannot be put back, so only in a process that is there to be a rank. It is refused once
        # operations have run in parallel; then nothing is lost but some idle threads.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(1)
    try:
        ranks = environment.local_world_size
        yield thread_warnings(threads, ranks, cores_of_host(environment))
    finally:
        torch.set_num_threads(before)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cores_of_host(environment: Environment) -> int:
    """Cores that all ranks of this host may use."""
    # mpirun may bind each rank to cores of its own: what all ranks of this host may use counts.
    siblings = children(os.getppid()) if environment.world_size > 1 else []
    return usable_cores(os.environ, environment.local_world_size, siblings)
