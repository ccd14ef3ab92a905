"""The engine's bytes over MPI, straight from tensor memory.

Importing this module initialises MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI
from torch import Tensor

from lockstep.comm.transport import Transport, offsets

_DATATYPES = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T}


class MpiTransport(Transport):
    """A duplicate of `MPI.COMM_WORLD` (or of `comm`); tensors lie in host memory.

    Raises:
        MPI.Exception: from any method, when a process of the group has died and MPI can tell.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        self.comm = (comm or MPI.COMM_WORLD).Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank = self.comm.rank
        self.size = self.comm.size

    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """See `Transport.all_gather`."""
        kind = _DATATYPES[out.itemsize]
        place = out.data_ptr() + offsets(counts)[self.rank] * out.itemsize
        send: Any = MPI.IN_PLACE if own.data_ptr() == place else [own.numpy(), kind]
        if min(counts) == max(counts):
            self.comm.Allgather(send, [out.numpy(), kind])
        else:
            self.comm.Allgatherv(send, [out.numpy(), list(counts), kind])

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

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Transport.broadcast`."""
        self.comm.Bcast([tensor.numpy(), _DATATYPES[tensor.itemsize]], root=root)

    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self.comm.Barrier()

    def close(self) -> None:
        """Free the communicator."""
        self.comm.Free()

    def abort(self, exit_code: int) -> None:
        """End all ranks of the job: the others may wait for this one for good."""
        MPI.COMM_WORLD.Abort(exit_code)
