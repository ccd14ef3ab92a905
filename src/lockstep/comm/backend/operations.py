"""The operations of the `mpi4py` backend, each on one nonblocking MPI call.

Two rules hold for all operations. All ranks use the same call, whatever one of them knows about
the sizes of the others, because MPI does not match different calls. And no call blocks: it
would ignore timeouts, and would not match an asynchronous call on another rank.

Tensors are dense, of any shape, and of equal dtype on all ranks. All methods return at once;
what MPI reports later is raised by the `wait` of the `Work` they return. They raise `TypeError`
for a dtype or layout they do not serve and `ValueError` for sizes that do not fit together.

See `lockstep.comm.backend.operations` for what all operations have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.comm.backend.buffers import (
    check_dtypes,
    check_parts,
    check_whole,
    deliver,
    flat_like,
    on_current_stream,
    only,
    pack,
    readable,
    reduction,
    spec,
    split_counts,
    unaliased,
    unpack,
    writable,
)
from lockstep.comm.backend.group import MpiGroup
from lockstep.comm.backend.work import MpiWork
from lockstep.comm.mpi.library import MPI

# mypy: disable-error-code="override, assignment"
# (torch calls a Python group with lists and options; its stubs list more forms of call.)


class Movements(MpiGroup):
    """The operations that only move data."""

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any) -> MpiWork:
        """Overwrite one tensor with that of rank `opts.rootRank`."""
        tensor = only(tensors)
        if self.rank() == opts.rootRank:
            source = readable(tensor)
            request = self.comm.Ibcast(spec(source), opts.rootRank)
            return self.started("broadcast", request, [tensor], tensor, opts, keep=source)
        target = writable(tensor)
        request = self.comm.Ibcast(spec(target), opts.rootRank)
        return self.started(
            "broadcast", request, [tensor], tensor, opts, partial(deliver, target, tensor)
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> MpiWork:
        """Fill `outputs[0][r]` with the input of rank r; sizes may differ."""
        tensor, parts = only(inputs), only(outputs)
        counts = [part.numel() for part in parts]
        check_parts("allgather", counts, self.rank(), self._num_ranks, tensor.numel())
        check_dtypes("allgather", [tensor, *parts])
        source, target = readable(tensor), flat_like(parts)
        if len(set(counts)) == 1:
            request = self.comm.Iallgather(spec(source), spec(target))
        else:
            request = self.comm.Iallgatherv(spec(source), spec(target, counts))
        finish = partial(unpack, target, parts)
        return self.started("allgather", request, outputs, tensor, opts, finish, source)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        """Fill the r-th equal part of `output` with the input of rank r."""
        check_whole("allgather", output, input, self._num_ranks)
        check_dtypes("allgather", [output, input])
        target = writable(output)
        source = unaliased(readable(input), target)
        request = self.comm.Iallgather(spec(source), spec(target))
        finish = partial(deliver, target, output)
        return self.started("allgather", request, [output], output, opts, finish, source)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> MpiWork:
        """Do `all_gather_single` for each pair of an output and an input."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.all_gather_single(output, input, opts) for output, input in pairs]
        return self.together("allgather_coalesced", works, outputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> MpiWork:
        """Fill `outputs[r][i]` with the i-th input of rank r."""
        works = [
            self.allgather([[parts[i] for parts in outputs]], [tensor], opts)
            for i, tensor in enumerate(inputs)
        ]
        return self.together("allgather_coalesced", works, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MpiWork:
        """Fill `outputs[0][r]` on rank `opts.rootRank` with the input of rank r."""
        tensor = only(inputs)
        source = readable(tensor)
        if self.rank() != opts.rootRank:
            request = self.comm.Igatherv(spec(source), None, opts.rootRank)
            return self.started("gather", request, outputs, tensor, opts, keep=source)
        parts = only(outputs)
        counts = [part.numel() for part in parts]
        check_parts("gather", counts, self.rank(), self._num_ranks, tensor.numel())
        check_dtypes("gather", [tensor, *parts])
        target = flat_like(parts)
        request = self.comm.Igatherv(spec(source), spec(target, counts), opts.rootRank)
        finish = partial(unpack, target, parts)
        return self.started("gather", request, outputs, tensor, opts, finish, source)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MpiWork:
        """Fill the output of rank r with `inputs[0][r]` of rank `opts.rootRank`."""
        output = only(outputs)
        target = writable(output)
        source, message = None, None
        if self.rank() == opts.rootRank:
            parts = only(inputs)
            counts = [part.numel() for part in parts]
            check_parts("scatter", counts, self.rank(), self._num_ranks, output.numel())
            check_dtypes("scatter", [output, *parts])
            source = pack(parts)
            message = spec(source, counts)
        request = self.comm.Iscatterv(message, spec(target), opts.rootRank)
        finish = partial(deliver, target, output)
        return self.started("scatter", request, outputs, output, opts, finish, source)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        """Send `inputs[r]` to rank r and fill `outputs[r]` from rank r; sizes may differ."""
        sent, received = ([part.numel() for part in parts] for parts in (inputs, outputs))
        check_parts("alltoall", sent, self.rank(), self._num_ranks)
        check_parts("alltoall", received, self.rank(), self._num_ranks, sent[self.rank()])
        check_dtypes("alltoall", [*outputs, *inputs])
        source, target = pack(inputs), flat_like(outputs)
        request = self.comm.Ialltoallv(spec(source, sent), spec(target, received))
        finish = partial(unpack, target, outputs)
        return self.started("alltoall", request, outputs, outputs[0], opts, finish, source)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> MpiWork:
        """Cut `input` along dim 0, send the r-th part to rank r; collect the same way.

        Empty splits mean equal parts.
        """
        check_dtypes("alltoall", [output, input])
        received = split_counts(output.shape, output_splits, self._num_ranks)
        sent = split_counts(input.shape, input_splits, self._num_ranks)
        target = writable(output)
        source = unaliased(readable(input), target)
        request = self.comm.Ialltoallv(spec(source, sent), spec(target, received))
        finish = partial(deliver, target, output)
        return self.started("alltoall", request, [output], output, opts, finish, source)

    def barrier(self, opts: Any = None) -> MpiWork:
        """Be done when all ranks have called this."""
        return self.launch("barrier", self.comm.Ibarrier().Test, [], opts=opts)

    # Point to point.

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> MpiWork:
        """Send one tensor to a rank of the group."""
        tensor = only(tensors)
        source = readable(tensor)
        request = self.comm.Isend(spec(source), dst, tag)
        return self.started("send", request, tensors, tensor, keep=source)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> MpiWork:
        """Receive one tensor, of the very size that was sent, from a rank of the group."""
        tensor = only(tensors)
        target = writable(tensor)
        message = spec(target)
        request = self.comm.Irecv(message, src, tag)
        status = MPI.Status()

        def finish() -> None:
            got = status.Get_count(message[-1])
            if got != tensor.numel():
                raise ValueError(
                    f"{self.describe('recv')} got {got} elements from rank "
                    f"{status.Get_source()} for a tensor of {tensor.numel()}"
                )
            deliver(target, tensor)

        return self.launch(
            "recv",
            partial(request.Test, status),
            tensors,
            finish=on_current_stream(finish, tensor.device),
            source=status.Get_source,
        )

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MpiWork:
        """Receive one tensor from whichever rank of the group sends first."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # The same under the names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


# mypy: disable-error-code="override, assignment"
# (torch calls a Python group with lists and options; its stubs list more forms of call.)


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
