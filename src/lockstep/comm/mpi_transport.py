"""The engine's bytes over MPI, straight from tensor memory; survivors of a dead rank regroup.

Importing this module initialises MPI.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.comm.mpi_library import MPI, has_fault_tolerance
from lockstep.comm.transport import GroupBroken, Transport, collective, offsets

_DATATYPES = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T}


class MpiTransport(Transport):
    """A duplicate of `MPI.COMM_WORLD` (or of `comm`); tensors lie in host memory.

    Attributes:
        comm: the present communicator.

    Raises:
        GroupBroken: from any method, when a process of the group has died and MPI can tell.
        mpi4py.MPI.Exception: another error of MPI.
    """

    name = "mpi"
    failures = (MPI.Exception,)

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        super().__init__()
        self.can_regroup = has_fault_tolerance()
        self._adopt((comm or self._living()).Dup())

    def _adopt(self, comm: MPI.Intracomm) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self._has_agreed = False
        self.rank = comm.rank
        self.size = comm.size

    def _living(self) -> MPI.Intracomm:
        """All processes but those that died in an earlier training of the same script."""
        world = MPI.COMM_WORLD
        return _shrink(world) if self.can_regroup and world.Get_failed().size else world

    @collective
    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """See `Transport.all_gather`."""
        kind = _DATATYPES[out.itemsize]
        place = out.data_ptr() + offsets(counts)[self.rank] * out.itemsize
        send: Any = MPI.IN_PLACE if own.data_ptr() == place else [own.numpy(), kind]
        if min(counts) == max(counts):
            self.comm.Allgather(send, [out.numpy(), kind])
        else:
            self.comm.Allgatherv(send, [out.numpy(), list(counts), kind])

    @collective
    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        """See `Transport.all_to_all`."""
        kind = _DATATYPES[send.itemsize]
        self.comm.Alltoallv(
            [send.numpy(), (list(send_counts), list(send_offsets)), kind],
            [recv.numpy(), (list(recv_counts), offsets(recv_counts)), kind],
        )

    @collective
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Transport.broadcast`."""
        self.comm.Bcast([tensor.numpy(), _DATATYPES[tensor.itemsize]], root=root)

    @collective
    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self.comm.Barrier()

    @collective
    def agree(self) -> None:
        """See `Transport.agree`."""
        if not self.can_regroup:
            self.comm.Barrier()
            return
        # Agreement goes on over a revoked communicator, so ranks that regroup take part in it too.
        self._has_agreed = True
        if not self.comm.Agree(1):
            raise GroupBroken("another rank has noticed a loss")
        self._has_agreed = False

    @collective
    def regroup(self) -> None:
        """See `Transport.regroup`."""
        before = self.comm
        before.Revoke()
        if not self._has_agreed:
            with contextlib.suppress(MPI.Exception):
                before.Agree(0)
        shrunk = _shrink(before)
        # Agreement is the same on all survivors. It also shows that the new communicator is
        # complete everywhere; Open MPI 5 crashes where a revocation finds one that is not.
        while not _is_whole(shrunk):
            shrunk = _shrink(shrunk)
        self._adopt(shrunk)

    def is_damaged(self) -> bool:
        """Whether a rank of the group is known to have died, or the group was given up."""
        if not self.can_regroup:
            return False
        return self.comm.Is_revoked() or self.comm.Get_failed().size > 0

    def close(self) -> None:
        """Free the communicator."""
        if not self.is_damaged():
            self.comm.Free()

    def abort(self, exit_code: int) -> None:
        """End all ranks of the job: the others may wait for this one for good."""
        MPI.COMM_WORLD.Abort(exit_code)


def _shrink(comm: MPI.Intracomm) -> MPI.Intracomm:
    shrunk = comm.Shrink()
    assert isinstance(shrunk, MPI.Intracomm)
    return shrunk


def _is_whole(comm: MPI.Intracomm) -> bool:
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        comm.Agree(1)
    except MPI.Exception:
        return False
    return True
