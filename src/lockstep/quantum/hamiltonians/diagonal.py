"""Clifford circuits after which commuting Pauli strings are products of Z."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

from lockstep.quantum.circuits.circuit import Circuit, Gate, gate
from lockstep.quantum.hamiltonians.symplectic import Masks, commute_qubitwise


def diagonalise(strings: Sequence[Masks], num_qubits: int) -> tuple[Circuit, list[tuple[int, int]]]:
    """A circuit of h, sdg and cx after which all strings are products of Z.

    Strings that commute qubit by qubit need gates on single qubits only. Of others, one after the
    other becomes a single Z on a qubit of its own, up to Z on the qubits of those before it; these
    qubits are not touched again.

    Args:
        strings: masks of strings that commute with each other.
        num_qubits: number of qubits.

    Returns:
        The circuit, and for each string the mask of its Z and its sign after the circuit.
    """
    rows = [_Row(x, z) for x, z in strings]
    gates: list[Gate] = []

    def apply(name: str, *qubits: int) -> None:
        gates.append(gate(name, *qubits))
        for row in rows:
            row.conjugate(name, *qubits)

    def turn(row: _Row, free: int) -> None:
        """Make Z of the letters of a row on free qubits."""
        for qubit in _bits(row.x & free):
            if row.z >> qubit & 1:
                apply("sdg", qubit)
            apply("h", qubit)

    free = (1 << num_qubits) - 1
    union = _Row(reduce(or_, (x for x, _ in strings)), reduce(or_, (z for _, z in strings)))
    if all(commute_qubitwise((union.x, union.z), own) for own in strings):
        turn(union, free)
    else:
        for row in rows:
            turn(row, free)
            support = _bits(row.z & free)
            for qubit in support[1:]:
                apply("cx", qubit, support[0])
            free &= ~sum(1 << q for q in support[:1])
    return Circuit(num_qubits, gates, 0), [(row.z, row.sign) for row in rows]


class _Row:
    """A signed Pauli string, which gates conjugate (Aaronson and Gottesman 2004, section III)."""

    def __init__(self, x: int, z: int) -> None:
        self.x, self.z, self.sign = x, z, 1

    def conjugate(self, name: str, *qubits: int) -> None:
        first = qubits[0]
        x, z = self.x >> first & 1, self.z >> first & 1
        if name == "h":
            flips = x & z
            self.x ^= (x ^ z) << first
            self.z ^= (x ^ z) << first
        elif name == "sdg":
            flips = x & (z ^ 1)
            self.z ^= x << first
        else:
            target = qubits[1]
            other_x, other_z = self.x >> target & 1, self.z >> target & 1
            flips = x & other_z & (other_x ^ z ^ 1)
            self.x ^= x << target
            self.z ^= other_z << first
        if flips:
            self.sign = -self.sign


def _bits(mask: int) -> list[int]:
    return [q for q in range(mask.bit_length()) if mask >> q & 1]
