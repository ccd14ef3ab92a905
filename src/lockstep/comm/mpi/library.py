"""The MPI library, initialised; where ranks may be lost, it must be imported from here.

With a rank lost, Open MPI's `MPI_Finalize` may wait for it for good (measured with 5.0.11), and
mpi4py calls it at exit. So whether to call it is decided here.
"""

from __future__ import annotations

import atexit
import os

import mpi4py

from lockstep.comm.mpi.collectives import without_hierarchy

os.environ |= without_hierarchy(os.environ)
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

__all__ = ["MPI", "has_fault_tolerance", "note_loss"]

_is_damaged = False

_FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"
"""Variable that `mpirun --with-ft ulfm` sets for its ranks."""


def has_fault_tolerance() -> bool:
    """Whether survivors of a dead rank get an error: `mpirun --with-ft ulfm` of Open MPI 5."""
    if os.environ.get(_FT_VARIABLE, "").lower() not in ("1", "true"):
        return False
    try:
        MPI.COMM_WORLD.Get_failed().Free()
    except (NotImplementedError, MPI.Exception):
        return False
    return True


def note_loss() -> None:
    """Remember that a communicator is damaged: `MPI_Finalize` is then never called.

    A rank that was told to give up by another one may not know of any death itself.
    """
    global _is_damaged
    _is_damaged = True


def _finalize() -> None:
    if MPI.Is_finalized() or _is_damaged:
        return
    if not (has_fault_tolerance() and MPI.COMM_WORLD.Get_failed().size):
        MPI.Finalize()


atexit.register(_finalize)
