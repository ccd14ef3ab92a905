"""How much memory there is, and errors for what does not fit, before it is allocated."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch

from lockstep.cgroups import control_groups
from lockstep.errors import ConfigError

_ALWAYS_FITS = 1 << 28
_COPIES = 2
"""States in memory while a circuit runs; with gradients, twice as many."""


def memory_bytes(device: torch.device | str = "cpu", root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use at most, or of a GPU.

    The least of what this machine has and of the limits of the process's address space and of its
    control groups. What other processes use at the moment does not count, so that all ranks get
    the same number.

    Args:
        device: device whose memory counts.
        root: folder in which the file systems `/proc` and `/sys` are.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _address_space()]
    for is_v2, folder in control_groups("memory", root):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            name = "memory.max" if is_v2 else "memory.limit_in_bytes"
            limits.append(int((folder / name).read_text()))
    return min(limits)


def check_memory(
    num_qubits: int,
    dtype: torch.dtype,
    batch: int = 1,
    gradients: bool = False,
    num_ranks: int = 1,
    available: int | None = None,
) -> None:
    """Check that states fit into memory.

    Args:
        num_qubits: number of qubits of the circuit.
        dtype: dtype of the amplitudes.
        batch: number of states.
        gradients: whether there will be a backward pass.
        num_ranks: number of ranks that the state is split over.
        available: memory of a rank in bytes; by default, that of this machine.

    Raises:
        ConfigError: they do not; says how many bytes are needed, and how many ranks would do.
    """
    have = memory_bytes() if available is None else available
    need = (batch << num_qubits) * dtype.itemsize * _COPIES * (2 if gradients else 1)
    if need <= have * num_ranks:
        return
    enough = 1
    while enough * have < need:
        enough *= 2
    states = f"{batch} states" if batch > 1 else "the state"
    raise ConfigError(
        f"{num_qubits} qubits: {states} and what it takes to compute with need {need:,} bytes, and "
        f"a rank has {have:,}; {enough} ranks would do"
    )


def check_fits(what: str, need: int, device: torch.device | str = "cpu", advice: str = "") -> None:
    """Check that no more memory is needed than there is.

    Args:
        what: name of what needs the memory; begins the message.
        need: memory needed, in bytes.
        device: device whose memory counts.
        advice: sentence part with what the user can do; ends the message.

    Raises:
        ConfigError: it is; says how many bytes are needed, and how many there are.
    """
    if need <= _ALWAYS_FITS:
        return
    have = memory_bytes(device)
    if need > have:
        raise ConfigError(
            f"{what}: needs {need:,} bytes of memory, and there are {have:,}"
            + (f"; {advice}" if advice else "")
        )


def _address_space() -> int:
    """Bytes that `ulimit -v` leaves to this process."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
