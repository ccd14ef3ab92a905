"""Terms of a Hamiltonian in groups that are measured together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import Circuit, as_integer
from lockstep.quantum.hamiltonians.diagonal import diagonalise
from lockstep.quantum.hamiltonians.operator import PauliOperator, hamiltonian_terms, parity_signs
from lockstep.quantum.hamiltonians.symplectic import (
    Masks,
    commute,
    commute_qubitwise,
    masks_of,
)
from lockstep.quantum.simulation.measure import PauliSum, draw, probabilities, qubits_of
from lockstep.quantum.simulation.statevector import Simulator

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
        if as_integer(shots, "shots") < 1:
            raise ConfigError(f"shots={shots}: must be at least 1")
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
