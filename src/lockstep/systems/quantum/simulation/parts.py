"""The parts of a state that a rank has, the memory for them, and sums over all parts."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.host import control_groups
from lockstep.comm.transport import Transport
from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.fusion import Block


def checked_amplitudes(
    dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.dtype, torch.device]:
    """The dtype of amplitudes, and the device on which they are computed.

    Raises:
        ConfigError: the dtype is not complex64 or complex128, or there is no such device.
    """
    if dtype not in (torch.complex64, torch.complex128):
        raise ConfigError(f"dtype {dtype}: must be torch.complex64 or torch.complex128")
    try:
        return dtype, torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r}: there is no such device") from error


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
        ConfigError: they do not; the message has the bytes needed and how many ranks would do.
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


def check_fits(
    subject: str, need: int, device: torch.device | str = "cpu", advice: str = ""
) -> None:
    """Check that something fits into memory.

    Args:
        subject: what needs the memory; begins the message.
        need: memory needed, in bytes.
        device: device whose memory counts.
        advice: what the user can do; ends the message.

    Raises:
        ConfigError: it does not fit; the message has the bytes needed and those there are.
    """
    if need <= _ALWAYS_FITS:
        return
    have = memory_bytes(device)
    if need > have:
        raise ConfigError(
            f"{subject}: needs {need:,} bytes of memory, and there are {have:,}"
            + (f"; {advice}" if advice else "")
        )


def _address_space() -> int:
    """Bytes that `ulimit -v` leaves to this process."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class Pool:
    """Memory of states that are no longer needed, reused for the next ones.

    Touching fresh memory from the system for the first time costs as much as applying a block.

    Args:
        most: greatest number of bytes to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._room = most
        self._free: list[Tensor] = []

    def __reduce__(self) -> tuple[type[Pool], tuple[int]]:
        """A copy or a pickle of a pool is an empty pool of the same size."""
        return Pool, (self._most,)

    def take(self, size: int, like: Tensor) -> Tensor:
        """Uninitialised memory for `size` amplitudes, of the dtype and device of `like`."""
        for place, memory in enumerate(self._free):
            if len(memory) == size:
                self._room += memory.nbytes
                return self._free.pop(place)
        if like.device.type == "cpu":  # NumPy asks for huge pages, which torch does not
            return torch.from_numpy(np.empty(size, str(like.dtype).removeprefix("torch.")))
        return torch.empty(size, dtype=like.dtype, device=like.device)

    def give(self, memory: Tensor) -> None:
        """Take back memory that is no longer used; drops the oldest to make room for it."""
        while self._free and memory.nbytes > self._room:
            self._room += self._free.pop(0).nbytes
        if memory.nbytes <= self._room:
            self._room -= memory.nbytes
            self._free.append(memory)


class StatePart:
    """The parts of a state on this rank, and the memory for them.

    Args:
        num_local: number of qubits whose axes are in a part; the others are the bits of the part's
            number.
        num_parts: number P of all parts; rank r of R has those from r·P // R on.
        transport: transport to the ranks that have the other parts, in the order of their ranks;
            None where this process has all parts.
        kept_bytes: bytes of memory that is kept for the next states, on all ranks together.

    Attributes:
        counts: number of parts of each rank.
        num_here: number L of parts of this rank.
        first: number of the first of them.
        kept_bytes: bytes of memory that this rank may keep.
        pool: memory for the next states.
    """

    def __init__(
        self, num_local: int, num_parts: int, transport: Transport | None, kept_bytes: int
    ) -> None:
        self.num_local = num_local
        self.transport = transport
        self.num_parts = num_parts
        num_ranks = 1 if transport is None else transport.size
        bounds = [rank * num_parts // num_ranks for rank in range(num_ranks + 1)]
        self.counts = [bounds[rank + 1] - bounds[rank] for rank in range(num_ranks)]
        rank = 0 if transport is None else transport.rank
        self.first, self.num_here = bounds[rank], self.counts[rank]
        # In proportion to the parts on this rank, so that all ranks keep the same states: the
        # backward pass then makes the same exchanges everywhere.
        self.kept_bytes = kept_bytes * self.num_here // num_parts
        self.pool = Pool(self.kept_bytes)

    def matrices_of(self, block: Block) -> list[slice]:
        """For each part here, the slice of a block's matrices that it is multiplied with."""
        count = 1 << (len(block.controls) - len(block.rank_controls))
        high = self.num_parts.bit_length() - 2
        slices = []
        for number in range(self.first, self.first + self.num_here):
            value = 0
            for axis in block.rank_controls:
                value = 2 * value + (number >> (high - axis) & 1)
            slices.append(slice(value * count, (value + 1) * count))
        return slices


def added_up(local: Tensor, part: StatePart) -> Tensor:
    """The sum of all parts' tensors, in the order of parts, the same on all ranks.

    Args:
        local: tensors of the parts here, [L, M], real or complex.
        part: the parts.

    Returns:
        Sum [M]. It depends on the number of parts only, and not on that of ranks.
    """
    everyone = local
    if part.transport is not None:
        numbers = (torch.view_as_real(local) if local.is_complex() else local).flatten(1)
        gathered = numbers.new_empty(part.num_parts * numbers.shape[1])
        counts = [number * numbers.shape[1] for number in part.counts]
        part.transport.all_gather(numbers.reshape(-1), gathered, counts)
        everyone = gathered.view(part.num_parts, *numbers.shape[1:])
        if local.is_complex():
            everyone = torch.view_as_complex(everyone.view(part.num_parts, -1, 2))
        everyone = everyone.view(part.num_parts, *local.shape[1:])
    total = everyone[0].clone()
    for other in everyone[1:]:
        total += other
    return total
