"""A Hamiltonian's expectation value by measurements of groups, and its lowest energies exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigError, needing
from lockstep.systems.quantum.circuits.angles import as_integer
from lockstep.systems.quantum.grouping import Group, commuting_groups
from lockstep.systems.quantum.hamiltonian import (
    PauliOperator,
    hamiltonian_terms,
    masks_of,
    parity_signs,
)
from lockstep.systems.quantum.simulation.measure import PauliSum, qubits_of
from lockstep.systems.quantum.simulation.parts import check_fits

_DENSE = 8
"""Most qubits whose dense matrix is diagonalised."""
_VECTORS = 40
"""About how many vectors Lanczos' method keeps."""


def lowest_energies(hamiltonian: PauliSum | PauliOperator, count: int = 1) -> Tensor:
    """The lowest eigenvalues of a Hamiltonian, with multiplicity, in ascending order.

    A dense eigensolver up to 8 qubits; beyond, Lanczos' method of SciPy (ARPACK) with a fixed first
    vector, without a matrix; copies of an eigenvalue of high multiplicity may be missed there.

    Args:
        hamiltonian: Hamiltonian with real coefficients.
        count: number of eigenvalues.

    Returns:
        Eigenvalues [count], float64.

    Raises:
        ConfigError: the Hamiltonian is not Hermitian or does not fit into memory, `count` is not
            from 1 to 2^n (to 2^n less two beyond 8 qubits), SciPy is missing, or does not converge.
    """
    terms = hamiltonian_terms(hamiltonian)
    num_qubits = len(next(iter(terms)))
    most = 1 << num_qubits if num_qubits <= _DENSE else (1 << num_qubits) - 2
    if not 1 <= as_integer(count, "count") <= most:
        raise ConfigError(f"count={count}: must be from 1 to {most}")
    if num_qubits <= _DENSE:
        every: Tensor = torch.linalg.eigvalsh(PauliOperator(terms, num_qubits).matrix())
        return every[:count]
    check_fits(f"lowest energies of {num_qubits} qubits", _VECTORS * 16 << num_qubits)
    with needing("quantum", "lowest energies beyond 8 qubits need SciPy"):
        from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
    size = 1 << num_qubits
    start = np.random.Generator(np.random.Philox(key=0)).standard_normal(size)
    acting = LinearOperator((size, size), matvec=_Acting(terms), dtype=np.complex128)
    try:
        found = eigsh(acting, k=count, which="SA", v0=start, return_eigenvectors=False)
    except ArpackError as error:
        raise ConfigError(f"lowest energies of {num_qubits} qubits: {error}") from error
    return torch.from_numpy(np.sort(found))


class _Acting:
    """H ψ for vectors ψ [2^n]: strings of the same flips share their signs."""

    def __init__(self, terms: dict[str, float]) -> None:
        num_qubits = len(next(iter(terms)))
        self._index = torch.arange(1 << num_qubits)
        self._by_flips: dict[int, list[tuple[int, complex]]] = {}
        for string, coefficient in terms.items():
            x, z = masks_of(string)
            factor = coefficient * 1j ** (x & z).bit_count()
            self._by_flips.setdefault(x, []).append((z, factor))

    def __call__(self, vector: Any) -> Any:
        flat = torch.from_numpy(np.ascontiguousarray(vector, dtype=np.complex128).reshape(-1))
        total = torch.zeros_like(flat)
        for x, parts in self._by_flips.items():
            diagonal = torch.zeros_like(flat)
            for z, factor in parts:  # as `pauli_phases`, with one complex product less
                diagonal += factor * parity_signs(self._index, z)
            total += (diagonal * flat)[self._index ^ x]
        return total.numpy()


_LEAST = 2
"""Fewest measurements of a group: from fewer, no variance can be estimated."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """An expectation value estimated by measurements.

    Attributes:
        values: estimates of the expectation value, [...], real, without gradient.
        variances: unbiased estimates of the variance of `values`, [...].
        shots: number of measurements of each group.
        outcomes: for each group, the outcomes after its circuit, int64, [..., shots]; bit q of an
            outcome is qubit q. `bit_strings` formats them.
    """

    values: Tensor
    variances: Tensor
    shots: tuple[int, ...]
    outcomes: tuple[Tensor, ...]


class GroupedMeasurement:
    """Measures a Hamiltonian on states, its terms in groups of strings that commute.

        measurement = GroupedMeasurement(hamiltonian)
        estimate = measurement.estimate(states, shots=1000, generator=generator)

    As `measure` of `shifted`, `lambda s: measurement.estimate(s, 1000).values[:, None]` gives
    unbiased estimates of gradients.

    Attributes:
        num_qubits: number of qubits of the states.
        constant: coefficient of the string of I only, which needs no measurement.
        groups: groups of the other terms, as of `commuting_groups`.
    """

    def __init__(self, hamiltonian: PauliSum | PauliOperator, commuting: str = "qubitwise") -> None:
        """Group the terms.

        Args:
            hamiltonian: Hamiltonian with real coefficients.
            commuting: `qubitwise` or `fully`, as for `commuting_groups`.

        Raises:
            ConfigError: as `commuting_groups`.
        """
        terms = hamiltonian_terms(hamiltonian)
        self.num_qubits = len(next(iter(terms)))
        self.constant = terms.get("I" * self.num_qubits, 0.0)
        self.groups: list[Group] = commuting_groups(hamiltonian, commuting)

    def shares(self, shots: int, by: str = "norm", states: Tensor | None = None) -> tuple[int, ...]:
        """How many measurements each group gets.

        Args:
            shots: number of measurements of all groups together.
            by: `norm`: in proportion to the sum of the coefficients' magnitudes; `deviation`: in
                proportion to the standard deviation of a measurement of the group in `states`,
                which makes the variance of the estimate least (Rubin, Babbush and McClean, New J.
                Phys. 20, 053020 (2018)). With several states, to the root of their mean variance.
            states: complex tensor [..., 2^n], for `deviation`.

        Returns:
            Number of measurements of each group, at least 2, of sum `shots` where there are groups;
            rounded by largest remainders.

        Raises:
            ConfigError: there are fewer than 2 shots for each group, or `by` has another value.
        """
        if as_integer(shots, "shots") < max(1, _LEAST * len(self.groups)):
            raise ConfigError(
                f"shots={shots}: {len(self.groups)} groups need at least "
                f"{max(1, _LEAST * len(self.groups))}"
            )
        if by == "norm":
            weights = [group.norm for group in self.groups]
        elif by == "deviation" and states is not None:
            weights = [self._deviation(group, states) for group in self.groups]
        else:
            raise ConfigError(
                f"by={by!r}: must be 'norm', or 'deviation' together with states to take it from"
            )
        return _apportioned(shots, weights)

    def estimate(
        self,
        states: Tensor,
        shots: int | Sequence[int],
        by: str = "norm",
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """Measure each group a number of times.

        Args:
            states: complex tensor [..., 2^n].
            shots: number of measurements of all groups together, which are distributed as by
                `shares`; or of each group, at least 2.
            by: how they are distributed, `norm` or `deviation`.
            generator: generator of the measurement noise; torch's global one if None. The same
                random numbers give the same estimates.

        Raises:
            ConfigError: the states are of another number of qubits, or as `shares`.
        """
        if qubits_of(states) != self.num_qubits:
            raise ConfigError(
                f"a Hamiltonian of {self.num_qubits} qubits for states of {qubits_of(states)}"
            )
        states = states.detach()
        if isinstance(shots, Sequence):
            each = tuple(as_integer(count, "shots") for count in shots)
            if len(each) != len(self.groups) or min(each, default=_LEAST) < _LEAST:
                raise ConfigError(
                    f"shots={list(shots)}: must be at least {_LEAST} for each of "
                    f"{len(self.groups)} groups"
                )
        else:
            each = self.shares(shots, by, states)
        lead = states.shape[:-1]
        real = states.dtype.to_real()
        values = torch.full(lead, self.constant, dtype=real, device=states.device)
        variances = torch.zeros_like(values)
        outcomes = []
        for group, count in zip(self.groups, each, strict=True):
            drawn = group.sample(states, count, generator)
            found = group.values.to(values)[drawn]
            values = values + found.mean(-1)
            variances = variances + found.var(-1) / count
            outcomes.append(drawn)
        return Estimate(values, variances, each, tuple(outcomes))

    def _deviation(self, group: Group, states: Tensor) -> float:
        likely = group.probabilities(states.detach()).double()
        values = group.values.to(likely)
        variances = likely @ values.square() - (likely @ values).square()
        return float(variances.clamp(min=0).mean().sqrt())


def bit_strings(outcomes: Tensor, num_qubits: int) -> list[str]:
    """Outcomes of measurements as strings of 0 and 1, the last character being qubit 0.

    Args:
        outcomes: int64 tensor of any shape, as of `Estimate.outcomes`.
        num_qubits: number of qubits.

    Raises:
        ConfigError: an outcome is not from 0 to 2^num_qubits less one.
    """
    flat = [int(outcome) for outcome in outcomes.flatten().tolist()]
    if any(not 0 <= outcome < 1 << num_qubits for outcome in flat):
        raise ConfigError(f"outcomes must be from 0 to 2^{num_qubits} less one")
    return [format(outcome, f"0{num_qubits}b") for outcome in flat]


def _apportioned(shots: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`shots` in proportion to weights, at least `_LEAST` each, by largest remainders."""
    if not sum(weights):
        weights = [1.0] * len(weights)
    rest = shots - _LEAST * len(weights)
    exact = [rest * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for group in order[: rest - sum(counts)]:
        counts[group] += 1
    return tuple(_LEAST + count for count in counts)
