"""Transports over a group that a program has made itself."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.local_transport import LocalTransport
from lockstep.comm.torchdist.process_group_transport import GroupTransport
from lockstep.comm.transport import Transport, collective


class BorrowedGroup(GroupTransport):
    """A process group of torch.distributed that somebody else destroys."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """Use a group.

        Args:
            group: a `torch.distributed.ProcessGroup`.
            device: device on which the tensors to move lie.
        """
        super().__init__(dist.get_backend(group), device)
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    @collective
    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self.traffic.add(0, 0)
        dist.barrier(self.group)

    def close(self) -> None:
        """Nothing to do."""


def borrowed(group: Any, device: torch.device) -> Transport:
    """A transport over a group.

    Args:
        group: a `torch.distributed.ProcessGroup`, an `mpi4py.MPI.Intracomm`, or None for the
            default process group, where there is one, and else this process alone.
        device: device on which the tensors to move lie.

    Raises:
        TypeError: it is something else.
    """
    if group is None:
        if not dist.is_initialized():
            return LocalTransport()
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return BorrowedGroup(group, device)
    # A program that has a communicator has imported mpi4py; others must not call MPI_Init here.
    mpi4py = sys.modules.get("mpi4py.MPI")
    if mpi4py is not None and isinstance(group, mpi4py.Intracomm):
        from lockstep.comm.mpi.borrowed_comm import BorrowedComm

        return BorrowedComm(group)
    raise TypeError(f"a {type(group).__name__}")
