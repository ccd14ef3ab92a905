"""Circuits with noise by definition: dense matrices, and a table of the classical bits' values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tests.systems.quantum.circuits import random_circuit, random_unitary

from lockstep.quantum import (
    Channel,
    DynamicCircuit,
    If,
    Measure,
    Reset,
    channel,
    parameter,
    pauli_error,
    qubit_channel,
)
from lockstep.systems.quantum.circuits.circuit import Gate
from lockstep.systems.quantum.noise.circuit import Operation

Table = dict[int, Any]
"""The density matrix times the probability, for each value of the bits that occurs."""

_LETTERS = {
    "I": np.eye(2), "X": np.array([[0, 1], [1, 0]]),
    "Y": np.array([[0, -1j], [1j, 0]]), "Z": np.diag([1, -1]),
}  # fmt: skip
_DOWN, _UP = np.array([[0, 1], [0, 0]]), np.array([[0, 0], [1, 0]])
_ZERO, _ONE = np.diag([1, 0]), np.diag([0, 1])


def embedded(matrix: Any, qubits: Sequence[int], num_qubits: int) -> Any:
    """A matrix on some qubits, the first as the low bit, as one [2^n, 2^n] on all."""
    size = 1 << num_qubits
    whole = np.zeros((size, size), complex)
    mask = sum(1 << q for q in qubits)
    for row in range(size):
        for column in range(size):
            if row & ~mask == column & ~mask:
                own = [sum((i >> q & 1) << k for k, q in enumerate(qubits)) for i in (row, column)]
                whole[row, column] = matrix[own[0], own[1]]
    return whole


def kraus_of(each: Channel, values: Sequence[float]) -> list[Any]:
    """The textbook's Kraus operators."""
    if each.name == "QubitChannel":
        assert each.matrices is not None
        return list(each.matrices.numpy())
    if each.name == "PauliError":
        whole = np.eye(1)
        for letter in reversed(each.operators):
            whole = np.kron(whole, _LETTERS[letter])
        return [np.sqrt(1 - values[0]) * np.eye(len(whole)), np.sqrt(values[0]) * whole]
    p = values[0]
    flips = {"BitFlip": "X", "PhaseFlip": "Z"}
    if each.name in flips:
        return [np.sqrt(1 - p) * np.eye(2), np.sqrt(p) * _LETTERS[flips[each.name]]]
    if each.name == "DepolarizingChannel":
        return [np.sqrt(1 - p) * np.eye(2), *(np.sqrt(p / 3) * _LETTERS[c] for c in "XYZ")]
    if each.name == "AmplitudeDamping":
        return [np.diag([1, np.sqrt(1 - p)]), np.sqrt(p) * _DOWN]
    if each.name == "PhaseDamping":
        return [np.diag([1, np.sqrt(1 - p)]), np.sqrt(p) * _ONE]
    if each.name == "GeneralizedAmplitudeDamping":
        root, down = np.sqrt(1 - p), 1 - values[1]
        return [
            np.sqrt(down) * np.diag([1, root]), np.sqrt(down * p) * _DOWN,
            np.sqrt(1 - down) * np.diag([root, 1]), np.sqrt((1 - down) * p) * _UP,
        ]  # fmt: skip
    if each.name == "ResetError":
        p0, p1 = values
        return [
            np.sqrt(1 - p0 - p1) * np.eye(2), np.sqrt(p0) * _ZERO, np.sqrt(p0) * _DOWN,
            np.sqrt(p1) * _UP, np.sqrt(p1) * _ONE,
        ]  # fmt: skip
    # Thermal relaxation by its Choi matrix, whose eigenvectors are Kraus operators.
    excited, t1, t2, time = values
    left, coherent = np.exp(-time / t1), np.exp(-time / t2)
    choi = np.zeros((4, 4))
    choi[0, 0], choi[1, 1] = left + (1 - left) * (1 - excited), (1 - left) * excited
    choi[2, 2], choi[3, 3] = (1 - left) * (1 - excited), left + (1 - left) * excited
    choi[0, 3] = choi[3, 0] = coherent
    found, vectors = np.linalg.eigh(choi)
    return [np.sqrt(max(v, 0)) * vectors[:, i].reshape(2, 2).T for i, v in enumerate(found)]


class ByDefinition:
    """Runs a circuit whose angles and values are given in its order."""

    def __init__(self, circuit: DynamicCircuit, parameters: torch.Tensor) -> None:
        self._count = circuit.num_qubits
        self._angles = iter(circuit.angles(parameters).tolist())
        self._values = iter(circuit.values(parameters).tolist())
        start = np.zeros((1 << self._count,) * 2, complex)
        start[0, 0] = 1
        self.table = self._run({0: start}, circuit.operations)

    def density(self) -> Any:
        return sum(self.table.values())

    def _run(self, table: Table, operations: Sequence[Operation]) -> Table:
        for each in operations:
            if isinstance(each, Gate):
                table = self._sums(table, [self._gate(each)])
            elif isinstance(each, Channel):
                matrices = kraus_of(each, [next(self._values) for _ in each.values])
                whole = [embedded(m, each.qubits, self._count) for m in matrices]
                table = self._sums(table, whole)
            elif isinstance(each, Reset):
                whole = [embedded(m, (each.qubit,), self._count) for m in (_ZERO, _DOWN)]
                table = self._sums(table, whole)
            elif isinstance(each, Measure):
                table = self._measure(table, each)
            else:
                table = self._if(table, each)
        return table

    def _sums(self, table: Table, matrices: list[Any]) -> Table:
        return {b: sum(m @ rho @ m.conj().T for m in matrices) for b, rho in table.items()}

    def _gate(self, each: Gate) -> Any:
        kind = each.kind
        matrix = kind.constant.numpy()
        if each.angle is not None:
            phase = next(self._angles) * kind.frequency
            matrix = (
                matrix + np.cos(phase) * kind.cosine.numpy() + np.sin(phase) * kind.sine.numpy()
            )
        acting = embedded(matrix, each.qubits, self._count)
        index = np.arange(len(acting))
        holds = np.ones(len(acting), bool)
        for control, bit in zip(each.controls, each.control_state, strict=True):
            holds &= (index >> control & 1) == bit
        return np.where(holds[:, None], acting, np.eye(len(acting)))

    def _measure(self, table: Table, each: Measure) -> Table:
        confusion = each.confusion or ((1, 0), (0, 1))
        after: Table = {}
        for bits, rho in table.items():
            for found, projector in enumerate((_ZERO, _ONE)):
                whole = embedded(projector, (each.qubit,), self._count)
                for read in (0, 1):
                    key = bits & ~(1 << each.bit) | read << each.bit
                    part = confusion[found][read] * (whole @ rho @ whole)
                    after[key] = after.get(key, 0) + part
        return after

    def _if(self, table: Table, each: If) -> Table:
        def holds(bits: int) -> bool:
            return sum((bits >> b & 1) << i for i, b in enumerate(each.bits)) == each.value

        then = self._run({b: r for b, r in table.items() if holds(b)}, each.then)
        other = self._run({b: r for b, r in table.items() if not holds(b)}, each.otherwise)
        for bits, rho in other.items():
            then[bits] = then.get(bits, 0) + rho
        return then


NUM_PARAMETERS = 12
CHANNEL_VALUES = {
    "BitFlip": ["p"], "PhaseFlip": ["p"], "DepolarizingChannel": ["p"],
    "AmplitudeDamping": ["gamma"], "GeneralizedAmplitudeDamping": ["gamma", "p"],
    "PhaseDamping": ["gamma"], "ResetError": ["p0", "p1"],
}  # fmt: skip


def random_channel(source: random.Random, num_qubits: int, trained: bool = False) -> Channel:
    """Any channel; with `trained`, some values depend on parameters between 0 and 1 / 2."""

    def share() -> Any:
        if trained and source.random() < 0.4:
            return parameter(source.randrange(NUM_PARAMETERS), 0.3, 0.1)
        return source.uniform(0.05, 0.45)

    name = source.choice([*CHANNEL_VALUES, "thermal", "pauli", "kraus"])
    qubit = source.randrange(num_qubits)
    if name == "thermal":
        t1 = source.uniform(0.5, 2)
        values = {"pe": source.random(), "t1": t1, "t2": source.uniform(0.1, 2) * t1, "tg": 0.3}
        return channel("ThermalRelaxationError", qubit, **values)
    if name in CHANNEL_VALUES:
        return channel(name, qubit, **{key: share() for key in CHANNEL_VALUES[name]})
    width = source.randint(1, min(2, num_qubits))
    qubits = source.sample(range(num_qubits), width)
    if name == "pauli":
        return pauli_error("".join(source.choices("IXYZ", k=width)), *qubits, p=share())
    isometry = random_unitary(width + 1, source.randrange(1000))[:, : 1 << width]
    return qubit_channel(list(isometry.view(2, 1 << width, 1 << width)), *qubits)


def random_dynamic(
    source: random.Random, num_qubits: int, num_operations: int, classical: bool, **options: Any
) -> DynamicCircuit:
    """Gates and channels; with `classical`, measurements, resets and conditions, too."""
    operations = _random_operations(source, num_qubits, num_operations, 2 * classical, **options)
    return DynamicCircuit(num_qubits, operations, 2 * classical, NUM_PARAMETERS)


def _random_operations(
    source: random.Random, num_qubits: int, count: int, depth: int, **options: Any
) -> list[Operation]:
    made: list[Operation] = []
    for _ in range(count):
        kind = source.choice(
            ["gate"] * 3 + ["noise"] * 2 + ["measure", "reset", "if"] * (depth > 0)
        )
        if kind == "gate":
            made += random_circuit(source, num_qubits, 1, NUM_PARAMETERS).gates
        elif kind == "noise":
            made.append(random_channel(source, num_qubits, **options))
        elif kind == "reset":
            made.append(Reset(source.randrange(num_qubits)))
        elif kind == "measure":
            first, second = source.random(), source.random()
            confusion = source.choice([None, ((1 - first, first), (second, 1 - second))])
            made.append(Measure(source.randrange(num_qubits), source.randrange(2), confusion))
        else:
            bits = source.sample(range(2), source.randint(1, 2))
            sides = [_random_operations(source, num_qubits, 2, depth - 1, **options) for _ in "01"]
            value = source.randrange(1 << len(bits))
            made.append(If(tuple(bits), value, tuple(sides[0]), tuple(sides[1])))
    return made
