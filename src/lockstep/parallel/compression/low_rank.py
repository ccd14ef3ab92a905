"""Matrices as products of two thin ones: PowerSGD's arithmetic (Vogels, Karimireddy, Jaggi 2019).

A tensor of two or more dimensions counts as a matrix M of shape [rows, columns], its first
dimension by all others. With V of orthonormal columns [columns, rank], near the right singular
vectors of M, and U = orthonormal(M V) [rows, rank], the product U (Mᵀ U)ᵀ is near the best
approximation of M of that rank: one step of subspace iteration (algorithm 1 there).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Matrix(NamedTuple):
    """A tensor that travels as two factors.

    Attributes:
        segment: index of the segment it is in.
        tensor: index of the tensor in that segment.
        offset: where it begins there, in elements.
        rows: its first dimension.
        columns: product of its other dimensions.
        rank: columns of each factor.
    """

    segment: int
    tensor: int
    offset: int
    rows: int
    columns: int
    rank: int

    def of(self, segments: Sequence[Tensor]) -> Tensor:
        """A view of it in flat segments, [rows, columns]."""
        end = self.offset + self.rows * self.columns
        return segments[self.segment][self.offset : end].view(self.rows, self.columns)


def matrices(places: Sequence[Sequence[tuple[int, torch.Size]]], rank: int) -> list[Matrix]:
    """All tensors of which two factors of this rank have fewer elements than they have.

    Args:
        places: for each segment, the (offset, shape) of each tensor.
        rank: greatest rank of a factor.
    """
    found = []
    for segment, of in enumerate(places):
        for tensor, (offset, shape) in enumerate(of):
            if len(shape) < 2 or not shape.numel():
                continue
            rows, columns = shape[0], shape[1:].numel()
            if rank * (rows + columns) < rows * columns:
                found.append(Matrix(segment, tensor, offset, rows, columns, rank))
    return found


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span what the columns of a matrix do, whatever its rank.

    Args:
        matrix: [n, rank], n ≥ rank.

    Returns:
        [n, rank] of the same dtype; NaN if some element is not finite.
    """
    if not matrix.isfinite().all():
        return torch.full_like(matrix, torch.nan)
    # Householder's reflections: columns that are zero or depend on others become orthonormal too.
    columns: Tensor = torch.linalg.qr(matrix).Q
    return columns.contiguous()


def right_start(factor: Tensor, key: int) -> Tensor:
    """The V to begin a step with: of the right factor of the step before.

    Columns of zeros (of the first step, or of a matrix whose gradient was zero) would stay zeros:
    M V = 0 leads to another arbitrary U. So the seed draws them anew.

    Args:
        factor: right factor of the last sum, [columns, rank].
        key: key of the random numbers, different for each matrix and step.

    Returns:
        Orthonormal columns, [columns, rank].
    """
    is_zero = (factor == 0).all(dim=0)
    if is_zero.any():
        generator = np.random.Generator(np.random.Philox(key=key))
        drawn = torch.from_numpy(generator.standard_normal(tuple(factor.shape)))
        factor = torch.where(is_zero, drawn.to(factor), factor)
    return orthonormal(factor)
