"""The reductions of the `mpi4py` backend, each on one nonblocking MPI call.

See `lockstep.comm.backend.movements` for what all operations have in common.
"""

# mypy: disable-error-code="override, assignment"
# (torch calls a Python group with lists and options; its stubs list more forms of call.)

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.comm.backend.buffers import pack, reduction, unaliased
from lockstep.comm.backend.group import MpiGroup
from lockstep.comm.backend.shapes import check_dtypes, check_parts, check_whole, only
from lockstep.comm.backend.work import MpiWork
from lockstep.comm.mpi.library import MPI


class Reductions(MpiGroup):
    """The operations that compute."""

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None) -> MpiWork:
        """Reduce one tensor over all ranks, in place."""
        tensor = only(tensors)
        plan = reduction(_op_of(opts), tensor.dtype)
        total = plan.load(tensor)
        request = self.comm.Iallreduce(MPI.IN_PLACE, plan.spec(total), plan.mpi_op)
        finish = partial(plan.store, total, tensor, self._num_ranks)
        return self.started("allreduce", request, [tensor], tensor, opts, finish)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        """Reduce each of several tensors over all ranks, in place."""
        works = [self.allreduce([tensor], opts) for tensor in tensors]
        return self.together("allreduce_coalesced", works, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        """Reduce one tensor over all ranks into that of rank `opts.rootRank`."""
        tensor = only(tensors)
        plan = reduction(opts.reduceOp, tensor.dtype)
        total = plan.load(tensor)
        message = plan.spec(total)
        if self.rank() == opts.rootRank:
            request = self.comm.Ireduce(MPI.IN_PLACE, message, plan.mpi_op, opts.rootRank)
            finish = partial(plan.store, total, tensor, self._num_ranks)
            return self.started("reduce", request, [tensor], tensor, opts, finish)
        request = self.comm.Ireduce(message, None, plan.mpi_op, opts.rootRank)
        return self.started("reduce", request, [tensor], tensor, opts, keep=total)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> MpiWork:
        """Reduce `inputs[0][r]` over all ranks into the output of rank r; sizes may differ."""
        output, parts = only(outputs), only(inputs)
        counts = [part.numel() for part in parts]
        check_parts("reduce_scatter", counts, self.rank(), self._num_ranks, output.numel())
        check_dtypes("reduce_scatter", [output, *parts])
        plan = reduction(_op_of(opts), output.dtype)
        source, target = plan.load(pack(parts)), plan.receiver(output)
        request = self.comm.Ireduce_scatter(
            plan.spec(source), plan.spec(target), counts, plan.mpi_op
        )
        finish = partial(plan.store, target, output, self._num_ranks)
        return self.started("reduce_scatter", request, outputs, output, opts, finish, source)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        """Reduce the r-th equal part of `input` over all ranks into the output of rank r."""
        check_whole("reduce_scatter", input, output, self._num_ranks)
        check_dtypes("reduce_scatter", [output, input])
        plan = reduction(_op_of(opts), output.dtype)
        target = plan.receiver(output)
        source = unaliased(plan.load(input), target)
        request = self.comm.Ireduce_scatter_block(plan.spec(source), plan.spec(target), plan.mpi_op)
        finish = partial(plan.store, target, output, self._num_ranks)
        return self.started("reduce_scatter", request, [output], output, opts, finish, source)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> MpiWork:
        """Do `reduce_scatter_single` for each pair of an output and an input."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, input, opts) for output, input in pairs]
        return self.together("reduce_scatter_coalesced", works, outputs)

    # The same under the names of torch before 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _op_of(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
