"""Randomised factorisations, and from a trained dense weight to the numbers of a sketched layer."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lockstep.errors import ConfigError, needing
from lockstep.systems.sketched.module import check_floats, check_positive
from lockstep.systems.sketched.products import Fused, SignKey, hashed, out_of_sketch, sign_matrix


class RSVD(NamedTuple):
    """Nearly the truncated singular value decomposition: A ≈ U diag(S) Vᵀ.

    Attributes:
        U: [m, rank], orthonormal columns.
        S: [rank], from the largest on.
        V: [n, rank], orthonormal columns.
    """

    U: Tensor
    S: Tensor
    V: Tensor


class CQRRPT(NamedTuple):
    """QR with column pivoting: A[:, pivots] ≈ Q R.

    Attributes:
        Q: [m, k], orthonormal columns; k is the numerical rank that was found.
        R: [k, n], upper triangular.
        pivots: int64 [n], a permutation of the columns.
    """

    Q: Tensor
    R: Tensor
    pivots: Tensor


def rsvd(
    matrix: Tensor,
    rank: int,
    oversampling: int = 10,
    power_iterations: int = 2,
    block: int = 64,
    seed: int = 0,
) -> RSVD:
    """Randomised SVD by a blocked range finder with re-orthogonalisation.

    Halko, Martinsson and Tropp 2011 (arXiv:0909.4061); each block is orthogonalised against earlier
    ones, as in Martinsson and Voronin 2016 (arXiv:1503.07157). The test matrix has random signs
    that depend on the seed alone.

    Args:
        matrix: [m, n], float32 or float64.
        rank: number of singular triplets, at most min(m, n).
        oversampling: further columns of the sketch; more of them make the result better.
        power_iterations: products with A Aᵀ; more of them help where the spectrum is flat.
        block: columns that are found at a time.
        seed: seed of the signs.

    Raises:
        ConfigError: the rank exceeds the matrix, or a size is out of range.
        TaskError: the matrix is of integers.
    """
    check_floats("the matrix", matrix)
    check_positive(rank=rank, block=block)
    if matrix.dim() != 2 or rank > min(matrix.shape):
        raise ConfigError(
            f"rank={rank}: a matrix of shape {tuple(matrix.shape)} has no such rank; take at most "
            f"{min(matrix.shape) if matrix.dim() == 2 else 0}"
        )
    for name, value in (("oversampling", oversampling), ("power_iterations", power_iterations)):
        if value < 0:
            raise ConfigError(f"{name}={value}: must not be negative")
    width = min(rank + oversampling, *matrix.shape)
    key = SignKey(seed, 0, "rsvd")
    test = sign_matrix(key, width, range(matrix.shape[1]), matrix.dtype, matrix.device).t()
    Q = matrix.new_zeros(matrix.shape[0], 0)
    for columns in torch.split(test, block, 1):
        Q = torch.cat([Q, _range(matrix, columns, Q, power_iterations)], 1)
    left, values, right = torch.linalg.svd(Q.t() @ matrix, full_matrices=False)
    return RSVD(Q @ left[:, :rank], values[:rank], right[:rank].t())


def _range(matrix: Tensor, test: Tensor, known: Tensor, power_iterations: int) -> Tensor:
    """An orthonormal basis of the range of `matrix @ test`, orthogonal to the known one."""
    found = _orthonormal(matrix @ test, known)
    for _ in range(power_iterations):
        found = torch.linalg.qr(matrix.t() @ found).Q
        found = _orthonormal(matrix @ found, known)
    return found


def _orthonormal(columns: Tensor, known: Tensor) -> Tensor:
    """An orthonormal basis of the columns, orthogonal to the known one.

    One pass leaves rounding errors as large as what it subtracts. Two are enough (Giraud, Langou
    and Rozložník 2005) unless a column lies in the known basis to the last bit: then the second
    pass leaves rounding errors only, which the third makes orthogonal.
    """
    for _ in range(3):
        columns = torch.linalg.qr(columns - known @ (known.t() @ columns)).Q
    return columns


def cqrrpt(matrix: Tensor, oversampling: float = 1.25, nonzeros: int = 4, seed: int = 0) -> CQRRPT:
    """QR with column pivoting of a tall matrix: sketched QR chooses, Cholesky QR computes.

    Melnichenko, Balabanov, Murray, Demmel, Mahoney and Luszczek 2023 (arXiv:2311.08316). All work
    on the whole matrix is in matrix products and a triangular solve.

    Args:
        matrix: [m, n] with m ≥ n, float32 or float64.
        oversampling: rows of the sketch as a multiple of n, at least 1.
        nonzeros: entries ±1 of each column of the sparse sketch.
        seed: seed of the sketch.

    Raises:
        ConfigError: the matrix is not tall, or an argument is out of range; SciPy is missing.
        TaskError: the matrix is of integers.
    """
    check_floats("the matrix", matrix)
    check_positive(nonzeros=nonzeros)
    if matrix.dim() != 2 or matrix.shape[0] < matrix.shape[1]:
        raise ConfigError(
            f"a matrix of shape {tuple(matrix.shape)}: must have at least as many "
            "rows as columns; take its transpose"
        )
    if oversampling < 1:
        raise ConfigError(f"oversampling={oversampling:g}: must be at least 1")
    R_sketch, pivots = _pivoted(_sparse_sketch(matrix, oversampling, nonzeros, seed))
    diagonal = R_sketch.diagonal().abs()
    # Beyond this the preconditioner would only amplify rounding errors.
    least = diagonal[:1] * torch.finfo(matrix.dtype).eps * max(matrix.shape)
    rank = int((diagonal > least).sum())
    preconditioner = R_sketch[:rank, :rank]
    chosen = matrix[:, pivots[:rank]]
    Q = torch.linalg.solve_triangular(preconditioner, chosen, upper=True, left=False)
    R = torch.linalg.cholesky(Q.t() @ Q, upper=True)
    Q = torch.linalg.solve_triangular(R, Q, upper=True, left=False)
    return CQRRPT(Q, R @ R_sketch[:rank], pivots)


def _sparse_sketch(matrix: Tensor, oversampling: float, nonzeros: int, seed: int) -> Tensor:
    """S A with `nonzeros` signs in each column of S, one in each block of its rows."""
    num_rows, num_columns = matrix.shape
    size = min(num_rows, -(-int(oversampling * num_columns) // nonzeros))
    parts = []
    for number in range(nonzeros):
        key = SignKey(seed, number, "cqrrpt")
        numbers = torch.arange(num_rows, device=matrix.device)
        # Rows are distributed in a random order, so that no bucket depends on their own order.
        order = hashed(key._replace(stream="order"), numbers, numbers * 0).argsort(stable=True)
        flips = sign_matrix(key, 1, range(num_rows), matrix.dtype, matrix.device)[0]
        signed = matrix[order] * flips[:, None]
        padded = torch.nn.functional.pad(signed, (0, 0, 0, -num_rows % size))
        parts.append(padded.view(-1, size, num_columns).sum(0))
    return torch.cat(parts) * math.sqrt(1 / nonzeros)


def _pivoted(sketch: Tensor) -> tuple[Tensor, Tensor]:
    """R and the pivots of the QR of the small sketch; torch has no QR with pivoting."""
    with needing("sketch", "QR with pivoting needs SciPy"):
        from scipy.linalg import qr
    R, pivots = qr(sketch.cpu().numpy(), mode="r", pivoting=True)
    on = sketch.device
    size = min(sketch.shape)
    return torch.from_numpy(R[:size]).to(on), torch.from_numpy(pivots).long().to(on)


Method = Literal["range-finder", "least-squares", "copy"]
"""How a sketched layer is made from a dense one."""


def check_dense(weight: Tensor, method: Method) -> None:
    """Check a dense layer's weight, and the method by which it is to be sketched.

    Raises:
        ConfigError: there is no such method, or the weight is not finite.
    """
    if method not in get_args(Method):
        raise ConfigError(f"method={method!r}: must be one of {', '.join(get_args(Method))}")
    if not bool(weight.isfinite().all()):
        raise ConfigError("the dense weight has values that are not finite")


def fit(weight: Tensor, parts: Fused, method: Method, unit: float, seed: int) -> dict[str, Tensor]:
    """Values for S1 and S2, and for U1 and U2 where the method makes them.

    Args:
        weight: dense weight, [in, out].
        parts: the layer's tensors, of which shapes, U and the scale are used.
        method: how.
        unit: size of an entry of U.
        seed: seed of the range finder.

    Returns:
        Tensors by name, float64.
    """
    weight, rank = weight.double(), len(parts.S1)
    if method == "range-finder":
        return _from_range(weight, rank, parts.scale, seed)
    eye = torch.eye(rank, dtype=torch.float64, device=weight.device)
    U1 = out_of_sketch(eye, parts.U1.double(), parts.first_out)
    U2 = out_of_sketch(eye, parts.U2.double(), parts.first_in)
    if method == "copy":
        return {"S1": unit * U1 @ weight.t(), "S2": unit * U2 @ weight}
    # The best weight of this form is P2 W + (1 - P2) W P1, with the projectors onto U2 and U1.
    S2 = torch.linalg.pinv(U2.t()) @ weight
    rest = weight - U2.t() @ S2
    S1 = (rest @ torch.linalg.pinv(U1)).t()
    return {"S1": S1 / parts.scale, "S2": S2 / parts.scale}


def _from_range(weight: Tensor, rank: int, scale: float, seed: int) -> dict[str, Tensor]:
    """Nearly the best weight of rank 2 r: singular triplets go to the two kinds of terms in turn.

    So S1 and S2 have numbers of the same size, and U has the norms of random signs: a learning rate
    that suits sketched layers suits this one. Rows beyond the weight's rank are zero.
    """
    num_in, num_out = weight.shape
    found = rsvd(weight, min(2 * rank, num_in, num_out), seed=seed)
    values = {
        name: torch.zeros(rank, size, dtype=torch.float64, device=weight.device)
        for name, size in (("S1", num_in), ("S2", num_out), ("U1", num_out), ("U2", num_in))
    }
    for U, S, size, first, (kept, trained) in (
        ("U2", "S2", num_in, 0, (found.U.t(), found.V.t())),
        ("U1", "S1", num_out, 1, (found.V.t(), found.U.t())),
    ):
        count = len(kept[first::2])
        values[U][:count] = kept[first::2] * math.sqrt(size)
        factor = found.S[first::2, None] / (scale * math.sqrt(size))
        values[S][:count] = trained[first::2] * factor
    return values
