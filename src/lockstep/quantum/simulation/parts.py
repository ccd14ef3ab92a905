"""The parts of a state that a rank has, the memory for them, and sums over all parts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.quantum.circuits.fusion import Block


class Pool:
    """Memory of states that are no longer needed, for the next ones.

    To touch fresh memory from the system for the first time costs as much as applying a block.

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
        """Take back memory that is no longer used; the oldest in the pool makes room for it."""
        while self._free and memory.nbytes > self._room:
            self._room += self._free.pop(0).nbytes
        if memory.nbytes <= self._room:
            self._room -= memory.nbytes
            self._free.append(memory)


class StatePart:
    """The parts of a state that this rank has, and the memory for them.

    Args:
        num_local: number of qubits whose axes are in a part; the others are the bits of the part's
            number.
        num_parts: number P of all parts; rank r of R has those from r·P // R on.
        transport: transport to the ranks that have the other parts, in the order of their ranks;
            None where all parts are here.
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
        # In proportion to the parts here: which states are kept, and so which exchanges the
        # backward pass makes, is then the same on all ranks.
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
        own = (torch.view_as_real(local) if local.is_complex() else local).flatten(1)
        gathered = own.new_empty(part.num_parts * own.shape[1])
        counts = [number * own.shape[1] for number in part.counts]
        part.transport.all_gather(own.reshape(-1), gathered, counts)
        everyone = gathered.view(part.num_parts, *own.shape[1:])
        if local.is_complex():
            everyone = torch.view_as_complex(everyone.view(part.num_parts, -1, 2))
        everyone = everyone.view(part.num_parts, *local.shape[1:])
    total = everyone[0].clone()
    for other in everyone[1:]:
        total += other
    return total
