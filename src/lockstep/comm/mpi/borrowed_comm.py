"""A transport over a communicator of somebody else."""

from __future__ import annotations

from lockstep.comm.mpi.library import MPI
from lockstep.comm.mpi.transport import MpiTransport
from lockstep.comm.transport import Transport


class BorrowedComm(MpiTransport):
    """A copy of a communicator that a program has made itself; a lost rank ends it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Copy the communicator; all its ranks call this."""
        Transport.__init__(self)
        self._growth = None
        self._newcomer = None
        self._subgroups = []
        self._adopt(comm.Dup())

    def close(self) -> None:
        """Free the copy."""
        self.comm.Free()
