"""The steps of a fused block, as operations on the local bits of its targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.systems.quantum.circuits.circuit import Gate
from lockstep.systems.quantum.circuits.fusion import Block

Places = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Step:
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

    bits: Places
    controls: tuple[tuple[int, int], ...]
    selected: tuple[bool, ...]
    constant: Tensor | None
    gates: tuple[Gate, ...]
    numbers: Places

    @property
    def is_run(self) -> bool:
        """Whether it is one or more gates with angles on a single qubit."""
        return len(self.bits) == 1 and not self.controls


def signature(block: Block) -> object:
    """A key that is equal for blocks whose matrices can be computed together."""
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


def steps_of(block: Block) -> list[Step]:
    """The block's gates in order: those without angles multiplied together, runs gathered."""
    places = {q: i for i, q in enumerate(reversed(block.targets))}
    steps: list[Step] = []
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
            add_constant(steps, constant)
            continue
        step = Step(bits, inside, selected, None, (gate,), (seen,))
        last = _same_place(steps, step)
        if last is not None:
            joined = (*steps[last].gates, gate), (*steps[last].numbers, seen)
            step = Step(bits, inside, selected, None, *joined)
            steps[last] = step
        else:
            steps.append(step)
        seen += 1
    return steps


def add_constant(steps: list[Step], constant: Tensor) -> None:
    """Append a constant [C, K, K], or multiply it onto the one that is last."""
    before = steps[-1].constant if steps else None
    if before is not None:
        steps.pop()
        constant = constant @ before
    steps.append(Step((), (), (), constant, (), ()))


def _same_place(steps: list[Step], step: Step) -> int | None:
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
    bits: Places,
    inside: tuple[tuple[int, int], ...],
    selected: tuple[bool, ...],
    size: int,
) -> Tensor:
    identity = torch.eye(size, dtype=torch.complex128)
    matrix = with_controls(gate.kind.constant, [value for _, value in inside])
    acting = act(matrix, identity, (*bits, *(bit for bit, _ in inside)))
    return torch.stack([acting if chosen else identity for chosen in selected])


def row_order(block: Block) -> list[int] | None:
    """For each row in the order of `after`, its number in the order of `targets`."""
    if block.after == block.targets:
        return None
    places = {q: i for i, q in enumerate(reversed(block.targets))}
    moved = [places[q] for q in reversed(block.after)]
    return [
        sum((row >> i & 1) << place for i, place in enumerate(moved))
        for row in range(1 << len(moved))
    ]


def moved(step: Step, dtype: torch.dtype, device: torch.device) -> Step:
    """The step with its constant in this dtype and on this device."""
    if step.constant is None:
        return step
    constant = step.constant.to(device, dtype)
    return Step(step.bits, step.controls, step.selected, constant, step.gates, step.numbers)


def with_controls(matrix: Tensor, values: Sequence[int]) -> Tensor:
    """A matrix that acts only where further bits, above its own, have these values.

    Args:
        matrix: complex matrix [..., K, K].
        values: value 0 or 1 of each of c further bits, low bit first.

    Returns:
        Matrix [..., 2^c K, 2^c K].
    """
    for value in values:
        size = matrix.shape[-1]
        identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        zero = torch.zeros_like(matrix)
        low, high = (identity, matrix) if value else (matrix, identity)
        top, bottom = torch.cat([low, zero], -1), torch.cat([zero, high], -1)
        matrix = torch.cat([top, bottom], -2)
    return matrix


def act(matrix: Tensor, product: Tensor, bits: Sequence[int]) -> Tensor:
    """The product of a matrix, which acts on some bits of the row number, and another matrix.

    Args:
        matrix: complex matrix [..., 2^m, 2^m].
        product: complex matrix [..., K, K] to multiply it with.
        bits: the m bits of the row number, low bit first.

    Returns:
        Matrix [..., K, K].
    """
    *lead, size, columns = product.shape
    num_bits = size.bit_length() - 1
    if len(bits) == 1:
        rows = (size >> (bits[0] + 1), 2, columns << bits[0])
        after = matrix.unsqueeze(-3) @ product.reshape(*lead, *rows)
        return after.reshape(*after.shape[:-3], size, columns)
    axes = [len(lead) + num_bits - 1 - bit for bit in reversed(bits)]
    front = list(range(len(lead), len(lead) + len(bits)))
    moved = product.reshape(*lead, *(2,) * num_bits, columns).movedim(axes, front)
    after = matrix @ moved.reshape(*lead, 1 << len(bits), columns * size >> len(bits))
    lead = list(after.shape[:-2])
    after = after.reshape(*lead, *(2,) * num_bits, columns).movedim(front, axes)
    return after.reshape(*lead, size, columns)
