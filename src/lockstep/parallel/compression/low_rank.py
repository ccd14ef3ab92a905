"""Matrices as products of two thin ones: PowerSGD's arithmetic (Vogels, Karimireddy, Jaggi 2019).

A tensor of two or more dimensions counts as a matrix M of shape [rows, columns], its first
dimension by all others. With V of orthonormal columns [columns, rank], near the right singular
vectors of M, and U = orthonormal(M V) [rows, rank], the product U (Mᵀ U)ᵀ is near the best
approximation of M of that rank: one step of subspace iteration (algorithm 1 there).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.parallel.compression.reduction import CompressedReduction, Summed, flat_totals
from lockstep.parallel.fold import Row, TensorSpecs, laid_out, views


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


def matrices(specs: TensorSpecs, rank: int) -> list[Matrix]:
    """All tensors of which two factors of this rank have fewer elements than they have.

    Args:
        specs: for each segment, the (offset, shape) of each tensor.
        rank: greatest rank of a factor.
    """
    found = []
    for segment, of in enumerate(specs):
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
    M V = 0 leads to another arbitrary U. So they are drawn again, from the seed.

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


_UNIT = 16
"""Elements: tensors begin at multiples of them, which are cache lines."""


class LowRankReduction(CompressedReduction):
    """Sums M_i V and then M_iᵀ U over all leaves M_i, along the canonical tree.

    U are orthonormal columns of the first sum P, and V those of the second one of the step before
    (Vogels et al. 2019, algorithm 1). The total is U (Σ M_iᵀ U)ᵀ, and a leaf leaves M_i - U (M_iᵀ
    U)ᵀ to the next one: all of these, and the total, add up to the leaves. Tensors that are no
    matrices, or too small, travel whole with the first sum.

    A leaf is needed until U is known. Until then it lies where what it leaves will be, so that
    error feedback takes no more memory than of other kinds.
    """

    def __init__(self, summed: Summed, rank: int) -> None:
        """Lay out the memory.

        Args:
            summed: what is to be summed.
            rank: columns of a factor.
        """
        self._matrices = matrices(summed.leaves.specs, rank)
        of_tensor = {(m.segment, m.tensor): m for m in self._matrices}
        segments, left = laid_out(
            summed.leaves.segments,
            [
                [
                    _left(of_tensor[s, t]) if (s, t) in of_tensor else shape
                    for t, (_, shape) in enumerate(of)
                ]
                for s, of in enumerate(summed.leaves.specs)
            ],
            _UNIT,
        )
        self._left = left
        self._whole = [
            [t for t in range(len(of)) if (s, t) not in of_tensor]
            for s, of in enumerate(summed.leaves.specs)
        ]
        exact = summed.ordered(segments, left)
        self._sums = exact.total.segments[: len(left)]
        # The matrices of a segment come one after the other.
        used = sorted({m.segment for m in self._matrices})
        right_segments, self._right_specs = laid_out(
            [summed.leaves.segments[s] for s in used],
            [[_right(m) for m in self._matrices if m.segment == s] for s in used],
            _UNIT,
        )
        self._right = summed.ordered_of(right_segments, self._right_specs)
        self._no_scalars = torch.zeros(0, dtype=torch.float64, device=summed.leaves.device)
        exact_sums = Row(exact.total.segments[len(left) :], exact.total.scalars)
        self._flat, self.total = flat_totals(summed, exact_sums)
        super().__init__(summed, summed.leaves.segments, summed.leaves.specs, exact)

    def restart(self) -> None:
        """Forget the leaves of a step."""
        super().restart()
        self._waiting: list[list[Tensor]] = []
        states = self._summed.states
        self._starts = [
            right_start(factor, states.key + (number << 64))
            for number, factor in enumerate(states.agreed)
        ]

    def _take(self, exact: Sequence[Tensor | None], scalars: Tensor) -> Sequence[Tensor]:
        leaf = [segment.clone() for segment in self._leaf.segments]
        specs = self._summed.leaves.specs
        sent = [views(segment, of) for segment, of in zip(leaf, specs, strict=True)]
        for matrix, start in zip(self._matrices, self._starts, strict=True):
            sent[matrix.segment][matrix.tensor] = matrix.of(leaf) @ start
        self._exact.fold.add([*(tensor for of in sent for tensor in of), *exact], scalars)
        for tensors, whole in zip(sent, self._whole, strict=True):
            for number in whole:
                tensors[number].zero_()
        self._waiting.append(leaf)
        return leaf if self._summed.feeds_back else []

    def _reduce(self) -> None:
        sums = [views(s, of) for s, of in zip(self._sums, self._left, strict=True)]
        lefts = [orthonormal(sums[m.segment][m.tensor]) for m in self._matrices]
        self._right.restart()
        for leaf in self._waiting:
            self._right.fold.add(list(self._cut(leaf, lefts)), self._no_scalars)
        self._summed.at("factors")
        # A rank that gets this sum knows that all ranks have computed the errors of their leaves.
        self._right.reduce()
        pairs = zip(self._right.total.segments, self._right_specs, strict=True)
        rights = [view.clone() for segment, of in pairs for view in views(segment, of)]
        segments = zip(self._flat.segments, self._summed.leaves.specs, strict=True)
        flat = [views(segment, of) for segment, of in segments]
        for number, whole in enumerate(self._whole):
            for tensor in whole:
                flat[number][tensor].copy_(sums[number][tensor])
        for matrix, left, right in zip(self._matrices, lefts, rights, strict=True):
            torch.mm(left, right.T, out=matrix.of(self._flat.segments))
        self._summed.states.agree(rights)

    def _cut(self, leaf: Sequence[Tensor], lefts: Sequence[Tensor]) -> Iterable[Tensor]:
        """The right factors of a leaf, of which they are taken away."""
        for matrix, left in zip(self._matrices, lefts, strict=True):
            there = matrix.of(leaf)
            right = there.T @ left
            if self._summed.feeds_back:
                there.addmm_(left, right.T, alpha=-1)
            yield right


def _left(matrix: Matrix) -> torch.Size:
    return torch.Size([matrix.rows, matrix.rank])


def _right(matrix: Matrix) -> torch.Size:
    return torch.Size([matrix.columns, matrix.rank])
