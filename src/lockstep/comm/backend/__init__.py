"""The `mpi4py` backend of `torch.distributed`: any MPI, no build of PyTorch from source.

Under `mpirun`, `init_process_group()` here needs neither a store nor environment variables;
`register()` alone makes `dist.init_process_group("mpi4py", init_method="mpi4py://")` work, and
the plain `dist.init_process_group("mpi4py")` where a launcher has set `RANK`, `MASTER_ADDR` and
so on. Importing this package calls `MPI_Init`. The engine does not use it.

Errors that MPI reports are raised as `mpi4py.MPI.Exception` by the operation's `wait`. Under
DDP it is torch's C++ reducer that waits, which makes a `RuntimeError` with the same text of it.

Not served:

- Different backends per device in one group: torch lets a group written in Python take the
  whole group. CUDA tensors are staged through host memory.
- C++ callers of `reduce`, `gather`, `scatter`, `alltoall` and of the out variants of functional
  collectives, which torch does not forward to Python: it raises "No backend type".
- `torch.distributed.monitored_barrier`, which checks for gloo; the group has the method.
- Sparse tensors.
- More than 2^31 - 1 elements in one message on Open MPI 5.0, which raises `MPI_ERR_ARG`.
- A timeout while a group is made: its members wait for each other in MPI for as long as it
  takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import register_rendezvous_handler

from lockstep.comm.backend.group import BACKEND_NAME
from lockstep.comm.backend.operations import Movements, Reductions
from lockstep.comm.backend.world import MpiWorld, create_store
from lockstep.comm.mpi.library import MPI

__all__ = ["MpiProcessGroup", "init_process_group", "register"]


class MpiProcessGroup(Reductions, Movements):
    """A process group of `torch.distributed` on an MPI communicator."""


def register() -> None:
    """Make the backend and the `mpi4py://` rendezvous known to `torch.distributed`; idempotent."""
    if BACKEND_NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(
        BACKEND_NAME, _create_group, extended_api=True, devices=["cpu", "cuda"]
    )
    register_rendezvous_handler(BACKEND_NAME, _rendezvous)  # type: ignore[no-untyped-call]


def init_process_group(
    comm: MPI.Intracomm | None = None,
    *,
    store: Store | None = None,
    timeout: timedelta = default_pg_timeout,
) -> MpiProcessGroup:
    """Make the default process group with nothing but MPI; collective over `comm`.

    Args:
        comm: communicator whose ranks become the global ranks; None for `COMM_WORLD`. After a
            failure, that of the survivors.
        store: store shared by all ranks; None to make one, served by rank 0.
        timeout: time limit of operations that have none of their own.

    Returns:
        The default group.

    Raises:
        ConnectionError: a rank cannot reach the store of rank 0.
        ValueError: there is a default group already.
        mpi4py.MPI.Exception: MPI reported an error.
    """
    register()
    comm = comm or MPI.COMM_WORLD
    dist.init_process_group(
        BACKEND_NAME,
        store=store or create_store(comm, timeout),
        rank=comm.rank,
        world_size=comm.size,
        timeout=timeout,
        pg_options=MpiWorld(comm),
    )
    group = dist.group.WORLD
    assert isinstance(group, MpiProcessGroup)
    return group


def _create_group(made: Any, world: MpiWorld | None) -> MpiProcessGroup:
    """Make a new group: torch calls this on the group's members only.

    Args:
        made: torch's `_DistributedBackendOptions`, which describe the group.
        world: value of `pg_options`; None to share the world of the default group.
    """
    if world is None:
        world = getattr(dist.group.WORLD, "world", None) or MpiWorld(MPI.COMM_WORLD)
    ranks = list(made.global_ranks_in_group)
    if not ranks and (world.base.rank, world.base.size) != (made.group_rank, made.group_size):
        raise ValueError(
            f"torch calls this process rank {made.group_rank} of {made.group_size}, "
            f"but MPI says {world.base.rank} of {world.base.size}; are RANK and WORLD_SIZE "
            "left over from another launcher?"
        )
    comm = world.subgroup(ranks, made.group_id) if ranks else world.duplicate()
    return MpiProcessGroup(world, comm, made.group_id, made.store, made.timeout)


def _rendezvous(
    url: str, timeout: timedelta = default_pg_timeout, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Handle `init_method="mpi4py://"`: rank, size and store from MPI alone."""
    comm = MPI.COMM_WORLD
    yield create_store(comm, timeout), comm.rank, comm.size
