"""Tensors as MPI takes them: memory, and a datatype."""

from __future__ import annotations

from torch import Tensor

from lockstep.comm.mpi.library import MPI

# Data is moved, never summed, by MPI: so any datatype of the same size serves, also for bfloat16,
# which MPI does not have.
DATATYPES = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T}
"""By bytes of an element."""


def memory_of(tensor: Tensor) -> MPI.buffer:
    """The memory of a tensor for MPI, whose owner it leaves as it was.

    A tensor that was given to numpy can no longer give back its memory (`FlatTensors.close`).
    """
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
