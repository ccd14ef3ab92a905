"""Groups of a Hamiltonian's terms that are measured together, and their circuits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import Angle, Expression, as_count
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate
from lockstep.systems.quantum.hamiltonian import (
    Masks,
    PauliOperator,
    bits_of,
    commute,
    commute_qubitwise,
    hamiltonian_terms,
    masks_of,
    parity_signs,
)
from lockstep.systems.quantum.simulation.measure import PauliSum, draw, probabilities, qubits_of
from lockstep.systems.quantum.simulation.statevector import Simulator


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
    *others, last = bits_of(mask)
    turned = [*turning.gates, *(gate("cx", other, last) for other in others)]
    back = [gate("s", *g.qubits) if g.name == "sdg" else g for g in reversed(turned)]
    return [*turned, gate("rz", last, angle=angle), *back]


def diagonalise(strings: Sequence[Masks], num_qubits: int) -> tuple[Circuit, list[tuple[int, int]]]:
    """A circuit of h, sdg and cx after which all strings are products of Z.

    Strings that commute qubit by qubit need gates on single qubits only. Otherwise each string in
    turn is reduced to a single Z on a qubit of its own, up to Z on the qubits of earlier strings;
    these qubits are not touched again.

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
        """Turn a row's letters on free qubits into Z."""
        for qubit in bits_of(row.x & free):
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
            support = bits_of(row.z & free)
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


_NORM = 1e-3
"""How far the squared norm of a state that is measured may be from 1."""


@dataclass(frozen=True, eq=False)
class Group:
    """Pauli strings that commute, and the circuit after which one measurement gives all of them.

    Attributes:
        strings: Pauli strings, the last letter for qubit 0.
        coefficients: coefficient of each.
        circuit: circuit after which string i is `signs[i]` times the product of Z on the qubits
            whose bits are set in `masks[i]`.
        masks: qubits of each string after the circuit, as bits.
        signs: sign of each string after the circuit, 1 or -1.
    """

    strings: tuple[str, ...]
    coefficients: tuple[float, ...]
    circuit: Circuit
    masks: tuple[int, ...]
    signs: tuple[int, ...]

    @cached_property
    def values(self) -> Tensor:
        """The value Σ coefficient · string of each outcome of a measurement, [2^n], float64."""
        index = torch.arange(1 << self.circuit.num_qubits)
        total = torch.zeros(len(index), dtype=torch.float64)
        for coefficient, mask, sign in zip(self.coefficients, self.masks, self.signs, strict=True):
            total += coefficient * sign * parity_signs(index, mask)
        return total

    def probabilities(self, states: Tensor) -> Tensor:
        """The probability of each outcome after the circuit; differentiable.

        Args:
            states: complex tensor [..., 2^n].

        Returns:
            Probabilities [..., 2^n], real; with `values`, they give the expectation value.

        Raises:
            ConfigError: the states are of another number of qubits.
        """
        if qubits_of(states) != self.circuit.num_qubits:
            raise ConfigError(
                f"Pauli strings of {self.circuit.num_qubits} letters for states of "
                f"{qubits_of(states)} qubits"
            )
        key = (states.dtype, states.device)
        if key not in self._simulators:
            self._simulators[key] = Simulator(self.circuit, *key)
        return probabilities(self._simulators[key].state(initial=states))

    @cached_property
    def _simulators(self) -> dict[tuple[torch.dtype, torch.device], Simulator]:
        return {}

    def sample(
        self, states: Tensor, shots: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """Outcomes of measurements after the circuit.

        Args:
            states: complex tensor [..., 2^n].
            shots: number of measurements of each state.
            generator: generator of the measurement noise; torch's global one if None.

        Returns:
            Outcomes [..., shots], int64: bit q of an outcome is qubit q. `values` has their values.

        Raises:
            ConfigError: `shots` is less than 1, or the states are of another number of qubits or
                not of norm 1.
        """
        as_count(shots, "shots")
        rows = self.probabilities(states.detach()).reshape(-1, states.shape[-1])
        if not ((rows.sum(-1) - 1).abs() < _NORM).all():
            raise ConfigError("only states of norm 1 can be measured")
        drawn = draw(rows, shots, generator)
        return drawn.view(*states.shape[:-1], shots)

    @property
    def norm(self) -> float:
        """The sum of the coefficients' magnitudes."""
        return sum(map(abs, self.coefficients))


def commuting_groups(
    hamiltonian: PauliSum | PauliOperator, commuting: str = "qubitwise"
) -> list[Group]:
    """Group the terms of a Hamiltonian, each of them into exactly one group.

    Sorted insertion (Crawford et al., Quantum 5, 385 (2021), section 3): the terms in the order of
    their coefficients' magnitudes, each into the first group with all of which it commutes. A
    string of I only is a constant; it is in no group.

    Args:
        hamiltonian: Hamiltonian with real coefficients.
        commuting: `qubitwise`: strings with the same letter wherever two have one, which are
            measured after gates on single qubits; or `fully`: all that commute, in fewer groups,
            measured after CNOTs, too.

    Returns:
        Groups, that of the greatest coefficient first; the same on every machine.

    Raises:
        ConfigError: the Hamiltonian is not Hermitian, or `commuting` has another value.
    """
    tests = {"qubitwise": commute_qubitwise, "fully": commute}
    if commuting not in tests:
        raise ConfigError(f"commuting={commuting!r}: must be 'qubitwise' or 'fully'")
    fits = tests[commuting]
    terms = hamiltonian_terms(hamiltonian)
    order = sorted((s for s in terms if set(s) != {"I"}), key=lambda s: (-abs(terms[s]), s))
    groups: list[list[tuple[str, Masks]]] = []
    for string in order:
        masks = masks_of(string)
        for group in groups:
            if all(fits(masks, other) for _, other in group):
                group.append((string, masks))
                break
        else:
            groups.append([(string, masks)])
    made = []
    for group in groups:
        strings = tuple(s for s, _ in group)
        circuit, diagonal = diagonalise([masks for _, masks in group], len(strings[0]))
        masks, signs = zip(*diagonal, strict=True)
        made.append(Group(strings, tuple(terms[s] for s in strings), circuit, masks, signs))
    return made
