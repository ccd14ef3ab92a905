"""Circuits for tests, and what they do by definition."""

from __future__ import annotations

import math
import random

import torch
from hypothesis import strategies as st
from torch import Tensor

from lockstep.systems.quantum.circuits.angles import Angle, Formula, parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate, unitary
from lockstep.systems.quantum.circuits.gates import KINDS


def ring(num_qubits: int, num_layers: int) -> Circuit:
    """RX, RY, RZ on each qubit and a ring of CNOTs, in each layer."""
    gates, number = [], 0
    for _ in range(num_layers):
        for qubit in range(num_qubits):
            for name in ("rx", "ry", "rz"):
                gates.append(gate(name, qubit, angle=parameter(number)))
                number += 1
        gates += [gate("cx", q, (q + 1) % num_qubits) for q in range(num_qubits)]
    return Circuit(num_qubits, gates)


def by_definition(circuit: Circuit, parameters: Tensor) -> Tensor:
    """The state, one gate and one amplitude at a time."""
    state = torch.zeros(1 << circuit.num_qubits, dtype=torch.complex128)
    state[0] = 1
    angles = iter(circuit.angles(parameters).tolist())
    for each in circuit.gates:
        matrix, kind = each.kind.constant, each.kind
        if each.angle is not None:
            phase = next(angles) * kind.frequency
            matrix = matrix + math.cos(phase) * kind.cosine + math.sin(phase) * kind.sine
        after = torch.zeros_like(state)
        needed = list(zip(each.controls, each.control_state, strict=True))
        for index, amplitude in enumerate(state.tolist()):
            if any(index >> q & 1 != bit for q, bit in needed):
                after[index] += amplitude
                continue
            column = sum((index >> q & 1) << i for i, q in enumerate(each.qubits))
            base = index & ~sum(1 << q for q in each.qubits)
            for row in range(len(matrix)):
                place = base | sum((row >> i & 1) << q for i, q in enumerate(each.qubits))
                after[place] += matrix[row, column] * amplitude
        state = after
    return state


def random_unitary(num_qubits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = 1 << num_qubits
    matrix = torch.randn(size, size, dtype=torch.complex128, generator=generator)
    return torch.linalg.qr(matrix)[0]


@st.composite
def circuits(draw: st.DrawFn, most_qubits: int = 6, num_parameters: int = 3) -> Circuit:
    """Any gates with any controls; parameters used several times, and numbers for angles."""
    num_qubits = draw(st.integers(1, most_qubits))
    gates = []
    for _ in range(draw(st.integers(1, 25))):
        name = draw(st.sampled_from([*KINDS, "unitary"]))
        most = KINDS[name].num_targets if name in KINDS else draw(st.integers(1, 2))
        if most > num_qubits:
            continue
        qubits = draw(st.permutations(range(num_qubits)))
        count = min(draw(st.sampled_from([0, 0, 1, 2])), num_qubits - most)
        controls, targets = qubits[:count], qubits[count : count + most]
        if name == "unitary":
            made = unitary(random_unitary(most, draw(st.integers(0, 5))), *targets)
        else:
            angle = None
            if KINDS[name].has_angle:
                number = draw(st.none() | st.integers(0, num_parameters - 1))
                scale = draw(st.sampled_from([1.0, -0.5, 2.0]))
                angle = Angle(draw(st.floats(-3, 3)), number, scale)
            made = Gate(name, tuple(targets), angle)
        bits = [draw(st.integers(0, 1)) for _ in controls]
        gates.append(made.controlled(*controls, state=bits) if controls else made)
    return Circuit(num_qubits, gates, num_parameters)


def some_parameters(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def dense_state(circuit: Circuit, parameters: Tensor) -> Tensor:
    """The state by dense matrices [2^n, 2^n], one for each gate, that autograd follows."""
    dim = 1 << circuit.num_qubits
    state = torch.zeros(dim, dtype=torch.complex128)
    state[0] = 1
    angles = iter(circuit.angles(parameters))
    for each in circuit.gates:
        matrix, kind = each.kind.constant, each.kind
        if each.angle is not None:
            phase = next(angles) * kind.frequency
            matrix = matrix + phase.cos() * kind.cosine + phase.sin() * kind.sine
        # Entry (row, column) of the whole is entry (own row, own column) of the gate's matrix
        # where all other qubits agree and the controls are as they must be.
        index = torch.arange(dim)
        own = sum((index >> q & 1) << i for i, q in enumerate(each.qubits))
        rest = index & ~sum(1 << q for q in each.qubits)
        same = rest[:, None] == rest[None, :]
        acts = torch.ones(dim, dtype=torch.bool)
        for qubit, bit in zip(each.controls, each.control_state, strict=True):
            acts &= (index >> qubit & 1) == bit
        acting = torch.where(same, matrix[own[:, None], own[None, :]], 0)
        state = torch.where(acts, acting @ state, state)
    return state


def random_circuit(
    source: random.Random, num_qubits: int, num_gates: int, num_parameters: int = 12
) -> Circuit:
    """Any gates with any controls, from a seeded source; unitaries have one or two qubits."""
    gates = []
    for _ in range(num_gates):
        name = source.choice([*KINDS, "unitary", "unitary"])
        most = KINDS[name].num_targets if name in KINDS else source.randint(1, min(2, num_qubits))
        if most > num_qubits:
            continue
        qubits = source.sample(range(num_qubits), num_qubits)
        count = min(source.choice([0, 0, 1, 2]), num_qubits - most)
        targets = tuple(qubits[count : count + most])
        if name == "unitary":
            made = unitary(random_unitary(most, source.randint(0, 1000)), *targets)
        elif KINDS[name].has_angle:
            index = source.choice([None, source.randrange(num_parameters)])
            angle = Angle(source.uniform(-3, 3), index, source.choice([1.0, -0.5, 2.0]))
            made = Gate(name, targets, angle)
        else:
            made = Gate(name, targets)
        bits = [source.randint(0, 1) for _ in range(count)]
        gates.append(made.controlled(*qubits[:count], state=bits) if count else made)
    return Circuit(num_qubits, gates, num_parameters)


def random_angle(source: random.Random, num_parameters: int, depth: int = 3) -> Formula:
    """Any formula that is smooth where parameters are of about size 1, from a seeded source."""
    if not depth or source.random() < 0.2:
        return Angle(
            source.uniform(-2, 2), source.randrange(num_parameters), source.choice([1.0, -0.5, 2.0])
        )
    one, two = (random_angle(source, num_parameters, depth - 1) for _ in range(2))
    return source.choice(
        [
            lambda: one + two,
            lambda: one - two * source.uniform(-2, 2),
            lambda: (1 - one.sin()) * (math.pi - two.cos()),
            lambda: one.sin() * two,
            lambda: one.sin() ** source.choice([2, 3]),
            lambda: two.cos() / (2 + one.sin()),
            lambda: (one.sin() / 2).exp() + (one.cos() / 2).arcsin(),
            lambda: (1.5 + two.cos()).log() * one.arctan(),
            lambda: (one.arctan() / 2).tan() - (two.cos() / 2).arccos(),
        ]
    )()
