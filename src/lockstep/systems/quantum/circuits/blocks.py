"""The matrices of fused blocks, as differentiable functions of the gates' angles.

Blocks that hold the same gates in the same order and on the same local qubits are computed
together. Inside a block, qubits are numbered as the bits of a matrix's row: bit 0 is the last
target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from lockstep.systems.quantum.circuits.circuit import Gate
from lockstep.systems.quantum.circuits.fusion import Block
from lockstep.systems.quantum.circuits.gates import act, with_controls


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
            groups.setdefault(_signature(block), []).append(number)
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
        matrices: dict[int, Tensor] = {}
        for group in self._groups:
            own = group(angles)
            matrices.update({member: own[:, i] for i, member in enumerate(group.members)})
        return [matrices[number] for number in range(self._count)]


def _signature(block: Block) -> object:
    """A key that is equal for blocks whose matrices can be computed together."""
    where = {q: ("target", bit) for bit, q in enumerate(block.targets)}
    where |= {q: ("control", bit) for bit, q in enumerate(block.controls)}
    gates = tuple(
        (
            gate.name,
            None if gate.matrix is None else id(gate.matrix),
            number >= 0,
            tuple(where[q] for q in gate.every_qubit),
            gate.control_state,
        )
        for gate, number in block.gates
    )
    after = tuple(where[q] for q in block.after)
    return (len(block.targets), len(block.controls), after, gates, block.varies)


class _Group:
    """Blocks that differ only in the values of their angles."""

    def __init__(
        self, members: list[int], blocks: list[Block], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.members = members
        self._dtype = dtype
        block = blocks[0]
        self._num_bits = len(block.targets)
        self._num_values = 1 << len(block.controls)
        self._varies = block.varies
        numbers = [[n for _, n in each.gates if n >= 0] for each in blocks]
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=device)
        steps = _steps_of(block)
        if block.after != block.targets:
            identity = torch.eye(1 << self._num_bits, dtype=torch.complex128)
            reordered = identity[_row_order(block)].expand(self._num_values, -1, -1)
            _add_constant(steps, reordered)
        self._steps = [
            step
            if step.constant is None
            else replace(step, constant=step.constant.to(device, dtype))
            for step in steps
        ]
        self._runs = _Runs([s for s in self._steps if s.is_run], dtype, device)

    def __call__(self, angles: Tensor) -> Tensor:
        """The matrices [B, members, C, K, K] of all members, from angles [B, gates]."""
        if self._numbers.numel():
            block_angles = (angles if self._varies else angles[:1])[:, self._numbers]
        else:
            block_angles = angles.new_zeros(1, len(self.members), 0)
        runs = iter(self._runs(block_angles))
        product: Tensor | None = None
        # Single-qubit matrices on different bits, to be applied as one Kronecker product.
        wave: dict[int, Tensor] = {}
        for step in self._steps:
            in_wave = step.is_run and all(step.selected)
            if not in_wave or step.bits[0] in wave:
                product, wave = self._after_wave(wave, product), {}
            if in_wave:
                wave[step.bits[0]] = next(runs)
            elif step.constant is not None:
                product = step.constant[None, None] if product is None else step.constant @ product
            else:
                matrix = next(runs) if step.is_run else self._run(step, block_angles)
                product = self._apply(step, matrix, product)
        product = self._after_wave(wave, product)
        size = 1 << self._num_bits
        return self._or_identity(product).expand(
            len(block_angles), len(self.members), self._num_values, size, size
        )

    def _after_wave(self, wave: dict[int, Tensor], product: Tensor | None) -> Tensor | None:
        """Apply matrices [B, members, 2, 2] of different bits, as one Kronecker product."""
        if not wave:
            return product
        if len(wave) == 1 and product is not None:
            ((bit, matrix),) = wave.items()
            return act(matrix.unsqueeze(2), product, (bit,))
        identity = torch.eye(2, dtype=self._dtype, device=next(iter(wave.values())).device)
        whole, *factors = (wave.get(bit, identity) for bit in range(self._num_bits))
        for factor in factors:
            whole = (factor[..., :, None, :, None] * whole[..., None, :, None, :]).flatten(-2)
            whole = whole.flatten(-3, -2)
        whole = whole.unsqueeze(2)
        return whole if product is None else whole @ product

    def _run(self, step: _Step, own: Tensor) -> Tensor:
        """The product of a step's gates, of more than one qubit or with controls."""
        matrices = (
            gate.kind.matrices(own[..., number], self._dtype)
            for gate, number in zip(step.gates, step.numbers, strict=True)
        )
        product = reduce(lambda before, matrix: matrix @ before, matrices)
        return with_controls(product, [value for _, value in step.controls])

    def _apply(self, step: _Step, matrix: Tensor, product: Tensor | None) -> Tensor:
        before = self._or_identity(product)
        after = act(matrix.unsqueeze(2), before, step.every_bit)
        if all(step.selected):
            return after
        selected = torch.tensor(step.selected, device=matrix.device)[:, None, None]
        return torch.where(selected, after, before)

    def _or_identity(self, product: Tensor | None) -> Tensor:
        if product is not None:
            return product
        size = 1 << self._num_bits
        return torch.eye(size, dtype=self._dtype, device=self._numbers.device)[None, None, None]


class _Runs:
    """Runs of gates on one qubit each; those of the same length are computed together."""

    def __init__(self, steps: Sequence[_Step], dtype: torch.dtype, device: torch.device) -> None:
        self._lengths: dict[int, list[int]] = {}
        for number, step in enumerate(steps):
            self._lengths.setdefault(len(step.gates), []).append(number)
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
        if not self._lengths:
            return []
        phase = own.index_select(-1, self._numbers) * self._frequencies
        constant, cosine, sine = self._terms
        matrices = phase.cos()[..., None, None] * cosine + constant
        matrices = torch.addcmul(matrices, phase.sin()[..., None, None].to(sine.dtype), sine)
        products: dict[int, Tensor] = {}
        first = 0
        for length, members in self._lengths.items():
            last = first + length * len(members)
            gates = matrices[:, :, first:last].reshape(
                *matrices.shape[:2], length, len(members), 2, 2
            )
            product = reduce(lambda before, matrix: matrix @ before, gates.unbind(2))
            products.update(zip(members, product.unbind(2), strict=True))
            first = last
        return [products[number] for number in range(len(products))]


@dataclass(frozen=True, eq=False)
class _Step:
    """Constant matrices, or a sequence of gates with angles on the same local qubits.

    Attributes:
        bits: local target bits it acts on, low bit first; empty for a constant on all of them.
        controls: (local target bit, value) of each control inside the block.
        selected: for each value of the block's controls, whether it acts.
        constant: the product of gates without angles, [C, K, K]; None where there are `gates`.
        gates: gates with angles, applied one after the other; of the same kinds in all blocks of a
            group.
        numbers: for each gate, the position of its angle among those of a block.
    """

    bits: tuple[int, ...] = ()
    controls: tuple[tuple[int, int], ...] = ()
    selected: tuple[bool, ...] = ()
    constant: Tensor | None = None
    gates: tuple[Gate, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def is_run(self) -> bool:
        """Whether it is one or more gates with angles on a single qubit."""
        return len(self.bits) == 1 and not self.controls

    @property
    def every_bit(self) -> tuple[int, ...]:
        """Targets, then controls inside the block."""
        return (*self.bits, *(bit for bit, _ in self.controls))


def _steps_of(block: Block) -> list[_Step]:
    """The block's gates in order: those without angles multiplied together, runs gathered."""
    bit_of = {q: bit for bit, q in enumerate(reversed(block.targets))}
    steps: list[_Step] = []
    seen = 0
    for gate, number in block.gates:
        values = dict(zip(gate.controls, gate.control_state, strict=True))
        outside = [(i, values[q]) for i, q in enumerate(reversed(block.controls)) if q in values]
        step = _Step(
            bits=tuple(bit_of[q] for q in gate.qubits),
            controls=tuple((bit_of[q], value) for q, value in values.items() if q in bit_of),
            selected=tuple(
                all(v >> i & 1 == value for i, value in outside)
                for v in range(1 << len(block.controls))
            ),
            gates=(gate,),
            numbers=(seen,),
        )
        if number < 0:
            _add_constant(steps, _constant(step, 1 << len(block.targets)))
            continue
        seen += 1
        last = _joinable(steps, step)
        if last is None:
            steps.append(step)
        else:
            run = steps[last]
            steps[last] = replace(
                run, gates=(*run.gates, gate), numbers=(*run.numbers, *step.numbers)
            )
    return steps


def _add_constant(steps: list[_Step], constant: Tensor) -> None:
    """Append a constant [C, K, K], or multiply it onto the one that is last."""
    before = steps[-1].constant if steps else None
    if before is not None:
        steps.pop()
        constant = constant @ before
    steps.append(_Step(constant=constant))


def _constant(step: _Step, size: int) -> Tensor:
    """The matrices [C, size, size] of a step whose one gate has no angle."""
    identity = torch.eye(size, dtype=torch.complex128)
    matrix = with_controls(step.gates[0].kind.constant, [value for _, value in step.controls])
    acting = act(matrix, identity, step.every_bit)
    return torch.stack([acting if selected else identity for selected in step.selected])


def _joinable(steps: list[_Step], step: _Step) -> int | None:
    """The number of the step that `step` may join: only steps on other bits are in between."""
    for number, other in reversed([*enumerate(steps)]):
        if other.constant is not None:
            return None
        keys = [(each.bits, each.controls, each.selected) for each in (other, step)]
        if keys[0] == keys[1]:
            return number
        if {*step.every_bit} & {*other.every_bit}:
            return None
    return None


def _row_order(block: Block) -> list[int]:
    """For each row in the order of `after`, its number in the order of `targets`."""
    bit_of = {q: bit for bit, q in enumerate(reversed(block.targets))}
    bits = [bit_of[q] for q in reversed(block.after)]
    return [
        sum((row >> i & 1) << bit for i, bit in enumerate(bits)) for row in range(1 << len(bits))
    ]
