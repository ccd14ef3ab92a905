"""The matrices of fused blocks, as differentiable functions of the gates' angles.

Blocks that hold the same gates in the same places are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lockstep.quantum.circuit import Gate
from lockstep.quantum.fusion import Block

_Places = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Step:
    """Constant matrices, or gates with angles in turn on the same local qubits.

    Attributes:
        bits: local target bits it acts on, low bit first; none for a constant on all of them.
        controls: (local target bit, value) that it needs.
        selected: for each value of the block's controls, whether it acts.
        constant: [C, K, K], where there are no gates.
        gates: kinds are the same in all blocks of the batch.
        numbers: for each gate, its place among the angles of a block.
    """

    bits: _Places
    controls: tuple[tuple[int, int], ...]
    selected: tuple[bool, ...]
    constant: Tensor | None
    gates: tuple[Gate, ...]
    numbers: _Places

    @property
    def is_run(self) -> bool:
        """Whether it is one or more gates with angles on a single qubit."""
        return len(self.bits) == 1 and not self.controls


class BlockMatrices:
    """Makes the matrices of all blocks of a plan."""

    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype, device: torch.device) -> None:
        """Sort blocks by what they hold.

        Args:
            blocks: of a plan.
            dtype: complex64 or complex128.
            device: where matrices are to be.
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
        """Matrices [B, C, K, K] of each block, from angles [B, gates]; B is 1 without angles."""
        matrices: list[Tensor | None] = [None] * self._count
        for group in self._groups:
            found = group(angles)
            for place, member in enumerate(group.members):
                matrices[member] = found[:, place]
        return [m for m in matrices if m is not None]


class _Group:
    """Blocks that differ in the values of their angles only."""

    def __init__(
        self, members: list[int], blocks: list[Block], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.members = members
        self._dtype = dtype
        self._num_bits = len(blocks[0].targets)
        self._num_values = 1 << len(blocks[0].controls)
        numbers = [[n for _, n in block.gates if n >= 0] for block in blocks]
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=device)
        steps = _steps(blocks[0])
        rows = _row_order(blocks[0])
        if rows is not None:
            identity = torch.eye(1 << self._num_bits, dtype=torch.complex128)
            _add_constant(steps, identity[rows].expand(self._num_values, -1, -1))
        self._steps = [_moved(step, dtype, device) for step in steps]
        self._runs = _Runs([s for s in self._steps if s.is_run], dtype, device)

    def __call__(self, angles: Tensor) -> Tensor:
        """[B, members, C, K, K]."""
        if self._numbers.numel():
            own = angles[:, self._numbers]
        else:
            own = angles.new_zeros(1, len(self.members), 0)
        runs = iter(self._runs(own))
        product: Tensor | None = None
        wave: dict[int, Tensor] = {}
        for step in self._steps:
            if step.is_run and all(step.selected) and step.bits[0] not in wave:
                wave[step.bits[0]] = next(runs)
                continue
            product = self._after_wave(wave, product)
            if step.is_run and all(step.selected):
                wave = {step.bits[0]: next(runs)}
                continue
            wave = {}
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
            return _act(matrix.unsqueeze(2), product, (bit,))
        identity = torch.eye(2, dtype=self._dtype, device=next(iter(wave.values())).device)
        factors = [wave.get(bit, identity) for bit in range(self._num_bits)]
        whole = factors[0]
        for factor in factors[1:]:
            whole = (factor[..., :, None, :, None] * whole[..., None, :, None, :]).flatten(-2)
            whole = whole.flatten(-3, -2)
        whole = whole.unsqueeze(2)
        return whole if product is None else whole @ product

    def _run(self, step: _Step, own: Tensor) -> Tensor:
        """The product of a step's gates, of more than one qubit or with controls."""
        matrices = (
            _gate_matrix(gate, own[..., number], self._dtype)
            for gate, number in zip(step.gates, step.numbers, strict=True)
        )
        product = reduce(lambda before, matrix: matrix @ before, matrices)
        return _with_controls(product, [value for _, value in step.controls])

    def _apply(self, step: _Step, matrix: Tensor, product: Tensor | None) -> Tensor:
        before = self._or_identity(product)
        after = _act(matrix.unsqueeze(2), before, (*step.bits, *(bit for bit, _ in step.controls)))
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

    def __init__(self, steps: Sequence[_Step], dtype: torch.dtype, device: torch.device) -> None:
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
        found: list[Tensor | None] = [None] * self._count
        first = 0
        for length, members in self._lengths.items():
            last = first + length * len(members)
            own_gates = matrices[:, :, first:last].reshape(
                *matrices.shape[:2], length, len(members), 2, 2
            )
            product = reduce(lambda before, matrix: matrix @ before, own_gates.unbind(2))
            for member, matrix in zip(members, product.unbind(2), strict=True):
                found[member] = matrix
            first = last
        return [matrix for matrix in found if matrix is not None]


def _gate_matrix(gate: Gate, angles: Tensor, dtype: torch.dtype) -> Tensor:
    kind = gate.kind
    assert kind.cosine is not None
    assert kind.sine is not None
    phase = (angles * kind.frequency)[..., None, None]
    constant, cosine, sine = (
        m.to(angles.device, dtype) for m in (kind.constant, kind.cosine, kind.sine)
    )
    return constant + phase.cos() * cosine + phase.sin() * sine


def _with_controls(matrix: Tensor, values: Sequence[int]) -> Tensor:
    """A matrix that acts only where further bits, above its own, have these values."""
    for value in values:
        size = matrix.shape[-1]
        identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        zero = torch.zeros_like(matrix)
        low, high = (identity, matrix) if value else (matrix, identity)
        top, bottom = torch.cat([low, zero], -1), torch.cat([zero, high], -1)
        matrix = torch.cat([top, bottom], -2)
    return matrix


def _act(matrix: Tensor, product: Tensor, bits: Sequence[int]) -> Tensor:
    """A matrix [..., 2^m, 2^m] on bits (low first) of the rows of a product [..., K, K]."""
    *lead, size, columns = product.shape
    num_bits = size.bit_length() - 1
    if len(bits) == 1:
        rows = (size >> (bits[0] + 1), 2, columns << bits[0])
        after = matrix.unsqueeze(-3) @ product.reshape(*lead, *rows)
        return after.reshape(*after.shape[:-3], size, columns)
    axes = [len(lead) + num_bits - 1 - bit for bit in reversed(bits)]
    front = list(range(len(lead), len(lead) + len(bits)))
    moved = product.reshape(*lead, *(2,) * num_bits, columns).movedim(axes, front)
    after = matrix @ moved.reshape(*lead, 1 << len(bits), -1)
    lead = list(after.shape[:-2])
    after = after.reshape(*lead, *(2,) * num_bits, columns).movedim(front, axes)
    return after.reshape(*lead, size, columns)


def _signature(block: Block) -> object:
    places = {q: i for i, q in enumerate(reversed(block.targets))}
    fronts = {q: i for i, q in enumerate(reversed(block.controls))}

    def place(qubit: int) -> tuple[bool, int]:
        return (qubit in fronts, fronts[qubit] if qubit in fronts else places[qubit])

    gates = tuple(
        (
            gate.name,
            None if gate.matrix is None else id(gate.matrix),
            number >= 0,
            tuple(map(place, gate.every_qubit)),
            gate.control_state,
        )
        for gate, number in block.gates
    )
    after = tuple(places[q] for q in block.after)
    return (len(block.targets), len(block.controls), after, gates)


def _steps(block: Block) -> list[_Step]:
    """The block's gates in turn: those without angles multiplied together, runs gathered."""
    places = {q: i for i, q in enumerate(reversed(block.targets))}
    steps: list[_Step] = []
    seen = 0
    for gate, number in block.gates:
        inside = tuple(
            (places[c], v)
            for c, v in zip(gate.controls, gate.control_state, strict=True)
            if c in places
        )
        bits = tuple(places[q] for q in gate.qubits)
        selected = _selected(gate, block.controls)
        if number < 0:
            constant = _constant(gate, bits, inside, selected, 1 << len(block.targets))
            _add_constant(steps, constant)
            continue
        step = _Step(bits, inside, selected, None, (gate,), (seen,))
        last = _same_place(steps, step)
        if last is not None:
            joined = (*steps[last].gates, gate), (*steps[last].numbers, seen)
            step = _Step(bits, inside, selected, None, *joined)
            steps[last] = step
        else:
            steps.append(step)
        seen += 1
    return steps


def _add_constant(steps: list[_Step], constant: Tensor) -> None:
    """Append a constant [C, K, K], or multiply it onto the one that is last."""
    before = steps[-1].constant if steps else None
    if before is not None:
        steps.pop()
        constant = constant @ before
    steps.append(_Step((), (), (), constant, (), ()))


def _same_place(steps: list[_Step], step: _Step) -> int | None:
    """The step that `step` may join, for only steps on other bits lie between."""
    for number in range(len(steps) - 1, -1, -1):
        other = steps[number]
        if other.constant is not None:
            return None
        if (other.bits, other.controls, other.selected) == (
            step.bits,
            step.controls,
            step.selected,
        ):
            return number
        mine = {*step.bits, *(b for b, _ in step.controls)}
        if mine & {*other.bits, *(b for b, _ in other.controls)}:
            return None
    return None


def _selected(gate: Gate, controls: Sequence[int]) -> tuple[bool, ...]:
    """For each value of the block's controls (high bit first), whether the gate acts."""
    wanted = dict(zip(gate.controls, gate.control_state, strict=True))
    bits = [(i, wanted[q]) for i, q in enumerate(reversed(controls)) if q in wanted]
    return tuple(all(v >> i & 1 == bit for i, bit in bits) for v in range(1 << len(controls)))


def _constant(
    gate: Gate,
    bits: _Places,
    inside: tuple[tuple[int, int], ...],
    selected: tuple[bool, ...],
    size: int,
) -> Tensor:
    identity = torch.eye(size, dtype=torch.complex128)
    matrix = _with_controls(gate.kind.constant, [value for _, value in inside])
    acting = _act(matrix, identity, (*bits, *(bit for bit, _ in inside)))
    return torch.stack([acting if chosen else identity for chosen in selected])


def _row_order(block: Block) -> list[int] | None:
    """For each row in the order of `after`, its number in the order of `targets`."""
    if block.after == block.targets:
        return None
    places = {q: i for i, q in enumerate(reversed(block.targets))}
    moved = [places[q] for q in reversed(block.after)]
    return [
        sum((row >> i & 1) << place for i, place in enumerate(moved))
        for row in range(1 << len(moved))
    ]


def _moved(step: _Step, dtype: torch.dtype, device: torch.device) -> _Step:
    if step.constant is None:
        return step
    constant = step.constant.to(device, dtype)
    return _Step(step.bits, step.controls, step.selected, constant, step.gates, step.numbers)
