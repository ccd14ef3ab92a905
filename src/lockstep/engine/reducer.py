"""Sums of gradients that do not depend on the number of ranks, for custom training loops."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shared_memory import are_on_one_host
from lockstep.comm.torchdist.process_group_transport import GroupTransport
from lockstep.comm.transport import LocalTransport, Transport, collective
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.errors import ConfigError, TaskError
from lockstep.parallel.exchange import Leaves
from lockstep.parallel.mesh import Mesh
from lockstep.parallel.reduction import OrderedReduction, Ways


class BorrowedGroup(GroupTransport):
    """A process group of torch.distributed that its owner destroys."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """Use a group.

        Args:
            group: a `torch.distributed.ProcessGroup`.
            device: device on which the tensors to move lie.
        """
        super().__init__(dist.get_backend(group), device)
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    @collective
    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self.traffic.add(0, 0)
        dist.barrier(self.group)

    def close(self) -> None:
        """Nothing to do."""


def transport_over(group: Any, device: torch.device) -> Transport:
    """A transport over a group.

    Args:
        group: a `torch.distributed.ProcessGroup`, an `mpi4py.MPI.Intracomm`, or None for the
            default process group, where there is one, and else this process alone.
        device: device on which the tensors to move lie.

    Raises:
        TypeError: it is something else.
    """
    if group is None:
        if not dist.is_initialized():
            return LocalTransport()
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return BorrowedGroup(group, device)
    # A program that has a communicator has imported mpi4py; others must not call MPI_Init here.
    mpi4py = sys.modules.get("mpi4py.MPI")
    if mpi4py is not None and isinstance(group, mpi4py.Intracomm):
        from lockstep.comm.mpi.transport import BorrowedComm

        return BorrowedComm(group)
    raise TypeError(f"a {type(group).__name__}")


_BUCKET_BYTES = 8 << 20


class Reducer:
    """An ordered all-reduce of gradients, over any group, for a plain training loop.

        reducer = ls.Reducer(model.parameters(), num_microbatches=8)
        for step in range(num_steps):
            for m in reducer.microbatches(step):
                x, y = batch_of(step, m)
                loss = cross_entropy(model(x), y, reduction="sum")
                loss.backward()
                reducer.add(len(x), loss=loss)
            means = reducer.reduce()
            optimizer.step()

    The global batch of a step is cut into `num_microbatches` parts, whatever the number of ranks.
    Each rank computes a contiguous range of them. Their gradients are added up along a binary tree
    that depends on the number of microbatches alone, so every rank gets the same bits, and gets
    them on any number of ranks, as long as the gradient of a microbatch depends on the
    parameters, the step and the microbatch only, and parameters are equal at the start.

    Buffers (batch norm), the optimizer, checkpoints and lost ranks are the loop's own business;
    `lockstep.Task` has them done.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        num_microbatches: int,
        group: Any = None,
        sums: Sequence[str] = ("loss",),
        seed: int = 0,
    ) -> None:
        """Allocate memory for the sums; all ranks of the group call this.

        Args:
            parameters: parameters, the same on all ranks, in float32 or float64 on one device;
                those that need no gradient are left out.
            num_microbatches: number of parts of a step's global batch.
            group: a `torch.distributed.ProcessGroup` or an `mpi4py.MPI.Intracomm`; by default the
                default process group, or this process alone where there is none.
            sums: names of the numbers that are summed beside the gradient.
            seed: seed of the random numbers in microbatches.

        Raises:
            ConfigError: there is no parameter, a bad number of microbatches, or no such group.
            TaskError: a parameter is neither float32 nor float64.
        """
        self._parameters = [p for p in parameters if p.requires_grad]
        if not self._parameters:
            raise ConfigError("Reducer: parameters: none of them requires a gradient")
        if num_microbatches < 1:
            raise ConfigError(f"Reducer: num_microbatches={num_microbatches}: must be at least 1")
        devices = {p.device for p in self._parameters}
        if len(devices) > 1:
            raise ConfigError(
                f"Reducer: parameters: are on {', '.join(sorted(map(str, devices)))}; must be on "
                "one device"
            )
        device = devices.pop()
        try:
            self._transport = transport_over(group, device)
        except TypeError as error:
            raise ConfigError(
                f"Reducer: group: is {error}; must be a torch.distributed.ProcessGroup, an "
                "mpi4py.MPI.Intracomm or None"
            ) from None
        self._names = tuple(sums)
        self._seed = seed
        self._device = device
        # Copies, for their layout: the parameters stay where they are.
        copies = [(str(i), torch.empty_like(p)) for i, p in enumerate(self._parameters)]
        flat = FlatTensors([copies], "parameter")
        position = {id(copy): i for i, (_, copy) in enumerate(copies)}
        self._order = [position[id(tensor)] for tensor in flat.tensors]
        ranges = Mesh.of(num_microbatches, self._transport.size).microbatches
        self._mine = range(*ranges[self._transport.rank])
        self._reduction = OrderedReduction(
            self._transport,
            Leaves(flat.segments, flat.specs, 1 + len(self._names), num_microbatches, device),
            ranges,
            num_header=1,
            bucket_bytes=_BUCKET_BYTES,
            ways=Ways(shares_memory=True, is_one_host=are_on_one_host(self._transport)),
        )
        total = self._reduction.total.segments
        self._views = [flat.view(total, entry) for entry in flat.entries]
        self._num_added = 0

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        return self._transport.size

    def microbatches(self, step: int) -> Iterator[int]:
        """The microbatches of this rank, in order; none where there are more ranks than parts.

        Before each one gradients are cleared, and the global random generators (torch, numpy,
        Python) are set to a state that depends on seed, step and microbatch.

        Args:
            step: number of the step.
        """
        self._reduction.restart()
        self._num_added = 0
        for microbatch in self._mine:
            self._clear()
            seed_all(random_key(self._seed, Stream.FORWARD, step, microbatch))
            yield microbatch

    def add(self, weight: float | Tensor, **sums: float | Tensor) -> None:
        """Take the gradients of a microbatch, after its backward pass.

        Args:
            weight: what the summed gradient is to be divided by in the end, for this microbatch: as
                a rule its number of samples.
            sums: the numbers named at the start, summed over the microbatch.

        Raises:
            TaskError: other numbers than named, or more microbatches than this rank has.
        """
        if sums.keys() != {*self._names}:
            raise TaskError(
                f"Reducer.add: got {sorted(sums)}; sums={list(self._names)} were named at the start"
            )
        if self._num_added >= len(self._mine):
            raise TaskError(
                f"Reducer.add: this rank has {len(self._mine)} microbatches; call add once in each "
                "round of `for m in reducer.microbatches(step)`"
            )
        given = (weight, *(sums[name] for name in self._names))
        values = [v.item() if isinstance(v, Tensor) else float(v) for v in given]
        scalars = torch.tensor(values, dtype=torch.float64, device=self._device)
        leaf = [self._parameters[i].grad for i in self._order]
        self._reduction.fold.add(leaf, scalars)
        self._num_added += 1
        self._clear()

    def reduce(self) -> Mapping[str, float]:
        """Sum over all ranks: every parameter's `grad` is the mean gradient; a collective.

        The memory of `grad` is used again by the next `reduce`.

        Returns:
            Each of the named sums, divided by all weights.

        Raises:
            TaskError: a rank has not added all its microbatches, or the weights add up to nothing;
                on all ranks.
        """
        is_complete = self._num_added == len(self._mine)
        self._reduction.header.fill_(float(is_complete))
        if not is_complete:
            self._fill_up()
        self._reduction.reduce()
        # Otherwise another call without microbatches would return the same sums again.
        self._reduction.restart()
        self._num_added = 0
        late = [
            rank for rank, (there,) in enumerate(self._reduction.headers().tolist()) if not there
        ]
        if late:
            raise TaskError(
                f"Reducer.reduce: rank {late[0]} has not added all its microbatches; call add once "
                "in each round of `for m in reducer.microbatches(step)`"
            )
        weight, *totals = self._reduction.total.scalars.tolist()
        if not (weight > 0 and math.isfinite(weight)):
            raise TaskError(f"Reducer.reduce: all weights add up to {weight}; must be above 0")
        for i, view in zip(self._order, self._views, strict=True):
            view.mul_(1.0 / weight)
            self._parameters[i].grad = view
        return {name: total / weight for name, total in zip(self._names, totals, strict=True)}

    def close(self) -> None:
        """Free what the reducer has made; the group stays."""
        self._transport.close()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _fill_up(self) -> None:
        """Add empty microbatches, so that this rank takes part and all ranks raise the error."""
        nothing = torch.zeros(1 + len(self._names), dtype=torch.float64, device=self._device)
        for _ in range(self._num_added, len(self._mine)):
            self._reduction.fold.add([None] * len(self._order), nothing)
