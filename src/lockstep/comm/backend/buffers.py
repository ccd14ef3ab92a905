"""Tensors as MPI sees them: host memory, a datatype and counts, whose sizes have to fit together.

MPI needs an address, so everything else a tensor can be (strided, conjugated, on a GPU) is
staged through a plain copy: `readable` before the transfer, `writable` and `deliver` around it.
Half precision is summed in float32 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lockstep.comm.mpi.library import MPI
from lockstep.comm.transport import offsets


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


BufferSpec: TypeAlias = list[Any]
"""A message as mpi4py takes it: `[memory, datatype]`, or with counts and displacements."""

# Moving bytes does not depend on what they mean, so any dtype of these sizes can travel.
_MOVED_AS = {
    1: MPI.UINT8_T,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}

_SUMMED_AS = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}

# MPI has no half-precision sums, and a bool is a byte that must stay 0 or 1.
_TRAVELS_AS = {
    torch.bool: torch.uint8,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}

_MPI_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,
    ReduceOp.PREMUL_SUM: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}

# On bytes 0 and 1 these are "or" and "and", where + and * would leave the range.
_BOOL_OPS = {ReduceOp.SUM: MPI.MAX, ReduceOp.PRODUCT: MPI.MIN}


def is_plain(tensor: Tensor) -> bool:
    """Whether MPI may use the tensor's own memory: strided, contiguous, in host memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def readable(tensor: Tensor) -> Tensor:
    """The same values, of the same shape and dtype, in plain memory; no copy where possible.

    Raises:
        TypeError: the tensor is sparse.
    """
    if is_plain(tensor):
        return tensor.detach()
    if tensor.layout != torch.strided:
        raise TypeError(f"mpi4py moves dense tensors only, got layout {tensor.layout}")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def writable(tensor: Tensor) -> Tensor:
    """Plain memory of the tensor's shape and dtype to receive into; its own where possible.

    Raises:
        TypeError: the tensor is sparse.
    """
    if is_plain(tensor):
        return tensor.detach()
    if tensor.layout != torch.strided:
        raise TypeError(f"mpi4py moves dense tensors only, got layout {tensor.layout}")
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def deliver(received: Tensor, tensor: Tensor) -> None:
    """Copy what `writable(tensor)` received to the tensor, unless it is there already."""
    if received.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(received)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All values one behind the other: plain, one-dimensional, in the dtype of the first."""
    return torch.cat([readable(tensor).reshape(-1) for tensor in tensors])


def flat_like(parts: Sequence[Tensor]) -> Tensor:
    """Memory for all elements of `parts`, one behind the other."""
    return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype)


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Undo `pack`: cut `flat` into the shapes of `tensors` and copy the parts there."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def on_current_stream(finish: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Make `finish` copy to the GPU in order with what the calling thread does there now."""
    if device.type != "cuda":
        return finish
    stream = torch.cuda.current_stream(device)

    def finish_on_stream() -> None:
        with torch.cuda.stream(stream):
            finish()
        stream.synchronize()

    return finish_on_stream


def unaliased(source: Tensor, target: Tensor) -> Tensor:
    """`source`, or a copy of it where it shares memory with `target` (MPI forbids that)."""
    shared = source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    return source.clone() if shared else source


def spec(plain: Tensor, counts: Sequence[int] | None = None) -> BufferSpec:
    """The message that moves a plain tensor; with `counts`, cut among ranks in that order.

    Raises:
        TypeError: elements of the dtype have a size that MPI has no datatype for.
    """
    datatype = _MOVED_AS.get(plain.itemsize)
    if datatype is None:
        raise TypeError(f"mpi4py cannot move elements of {plain.dtype}")
    return _spec(plain, datatype, counts)


def _spec(plain: Tensor, datatype: MPI.Datatype, counts: Sequence[int] | None) -> BufferSpec:
    memory = MPI.buffer.fromaddress(plain.data_ptr(), plain.nbytes)
    if counts is None:
        # mpi4py derives the count; one given here would mean the count per rank.
        return [memory, datatype]
    return [memory, counts, offsets(counts), datatype]


@dataclass(frozen=True, slots=True)
class Reduction:
    """How one reduce operation runs on tensors of one dtype."""

    kind: Any
    dtype: torch.dtype
    travels_as: torch.dtype
    mpi_op: MPI.Op
    datatype: MPI.Datatype
    factor: Any = None

    def load(self, tensor: Tensor) -> Tensor:
        """The tensor's contribution in the dtype that travels; its own memory where possible."""
        values = readable(tensor)
        if self.dtype == torch.bool:
            return values.view(torch.uint8)
        if self.dtype != self.travels_as:
            values = values.to(self.travels_as)
        return values if self.factor is None else values * self.factor

    def receiver(self, tensor: Tensor) -> Tensor:
        """Memory for the reduced values of `tensor`; its own where possible."""
        if self.dtype == torch.bool:
            return writable(tensor).view(torch.uint8)
        if self.dtype != self.travels_as:
            return torch.empty(tensor.shape, dtype=self.travels_as)
        return writable(tensor)

    def store(self, reduced: Tensor, tensor: Tensor, num_ranks: int) -> None:
        """Put the reduced values into the tensor: divide for AVG, round once, copy back.

        The mean of integers is rounded towards zero.
        """
        if self.kind == ReduceOp.AVG:
            parts = torch.view_as_real(reduced) if self.dtype.is_complex else reduced
            exact = parts.is_floating_point()
            parts.copy_(parts.div(num_ranks, rounding_mode=None if exact else "trunc"))
        if reduced.data_ptr() != tensor.data_ptr():
            result = reduced.view(torch.bool) if self.dtype == torch.bool else reduced
            tensor.detach().copy_(result.view(tensor.shape))

    def spec(self, loaded: Tensor) -> BufferSpec:
        """The message of a tensor that came from `load` or `receiver`."""
        return _spec(loaded, self.datatype, None)


def _defined(kind: Any, dtype: torch.dtype) -> bool:
    """Whether a reduction has a meaning for a dtype."""
    if kind in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        return not (dtype.is_floating_point or dtype.is_complex)
    if kind in (ReduceOp.MIN, ReduceOp.MAX):
        return not dtype.is_complex
    if kind == ReduceOp.AVG:
        return dtype != torch.bool
    if kind == ReduceOp.PREMUL_SUM:
        return dtype.is_floating_point or dtype.is_complex
    return True


def _make(kind: Any, dtype: torch.dtype) -> Reduction:
    travels_as = _TRAVELS_AS.get(dtype, dtype)
    special = _BOOL_OPS.get(kind) if dtype == torch.bool else None
    return Reduction(kind, dtype, travels_as, special or _MPI_OPS[kind], _SUMMED_AS[travels_as])


_REDUCTIONS = {
    (kind, dtype): _make(kind, dtype)
    for kind in _MPI_OPS
    for dtype in (*_SUMMED_AS, *_TRAVELS_AS)
    if _defined(kind, dtype)
}


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction for a `torch.distributed.ReduceOp` (or its kind) on a dtype.

    Raises:
        TypeError: the operation is not defined for the dtype.
    """
    kind = getattr(op, "op", op)
    plan = _REDUCTIONS.get((kind, dtype))
    if plan is None:
        name = getattr(kind, "name", kind)
        raise TypeError(f"reduce operation {name} is not defined for {dtype} on mpi4py")
    return replace(plan, factor=op.factor) if kind == ReduceOp.PREMUL_SUM else plan
