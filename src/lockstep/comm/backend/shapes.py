"""Checks that the sizes of an operation's tensors fit together: pure arithmetic, without MPI."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

from torch import Tensor


def displacements(counts: Sequence[int]) -> list[int]:
    """The start of each part when parts of these sizes lie one behind the other."""
    return [0, *accumulate(counts)][:-1]


def split_counts(shape: Sequence[int], splits: Sequence[int], num_ranks: int) -> list[int]:
    """Elements for each rank when a tensor of this shape is cut along dim 0.

    Args:
        shape: shape of the tensor.
        splits: number of rows for each rank; empty for equal parts.
        num_ranks: number of ranks of the group.

    Raises:
        ValueError: the rows cannot be cut that way.
    """
    rows = shape[0] if shape else 1
    if not splits:
        if rows % num_ranks:
            raise ValueError(f"dim 0 of size {rows} does not divide among {num_ranks} ranks")
        splits = [rows // num_ranks] * num_ranks
    if len(splits) != num_ranks or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"split sizes {list(splits)} do not cut dim 0 of size {rows} among {num_ranks} ranks"
        )
    per_row = prod(shape[1:])
    return [rows_of_rank * per_row for rows_of_rank in splits]


def only(items: Any) -> Any:
    """The one item: torch passes lists, from the days of several devices per process.

    Raises:
        ValueError: there are none or several.
    """
    if isinstance(items, Tensor):
        return items
    if len(items) != 1:
        raise ValueError(f"mpi4py takes one tensor or list of them per rank, got {len(items)}")
    return items[0]


def check_parts(
    operation: str, counts: Sequence[int], rank: int, size: int, own: int | None = None
) -> None:
    """Check the sizes of a list with one part per rank against this rank's own tensor.

    Args:
        operation: name of the operation, for the message.
        counts: number of elements of each part.
        rank: rank of this process in the group.
        size: number of ranks of the group.
        own: number of elements that this rank's own part must have; None if that is not known.

    Raises:
        ValueError: there is not one part per rank, or the own part differs.
    """
    if len(counts) != size:
        raise ValueError(f"{operation} needs one tensor per rank: {size}, got {len(counts)}")
    if own is not None and counts[rank] != own:
        raise ValueError(
            f"{operation}: this rank's own part has {counts[rank]} elements on one side "
            f"and {own} on the other"
        )


def check_whole(operation: str, whole: Tensor, part: Tensor, num_ranks: int) -> None:
    """Check that one tensor is as large as all ranks' parts.

    Raises:
        ValueError: it is not.
    """
    if whole.numel() != num_ranks * part.numel():
        raise ValueError(
            f"{operation}: {whole.numel()} elements are not {num_ranks} times {part.numel()}"
        )


def check_dtypes(operation: str, tensors: Sequence[Tensor]) -> None:
    """Check that all tensors have one dtype.

    Raises:
        ValueError: they do not.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"{operation} needs tensors of one dtype, got {names}")
