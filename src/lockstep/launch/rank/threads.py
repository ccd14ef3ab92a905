"""The threads each rank computes with."""

from __future__ import annotations

import contextlib
import os

import torch

from lockstep.launch.host.cores import THREAD_VARIABLES, thread_warnings, usable_cores
from lockstep.launch.host.processes import children
from lockstep.launch.rank.environment import Environment


def set_threads(threads: int, environment: Environment) -> list[str]:
    """Compute with this many threads in this process.

    Args:
        threads: number of threads of each rank.
        environment: place of this process among the ranks.

    Returns:
        Warnings: more threads than cores on this host, or cores left idle.
    """
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    torch.set_num_threads(threads)
    # Refused once operations have run in parallel; then nothing is lost but some idle threads.
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(1)
    # mpirun may bind each rank to cores of its own: what all ranks of this host may use counts.
    siblings = children(os.getppid()) if environment.world_size > 1 else []
    cores = usable_cores(os.environ, environment.local_world_size, siblings)
    return thread_warnings(threads, environment.local_world_size, cores)
