"""States that move through a circuit's blocks, forwards and backwards.

A state may be split into parts, each of which has the amplitudes with some high bits of the index.
A rank has one or several. Each part is computed by itself, with the same calls wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lockstep.comm.transport import Transport, offsets
from lockstep.systems.quantum.circuits.fusion import Block, Move
from lockstep.systems.quantum.simulation.parts import Pool, StatePart

_LARGE = 1 << 13
"""Amplitudes from which on a product for each state is faster than a batched one and a copy."""


class Moving:
    """States that blocks act on one after the other, alternating between two buffers.

    Attributes:
        states: the current states, [L·B, 2^m]: those of the first of L parts first. The initial
            states are not changed.
    """

    def __init__(self, states: Tensor, part: StatePart) -> None:
        """Start from some states.

        Args:
            states: initial states, [L·B, 2^m], complex.
            part: the parts that they belong to; memory for new states comes from its pool, and is
                returned to it.
        """
        self.states = states
        self._size = len(states) << part.num_local
        self._part = part
        self._pool = part.pool
        self._memory: Tensor | None = None  # of the current states, if not initial
        self._spare: Tensor | None = None

    def apply(self, matrix: Tensor, block: Block) -> None:
        """Apply a block to states whose axes are in its order: [B, C R K] becomes [B, K C R].

        Args:
            matrix: complex matrices of the block, [B or 1, C, K, K].
            block: the block, which says which of them a part takes.
        """
        target = self._target()
        size = matrix.shape[2]
        for own, states, place in self._each_part(block, target):
            count = own.stop - own.start
            before = states.view(len(states), count, -1, size)
            after = place.view(len(states), size, count, -1)
            for value in range(count):
                _product(matrix[:, own.start + value], before[:, value].mT, after[:, :, value])
        self._swap_buffers(target)

    def keep(self) -> tuple[Tensor, Tensor | None]:
        """The current states, which will not be overwritten, and their memory."""
        if self.states.numel() < self._size:
            return self.states.clone(), None
        memory, self._memory = self._memory, None
        return self.states, memory

    def release(self) -> None:
        """Return the memory that is not in use to the pool."""
        if self._spare is not None:
            self._pool.give(self._spare)
            self._spare = None

    def undo(self, matrix: Tensor, block: Block) -> None:
        """The inverse of `apply`: [B, K C R] becomes [B, C R K]; with the same arguments."""
        target = self._target()
        size = matrix.shape[2]
        conjugate = matrix.conj().resolve_conj()
        for own, states, place in self._each_part(block, target):
            count = own.stop - own.start
            after = states.view(len(states), size, count, -1)
            before = place.view(len(states), count, -1, size)
            for value in range(count):
                _product(after[:, :, value].mT, conjugate[:, own.start + value], before[:, value])
        self._swap_buffers(target)

    def _each_part(self, block: Block, target: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """For each part, the slice of its matrices, its states, and its part of `target`."""
        return zip(
            self._part.matrices_of(block),
            self.states.chunk(self._part.num_here),
            target.chunk(self._part.num_here),
            strict=True,
        )

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
        """The inverse of `move`; of axes that were added, the amplitudes at |0> remain."""
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
        self._swap_buffers(target)

    def _drop_axes(self, count: int) -> None:
        target = self._target(self.states.shape[1] >> count)
        target.copy_(self.states.view(len(target), -1, 1 << count)[..., 0])
        self._swap_buffers(target)

    def _exchange(self) -> None:
        """Swap the axes of the parts with the first local ones."""
        part = self._part
        count = self.states.shape[1] // part.num_parts
        # From [from here, B, to, count] to [to, from here, B, count].
        parcels = self.states.view(part.num_here, -1, part.num_parts, count).permute(2, 0, 1, 3)
        target = self._target()
        if part.transport is None:
            target.view(parcels.shape[0], -1, parcels.shape[1], count).copy_(
                parcels.permute(0, 2, 1, 3)
            )
        else:
            self._exchange_ranks(parcels.contiguous(), part.transport, target)
        self._swap_buffers(target)

    def _exchange_ranks(self, parcels: Tensor, transport: Transport, target: Tensor) -> None:
        """Send parcels [to, from here, B, count], and write the received ones into `target`."""
        part, size = self._part, parcels[0, 0].numel()
        batch = parcels.shape[2]
        direct = part.num_here == batch == 1  # parcels arrive in the order of `target`
        arrived = target if direct else torch.empty_like(target)
        send, recv = (torch.view_as_real(t).view(-1) for t in (parcels, arrived))
        counts = [2 * number * part.num_here * size for number in part.counts]
        transport.all_to_all(send, counts, offsets(counts), recv, counts)
        if not direct:
            places = target.view(part.num_here, batch, part.num_parts, -1)
            sources = arrived.view(-1).split_with_sizes([number // 2 for number in counts])
            for place, source in zip(places.split_with_sizes(part.counts, 2), sources, strict=True):
                # From [to here, from there, B, count] to [to here, B, from there, count].
                own = source.view(part.num_here, place.shape[2], batch, -1)
                place.copy_(own.transpose(1, 2))

    def _permute(self, permutation: Sequence[int]) -> None:
        target = self._target()
        shape = (len(target), *(2,) * len(permutation))
        moved = self.states.view(shape).permute(0, *(p + 1 for p in permutation))
        target.view(shape).copy_(moved)
        self._swap_buffers(target)

    def _target(self, size: int | None = None) -> Tensor:
        """Memory for the next states, with as many amplitudes as the current ones or `size`."""
        count, present = self.states.shape
        size = size or present
        if self._spare is None:
            self._spare = self._pool.take(self._size, self.states)
        return self._spare[: count * size].view(count, size)

    def _swap_buffers(self, target: Tensor) -> None:
        self._memory, self._spare = self._spare, self._memory
        self.states = target


class Kept(dict[int, Tensor]):
    """States in the middle of a circuit, by the number of the block that comes next.

    Their memory goes back to the pool when the graph of the backward pass is freed.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self._memory: list[Tensor] = []

    def add(self, number: int, moving: Moving) -> None:
        """Keep the current states and their memory."""
        self[number], memory = moving.keep()
        if memory is not None:
            self._memory.append(memory)

    def __del__(self) -> None:
        for memory in getattr(self, "_memory", ()):  # `__init__` may have failed
            self._pool.give(memory)


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """The product left @ right into `out`, all of them [B or 1, rows, columns]."""
    if len(out) == 1 or out[0].numel() >= _LARGE:
        for row in range(len(out)):
            torch.mm(left[row % len(left)], right[row % len(right)], out=out[row])
    else:
        out.copy_(left @ right)


def parts_gradient(
    part: StatePart, block: Block, matrix: Tensor, ket: Tensor, bra: Tensor
) -> Tensor:
    """For each part here, its gradient with respect to a block's matrices, [L, b, C, K, K].

    Args:
        part: the parts.
        block: the block.
        matrix: its matrices, [b, C, K, K], b being 1 or B.
        ket: states before the block, [L·B, 2^m].
        bra: gradient of the states after the block, [L·B, 2^m].
    """
    if part.num_parts == 1:
        return matrix_gradient(matrix, ket, bra)[None]
    gradients = matrix.new_zeros(part.num_here, *matrix.shape)
    states, ends = ket.chunk(part.num_here), bra.chunk(part.num_here)
    for number, own in enumerate(part.matrices_of(block)):
        found = matrix_gradient(matrix[:, own], states[number], ends[number])
        gradients[number, :, own] = found
    return gradients


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


def _inverse(permutation: Sequence[int]) -> list[int]:
    """The inverse of a permutation of axes."""
    return sorted(range(len(permutation)), key=permutation.__getitem__)
