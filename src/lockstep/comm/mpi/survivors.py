"""Communicators of those that are left."""

from __future__ import annotations

from lockstep.comm.mpi.growth import agreed
from lockstep.comm.mpi.library import MPI


def shrunk_to_living(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator without those that have died."""
    shrunk = comm.Shrink()
    assert isinstance(shrunk, MPI.Intracomm)
    return shrunk


def whole(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A new communicator once it is complete everywhere, without those that died meanwhile.

    Agreement is the same on all survivors. Open MPI 5 crashes where a revocation finds a
    communicator that is not complete.
    """
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    while not agreed(comm):
        comm = shrunk_to_living(comm)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm
