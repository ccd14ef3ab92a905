"""The collectives that `doctor.probe` tries, each with a result that can be checked."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.launchers.rank.environment import Environment
from lockstep.launchers.rank.join import free_port

TIMEOUT_S = 30.0
"""Seconds that a rank waits for the others in one collective."""


def start(environment: Environment, backend: str) -> str:
    """Make the default process group of all ranks, and tell what carries it."""
    timeout = timedelta(seconds=TIMEOUT_S)
    if backend == "mpi4py":
        from mpi4py import MPI

        from lockstep.comm.backend import init_process_group

        init_process_group(timeout=timeout)
        library = MPI.Get_library_version().partition(",")[0]
    else:
        host = environment.master_addr or "127.0.0.1"
        port = environment.master_port or free_port()
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{port}",
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
        library = backend
    expect(dist.get_world_size(), environment.world_size)
    return library


def _all_reduce(device: torch.device) -> None:
    value = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(value)
    size = dist.get_world_size()
    expect(value.item(), size * (size + 1) / 2)


def _broadcast(device: torch.device) -> None:
    last = dist.get_world_size() - 1
    value = torch.tensor([float(dist.get_rank())], device=device)
    dist.broadcast(value, src=last)
    expect(value.item(), last)


def _barrier(device: torch.device) -> None:
    dist.barrier()


def _all_gather(device: torch.device) -> None:
    size = dist.get_world_size()
    gathered = [torch.zeros(1, device=device) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([float(dist.get_rank())], device=device))
    expect([value.item() for value in gathered], list(range(size)))


def _all_to_all(device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(size, device=device)
    dist.all_to_all_single(received, torch.arange(size, device=device) + 100.0 * rank)
    expect(received.tolist(), [100.0 * other + rank for other in range(size)])


def _reduce_scatter(device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.zeros(1, device=device)
    parts = (torch.arange(size, device=device) + 100.0 * rank).view(size, 1)
    dist.reduce_scatter(own, list(parts))
    expect(own.item(), 100.0 * size * (size - 1) / 2 + size * rank)


COLLECTIVES: dict[str, Callable[[torch.device], None]] = {
    "all-reduce": _all_reduce,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "reduce-scatter": _reduce_scatter,
}
"""What to try, by name."""


def expect(value: object, expected: object) -> None:
    """Check a result.

    Raises:
        ValueError: it is not as expected.
    """
    if value != expected:
        raise ValueError(f"got {value}, expected {expected}")
