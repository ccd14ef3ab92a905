"""Gates for the exponentials of Pauli strings, of which UCC and QAOA circuits are made."""

from __future__ import annotations

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.angles import Angle, Expression
from lockstep.quantum.circuits.circuit import Gate, gate
from lockstep.quantum.hamiltonians.diagonal import diagonalise
from lockstep.quantum.hamiltonians.operator import PauliOperator
from lockstep.quantum.hamiltonians.symplectic import masks_of


def pauli_rotation(string: str, angle: Angle | Expression | float) -> list[Gate]:
    """Gates for exp(-i φ/2 P), P being a Pauli string: `rx`, `rzz`, … for any number of qubits.

    The qubits are turned so that P is a product of Z, whose parity CNOTs bring onto one qubit.

    Args:
        string: string of the letters I, X, Y and Z, the last for qubit 0; one of them at least is
            not I.
        angle: the angle φ in radians, a number or a `parameter`.

    Raises:
        ConfigError: the string has other letters or no letter but I, or the angle is none.
    """
    num_qubits = PauliOperator({string: 1.0}).num_qubits
    if set(string) == {"I"}:
        raise ConfigError(f"Pauli string {string!r}: a rotation needs a letter X, Y or Z")
    turning, [(mask, _)] = diagonalise([masks_of(string)], num_qubits)
    *others, last = (q for q in range(num_qubits) if mask >> q & 1)
    turned = [*turning.gates, *(gate("cx", other, last) for other in others)]
    back = [gate("s", *g.qubits) if g.name == "sdg" else g for g in reversed(turned)]
    return [*turned, gate("rz", last, angle=angle), *back]
