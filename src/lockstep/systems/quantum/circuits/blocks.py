"""The matrices of fused blocks, as differentiable functions of the gates' angles.

Blocks that hold the same gates in the same places are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from lockstep.systems.quantum.circuits.fusion import Block
from lockstep.systems.quantum.circuits.steps import (
    Step,
    act,
    add_constant,
    moved,
    row_order,
    signature,
    steps_of,
    with_controls,
)


class BlockMatrices:
    """Computes the matrices of all blocks of a plan."""

    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype, device: torch.device) -> None:
        """Group the blocks by the gates they hold.

        Args:
            blocks: the blocks of a plan, in the order in which they act.
            dtype: dtype of the matrices, complex64 or complex128.
            device: device on which the matrices are computed.
        """
        groups: dict[object, list[int]] = {}
        for number, block in enumerate(blocks):
            groups.setdefault((signature(block), block.varies), []).append(number)
        self._count = len(blocks)
        self._groups = [
            _Group(members, [blocks[m] for m in members], dtype, device)
            for members in groups.values()
        ]

    def __call__(self, angles: Tensor) -> list[Tensor]:
        """The matrices of all blocks.

        Args:
            angles: the angles in radians of all gates that have one, real, [B, gates]; those of
                gates that do not vary are taken from the first row.

        Returns:
            For each block, [B, C, K, K] with C values of its controls and K = 2^targets; B is 1
            where no gate of the block has an angle that varies.
        """
        matrices: list[Tensor | None] = [None] * self._count
        for group in self._groups:
            own = group(angles)
            for place, member in enumerate(group.members):
                matrices[member] = own[:, place]
        return [m for m in matrices if m is not None]


class _Group:
    """Blocks that differ only in the values of their angles."""

    def __init__(
        self, members: list[int], blocks: list[Block], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.members = members
        self._dtype = dtype
        self._num_bits = len(blocks[0].targets)
        self._num_values = 1 << len(blocks[0].controls)
        numbers = [[n for _, n in block.gates if n >= 0] for block in blocks]
        self._varies = blocks[0].varies
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=device)
        steps = steps_of(blocks[0])
        rows = row_order(blocks[0])
        if rows is not None:
            identity = torch.eye(1 << self._num_bits, dtype=torch.complex128)
            add_constant(steps, identity[rows].expand(self._num_values, -1, -1))
        self._steps = [moved(step, dtype, device) for step in steps]
        self._runs = _Runs([s for s in self._steps if s.is_run], dtype, device)

    def __call__(self, angles: Tensor) -> Tensor:
        """The matrices [B, members, C, K, K] of all members, from angles [B, gates]."""
        if self._numbers.numel():
            own = (angles if self._varies else angles[:1])[:, self._numbers]
        else:
            own = angles.new_zeros(1, len(self.members), 0)
        runs = iter(self._runs(own))
        product: Tensor | None = None
        wave: dict[int, Tensor] = {}
        for step in self._steps:
            in_wave = step.is_run and all(step.selected)
            if not in_wave or step.bits[0] in wave:
                product, wave = self._after_wave(wave, product), {}
            if in_wave:
                wave[step.bits[0]] = next(runs)
                continue
            if step.constant is not None:
                product = step.constant[None, None] if product is None else step.constant @ product
            else:
                matrix = next(runs) if step.is_run else self._run(step, own)
                product = self._apply(step, matrix, product)
        product = self._after_wave(wave, product)
        size = 1 << self._num_bits
        return self._or_identity(product).expand(
            len(own), len(self.members), self._num_values, size, size
        )

    def _after_wave(self, wave: dict[int, Tensor], product: Tensor | None) -> Tensor | None:
        """Apply matrices [B, members, 2, 2] of different bits, as one Kronecker product."""
        if not wave:
            return product
        if len(wave) == 1 and product is not None:
            ((bit, matrix),) = wave.items()
            return act(matrix.unsqueeze(2), product, (bit,))
        identity = torch.eye(2, dtype=self._dtype, device=next(iter(wave.values())).device)
        factors = [wave.get(bit, identity) for bit in range(self._num_bits)]
        whole = factors[0]
        for factor in factors[1:]:
            whole = (factor[..., :, None, :, None] * whole[..., None, :, None, :]).flatten(-2)
            whole = whole.flatten(-3, -2)
        whole = whole.unsqueeze(2)
        return whole if product is None else whole @ product

    def _run(self, step: Step, own: Tensor) -> Tensor:
        """The product of a step's gates, of more than one qubit or with controls."""
        matrices = (
            gate.kind.matrices(own[..., number], self._dtype)
            for gate, number in zip(step.gates, step.numbers, strict=True)
        )
        product = reduce(lambda before, matrix: matrix @ before, matrices)
        return with_controls(product, [value for _, value in step.controls])

    def _apply(self, step: Step, matrix: Tensor, product: Tensor | None) -> Tensor:
        before = self._or_identity(product)
        after = act(matrix.unsqueeze(2), before, (*step.bits, *(bit for bit, _ in step.controls)))
        if all(step.selected):
            return after
        chosen = torch.tensor(step.selected, device=matrix.device)[:, None, None]
        return torch.where(chosen, after, before)

    def _or_identity(self, product: Tensor | None) -> Tensor:
        if product is not None:
            return product
        size = 1 << self._num_bits
        return torch.eye(size, dtype=self._dtype, device=self._numbers.device)[None, None, None]


class _Runs:
    """Runs of gates on one qubit each, those of the same length together."""

    def __init__(self, steps: Sequence[Step], dtype: torch.dtype, device: torch.device) -> None:
        self._lengths: dict[int, list[int]] = {}
        for number, step in enumerate(steps):
            self._lengths.setdefault(len(step.gates), []).append(number)
        self._count = len(steps)
        gates, numbers = [], []
        for length, members in self._lengths.items():
            for place in range(length):
                gates += [steps[m].gates[place] for m in members]
                numbers += [steps[m].numbers[place] for m in members]
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=device)
        frequencies = torch.tensor([g.kind.frequency for g in gates], dtype=torch.float64)
        self._frequencies = frequencies.to(device, dtype.to_real())
        self._terms = [
            torch.stack([getattr(g.kind, name) for g in gates]).to(device, dtype)
            for name in ("constant", "cosine", "sine")
            if gates
        ]

    def __call__(self, own: Tensor) -> list[Tensor]:
        """The matrices [B, members, 2, 2] of all runs, from angles [B, members, angles]."""
        if not self._count:
            return []
        phase = own.index_select(-1, self._numbers) * self._frequencies
        constant, cosine, sine = self._terms
        matrices = phase.cos()[..., None, None] * cosine + constant
        matrices = torch.addcmul(matrices, phase.sin()[..., None, None].to(sine.dtype), sine)
        products: list[Tensor | None] = [None] * self._count
        first = 0
        for length, members in self._lengths.items():
            last = first + length * len(members)
            own_gates = matrices[:, :, first:last].reshape(
                *matrices.shape[:2], length, len(members), 2, 2
            )
            product = reduce(lambda before, matrix: matrix @ before, own_gates.unbind(2))
            for member, matrix in zip(members, product.unbind(2), strict=True):
                products[member] = matrix
            first = last
        return [matrix for matrix in products if matrix is not None]
