"""Lowest energies of Hamiltonians, exactly: what variational results are checked against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import as_integer
from lockstep.quantum.hamiltonians.operator import (
    PauliOperator,
    hamiltonian_terms,
    parity_signs,
)
from lockstep.quantum.hamiltonians.symplectic import masks_of
from lockstep.quantum.simulation.measure import PauliSum
from lockstep.quantum.simulation.memory import check_fits

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
    try:
        from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
    except ImportError as error:
        raise ConfigError(
            'lowest energies beyond 8 qubits need SciPy: pip install "lockstep-train[quantum]"'
        ) from error
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
        by_flips: dict[int, list[tuple[int, complex]]] = {}
        for string, coefficient in terms.items():
            x, z = masks_of(string)
            by_flips.setdefault(x, []).append((z, coefficient * 1j ** (x & z).bit_count()))
        self._by_flips = by_flips

    def __call__(self, vector: Any) -> Any:
        flat = torch.from_numpy(np.ascontiguousarray(vector, dtype=np.complex128).reshape(-1))
        total = torch.zeros_like(flat)
        for x, parts in self._by_flips.items():
            # String (x, z) takes amplitude i, with a sign by i ∧ z, to place i ⊕ x.
            diagonal = torch.zeros_like(flat)
            for z, factor in parts:
                diagonal += factor * parity_signs(self._index, z)
            total += (diagonal * flat)[self._index ^ x]
        return total.numpy()
