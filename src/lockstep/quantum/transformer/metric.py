"""The Fubini-Study metric of the quantum transformer: how its state moves with its angles.

For a corpus, the superposition circuit holds Σ_i √p_i |i> (W ⊗ V) ψ_i, with p_i the weight of
transition i. Its metric needs the ψ_i only through ρ = Σ_i p_i ψ_i ψ_iᵀ, which is fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.quantum.simulation.memory import check_fits
from lockstep.quantum.transformer.ansatz import unitaries

_COPIES = 3
"""Copies of ρ in memory while its eigenvectors are computed."""
_NEGLIGIBLE = 1e-14
"""Eigenvalues of ρ below this part of the greatest are rounding."""


def context_root(states: Tensor, transitions: Tensor) -> Tensor:
    """Columns whose outer products add up to ρ of a corpus.

    Args:
        states: states of the words of S sentences, real, [S, L, d].
        transitions: number T of transitions of each sentence, [S], int64. A sentence counts 1 / S,
            each of its transitions 1 / (S T).

    Returns:
        Matrices [r, d, d] with r ≤ d (d + 1) / 2, in the dtype of the states.

    Raises:
        ConfigError: ρ does not fit into memory.
    """
    dim = states.shape[2]
    check_metric_fits(dim, states.dtype, states.device)
    density = states.new_zeros(dim * dim, dim * dim)
    for sentence, count in zip(states, transitions.tolist(), strict=True):
        keys = sentence[:count]
        contexts = torch.einsum("ja,jb->jab", keys, keys).cumsum(0).flatten(1)
        contexts = contexts / torch.linalg.vector_norm(contexts, dim=1, keepdim=True)
        density.addmm_(contexts.mT, contexts, alpha=1 / (len(states) * count))
    values, vectors = torch.linalg.eigh(density)
    kept = values > _NEGLIGIBLE * values[-1]
    columns: Tensor = vectors[:, kept] * values[kept].sqrt()
    return columns.mT.reshape(-1, dim, dim)


def check_metric_fits(
    dim: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> None:
    """Check that ρ [d², d²] of words of dimension d fits into memory.

    Args:
        dim: dimension d of a word's state.
        dtype: real dtype of ρ.
        device: device of ρ.

    Raises:
        ConfigError: it does not; says how many bytes are needed, and how many there are.
    """
    check_fits(
        f"the metric of words of dimension {dim}",
        _COPIES * dim**4 * dtype.itemsize,
        device,
        "take a smaller dimension, or an optimizer other than natural",
    )


def fubini_study(angles: Tensor, num_qubits: int, root: Tensor) -> Tensor:
    """g_jk = Re(<∂_j Φ|∂_k Φ> - <∂_j Φ|Φ><Φ|∂_k Φ>) (Stokes et al. 2020, equation 4).

    Args:
        angles: angles of V and W, [2, *angle_shape], P elements in all.
        num_qubits: number of qubits of one register.
        root: the result of `context_root`, [r, d, d].

    Returns:
        Metric [P, P], real and symmetric.
    """

    def state(flat: Tensor) -> Tensor:
        v, w = unitaries(flat.view_as(angles), num_qubits)
        after = w @ root.to(w.dtype) @ v.mT
        return torch.view_as_real(after.flatten())

    flat = angles.detach().flatten()
    phi = torch.view_as_complex(state(flat))
    moved = torch.func.jacfwd(state)(flat)  # [amplitudes, 2, P]
    jacobian = torch.complex(moved[:, 0], moved[:, 1])
    along = phi.conj() @ jacobian
    metric: Tensor = (jacobian.mH @ jacobian).real - torch.outer(along.conj(), along).real
    return metric
