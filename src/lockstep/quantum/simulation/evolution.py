"""States that move through a circuit's blocks, forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.quantum.circuits.fusion import Move

_LARGE = 1 << 13
"""Amplitudes from which on a product for each state is faster than a batched one and a copy."""


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


class Moving:
    """States [B, 2^m] that blocks act on in turn, between two pieces of memory.

    Attributes:
        states: the present states, [B, 2^m]. Those given are not changed.
    """

    def __init__(
        self, states: Tensor, num_axes: int, transport: Transport | None, pool: Pool
    ) -> None:
        """Go on from some states.

        Args:
            states: states to begin with, [B, 2^m], complex.
            num_axes: greatest m that is reached.
            transport: transport to the ranks that have the other parts of the states, if there are
                any.
            pool: memory for new states; memory that is no longer needed goes back to it.
        """
        self.states = states
        self._size = len(states) << num_axes
        self._transport = transport
        self._pool = pool
        self._memory: Tensor | None = None  # of the present states, unless they were given
        self._spare: Tensor | None = None

    def apply(self, matrix: Tensor) -> None:
        """Apply a block to states whose axes are in its order: [B, C R K] becomes [B, K C R].

        Args:
            matrix: complex matrices of the block, [B or 1, C, K, K].
        """
        count, size = matrix.shape[1:3]
        target = self._target()
        before = self.states.view(len(target), count, -1, size)
        after = target.view(len(target), size, count, -1)
        for value in range(count):
            _product(matrix[:, value], before[:, value].mT, after[:, :, value])
        self._turn(target)

    def keep(self) -> tuple[Tensor, Tensor | None]:
        """The present states, which stay as they are, and the memory that goes with them."""
        if self.states.numel() < self._size:
            return self.states.clone(), None
        memory, self._memory = self._memory, None
        return self.states, memory

    def release(self) -> None:
        """Give back what is not part of the present states."""
        if self._spare is not None:
            self._pool.give(self._spare)
            self._spare = None

    def undo(self, matrix: Tensor) -> None:
        """The inverse of `apply`: [B, K C R] becomes [B, C R K].

        Args:
            matrix: complex matrices of the block, [B or 1, C, K, K].
        """
        count, size = matrix.shape[1:3]
        target = self._target()
        after = self.states.view(len(target), size, count, -1)
        before = target.view(len(target), count, -1, size)
        conjugate = matrix.conj().resolve_conj()
        for value in range(count):
            _product(after[:, :, value].mT, conjugate[:, value], before[:, value])
        self._turn(target)

    def move(self, moves: Sequence[Move]) -> None:
        """Add axes, and bring them into another order."""
        for move in moves:
            if move is None:
                self._exchange()
            elif isinstance(move, int):
                self._add_axes(move)
            else:
                self._permute(move)

    def move_back(self, moves: Sequence[Move]) -> None:
        """The inverse of `move`: of axes that were added, what is at |0> remains."""
        for move in reversed(moves):
            if move is None:
                self._exchange()
            elif isinstance(move, int):
                self._drop_axes(move)
            else:
                self._permute(_inverse(move))

    def _add_axes(self, count: int) -> None:
        target = self._target(self.states.shape[1] << count)
        target.zero_()
        target.view(len(target), -1, 1 << count)[..., 0] = self.states
        self._turn(target)

    def _drop_axes(self, count: int) -> None:
        target = self._target(self.states.shape[1] >> count)
        target.copy_(self.states.view(len(target), -1, 1 << count)[..., 0])
        self._turn(target)

    def _exchange(self) -> None:
        """Let the ranks' axes and the first local ones change places."""
        assert self._transport is not None
        target, size = self._target(), self._transport.size
        send, recv = (torch.view_as_real(t).view(-1) for t in (self.states, target))
        count = len(send) // size
        counts = [count] * size
        self._transport.all_to_all(send, counts, [r * count for r in range(size)], recv, counts)
        self._turn(target)

    def _permute(self, permutation: Sequence[int]) -> None:
        target = self._target()
        shape = (len(target), *(2,) * len(permutation))
        moved = self.states.view(shape).permute(0, *(p + 1 for p in permutation))
        target.view(shape).copy_(moved)
        self._turn(target)

    def _target(self, size: int | None = None) -> Tensor:
        """Memory for the next states, of as many amplitudes as the present ones or of `size`."""
        count, present = self.states.shape
        size = size or present
        if self._spare is None:
            self._spare = self._pool.take(self._size, self.states)
        return self._spare[: count * size].view(count, size)

    def _turn(self, target: Tensor) -> None:
        self._memory, self._spare = self._spare, self._memory
        self.states = target


class Kept(dict[int, Tensor]):
    """States on the way through a circuit, by the number of the block that comes next.

    Their memory goes back to the pool when the graph of the backward pass is freed.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self._memory: list[Tensor] = []

    def add(self, number: int, moving: Moving) -> None:
        """Keep the present states, and with them their memory."""
        self[number], memory = moving.keep()
        if memory is not None:
            self._memory.append(memory)

    def __del__(self) -> None:
        for memory in self._memory:
            self._pool.give(memory)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """The product left @ right into `out`, all of them [B or 1, rows, columns]."""
    if len(out) == 1 or out[0].numel() >= _LARGE:
        for row in range(len(out)):
            torch.mm(left[row % len(left)], right[row % len(right)], out=out[row])
    else:
        out.copy_(left @ right)


def matrix_gradient(matrix: Tensor, ket: Tensor, bra: Tensor) -> Tensor:
    """The gradient with respect to a block's matrices [b, C, K, K], b being 1 or B.

    Args:
        matrix: matrices of the block, [b, C, K, K].
        ket: states before the block, [B, C R K].
        bra: gradient of the states after the block, [B, K C R].
    """
    batch, (count, size) = len(ket), matrix.shape[1:3]
    after = bra.view(batch, size, count, -1)
    before = ket.view(batch, count, -1, size)
    gradient = torch.empty_like(matrix)
    for value in range(count):
        # As (ket braᴴ)ᴴ: BLAS conjugates only what it transposes.
        left, right = before[:, value].mT, after[:, :, value].mH
        if batch == 1:
            gradient[0, value] = (left[0] @ right[0]).mH
        elif len(matrix) == 1:
            gradient[0, value] = (left @ right).sum(0).mH
        else:
            gradient[:, value] = (left @ right).mH
    return gradient


def added_up(local: Tensor, transport: Transport | None) -> Tensor:
    """The sum of all ranks' tensors [M], in the order of ranks, the same on all."""
    if transport is None:
        return local.clone()
    everyone = local.new_empty(transport.size * len(local))
    transport.all_gather(local.contiguous(), everyone, [len(local)] * transport.size)
    return everyone.view(transport.size, -1).sum(0)


def _inverse(permutation: Sequence[int]) -> list[int]:
    """The inverse of a permutation of axes."""
    return sorted(range(len(permutation)), key=permutation.__getitem__)
