"""The mesh's axes inside a replica: of depth, with stages of blocks, and of features, with shards.

Blocks and shards are fixed parts of a model, as a microbatch is of a batch. Along the axis of depth
nothing is summed: activations go from stage to stage, and their gradients back. Which rank computes
a shard changes nothing: sums over shards go along the canonical tree of `layout`, whose leaves are
the shards 0..num_shards-1.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from lockstep.comm.ahead import moved
from lockstep.comm.transport import LocalTransport, Sending, Transport
from lockstep.errors import TaskError
from lockstep.parallel.layout import Range, leaves, merges, split

_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MOST_DIMS = 8

Moment = Literal["send", "receive"]
"""Before tensors go to another stage, and before this one waits for them."""


_HEADER = 32
"""Numbers of a tensor's header: dtype, whether it has a gradient, number of dims, dims."""
_FEW = 7
"""Tensors whose headers come with the first message: this process waits for each such message."""

TIED = -1
"""`about` of messages that belong to no pass of a stage."""


class DepthAxis:
    """The ranks that compute one microbatch after another, each some of the blocks.

    With P ranks, rank p has the stages p, p + P, p + 2 P, ….

    Attributes:
        stages: range of blocks of each stage.
        size: number of ranks.
        rank: number of this rank among them.
        stage: number of the stage that this rank computes now.
    """

    def __init__(
        self,
        stages: Sequence[Range],
        transport: Transport | None = None,
        device: torch.device | None = None,
        at: Callable[[Moment], None] = lambda moment: None,
    ) -> None:
        """Join the axis.

        Args:
            stages: range of blocks of each stage, in order; as many for each rank.
            transport: transport between the ranks; without one, this process computes all blocks.
            device: device of all tensors; host memory by default.
            at: function that is called at each moment.
        """
        self._transport = transport or LocalTransport()
        self._device = device or torch.device("cpu")
        self.stages = list(stages)
        self.size, self.rank = self._transport.size, self._transport.rank
        self.stage = self.rank
        self._at = at
        self._pending: list[Sending] = []
        self._early: dict[tuple[int, int], deque[list[Tensor | None]]] = defaultdict(deque)

    def enter(self, stage: int) -> None:
        """Compute a stage of this rank from now on."""
        assert stage % self.size == self.rank, f"stage {stage} on rank {self.rank}"
        self.stage = stage

    @property
    def own_stages(self) -> range:
        """Numbers of the stages of this rank."""
        return range(self.rank, len(self.stages), self.size)

    @property
    def own(self) -> Range:
        """Blocks of the stage that is computed now."""
        return self.stages[self.stage]

    @property
    def is_first(self) -> bool:
        """Whether the stage that is computed now has the first block."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage that is computed now has the last block."""
        return self.stage == len(self.stages) - 1

    def stage_of(self, block: int) -> int:
        """The stage that has a block."""
        return next(n for n, blocks in enumerate(self.stages) if block in range(*blocks))

    def rank_of(self, block: int) -> int:
        """The rank that computes a block."""
        return self.stage_of(block) % self.size

    def send_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Begin to send what this stage has computed to the next one."""
        self.send(outputs, (self.stage + 1) % self.size, 2 * (self.stage + 1))

    def receive_inputs(self) -> list[Tensor]:
        """What the stage before has computed, as leaves of this rank's graph."""
        received = self.receive((self.stage - 1) % self.size, 2 * self.stage)
        outputs = [tensor for tensor in received if tensor is not None]
        assert len(outputs) == len(received), "a block passes on tensors only"
        return outputs

    def send_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Begin to send the gradients of `receive_inputs` to the stage before."""
        self.send(gradients, (self.stage - 1) % self.size, 2 * self.stage - 1)

    def receive_gradients(self) -> list[Tensor | None]:
        """The gradients of what `send_outputs` has sent."""
        return self.receive((self.stage + 1) % self.size, 2 * self.stage + 1)

    def send(self, tensors: Sequence[Tensor | None], rank: int, about: int) -> None:
        """Begin to send tensors to a rank; `finish` must follow before the step ends.

        Args:
            tensors: tensors; None arrives as None.
            rank: the rank.
            about: number that `receive` asks for.

        Raises:
            TaskError: a tensor is one that cannot be sent, see `check_sendable`.
        """
        self._at("send")
        header = torch.zeros(1 + max(len(tensors), _FEW), _HEADER, dtype=torch.int64)
        header[0, :2] = torch.tensor([len(tensors), about])
        payloads = []
        for row, tensor in zip(header[1:], tensors, strict=False):
            if tensor is None:
                row[0] = -1
                continue
            check_sendable(tensor, "Pipeline: another stage is to have")
            values = [_DTYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.dim()]
            values += tensor.shape
            row[: len(values)] = torch.tensor(values)
            payloads.append(_bytes(tensor.detach().contiguous()))
        first, rest = header[: 1 + _FEW].reshape(-1), header[1 + _FEW :].reshape(-1)
        for message in (first, rest, *payloads):
            if message.numel():
                self._pending.append(self._transport.send(moved(message, self._device), rank))

    def receive(self, rank: int, about: int) -> list[Tensor | None]:
        """The next tensors about something that a rank has sent, as leaves of this rank's graph."""
        self._at("receive")
        wanted = self._early[rank, about]
        while not wanted:
            # Messages come in the order in which they were sent, which is not always that in which
            # they are needed. One that comes early must not block the one that is waited for.
            subject, tensors = self._next(rank)
            self._early[rank, subject].append(tensors)
        return wanted.popleft()

    def _next(self, rank: int) -> tuple[int, list[Tensor | None]]:
        """What the next message of a rank is about, and its tensors."""
        (count, about, *_), *rows = self._headers(1 + _FEW, rank)
        if count > _FEW:
            rows += self._headers(count - _FEW, rank)
        tensors: list[Tensor | None] = []
        for row in rows[:count]:
            if row[0] < 0:
                tensors.append(None)
                continue
            dtype, with_gradient, num_dims = row[:3]
            tensor = self._received(row[3 : 3 + num_dims], _DTYPES[dtype], rank)
            tensors.append(tensor.requires_grad_(bool(with_gradient)))
        return about, tensors

    def finish(self) -> None:
        """Return when all messages of this rank are sent."""
        for message in self._pending:
            message.wait()
        # Only now: after an error, pending messages may still be read from their memory.
        self._pending.clear()

    def _headers(self, num: int, rank: int) -> list[list[int]]:
        """Rows of numbers from a rank, which are of use as long as no rank is lost."""
        rows = self._received((num, _HEADER), torch.int64, rank)
        if rows.is_cpu:
            return list(rows.tolist())
        with self._transport.in_stream():
            self._transport.observer.wait()
            return list(rows.tolist())

    def _received(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        if tensor.numel():
            self._transport.receive(_bytes(tensor), rank)
        return tensor


def check_sendable(tensor: Tensor, subject: str) -> None:
    """Refuse a tensor that cannot go to another stage.

    Args:
        tensor: tensor of the user's.
        subject: beginning of the message: what the tensor is.

    Raises:
        TaskError: it is not dense, or has a dtype or a number of dims that headers cannot describe.
    """
    if tensor.layout != torch.strided:
        has = f"a tensor of layout {tensor.layout}"
    elif tensor.dtype not in _DTYPES:
        has = f"a tensor of dtype {tensor.dtype}"
    elif tensor.dim() > _MOST_DIMS:
        has = f"a tensor of {tensor.dim()} dims"
    else:
        return
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
    raise TaskError(
        f"{subject} {has}, which cannot go to another stage: give a dense tensor of at most "
        f"{_MOST_DIMS} dims, of dtype {names}"
    )


def balanced(costs: Sequence[float], num_stages: int) -> list[Range]:
    """Blocks in contiguous ranges, at least one each, such that the costliest is least.

    Of equal ways the one is taken whose first stages have the fewest blocks.

    Args:
        costs: cost of each block, in any unit; 0 or more.
        num_stages: number of ranges, at most the number of blocks.
    """
    sums = [0.0, *accumulate(costs)]
    num_blocks = len(costs)
    best: list[list[tuple[float, int]]] = [[(math.inf, 0)] * (num_blocks + 1)]
    best[0][0] = (0.0, 0)
    for stage in range(1, num_stages + 1):
        row = [(math.inf, 0)] * (num_blocks + 1)
        for last in range(stage, num_blocks + 1):
            row[last] = min(
                (max(best[stage - 1][first][0], sums[last] - sums[first]), first)
                for first in range(stage - 1, last)
            )
        best.append(row)
    ranges, last = [], num_blocks
    for stage in range(num_stages, 0, -1):
        first = best[stage][last][1]
        ranges.append(Range(first, last))
        last = first
    return ranges[::-1]


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as integers of a size that every transport moves."""
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view({4: torch.int32, 8: torch.int64}.get(flat.itemsize, torch.uint8))


class ShardAxis:
    """The ranks that compute one microbatch together, each some of the shards.

    Attributes:
        num_shards: number of shards of each layer.
        ranges: range of shards of each rank.
        own: range of shards of this rank.
        closed: why there must be no sums now, as not all ranks take part; empty if they do.
    """

    closed = ""

    def __init__(self, num_shards: int, transport: Transport | None = None) -> None:
        """Assign the shards to ranks.

        Args:
            num_shards: number of shards of each layer, at least the number of ranks.
            transport: transport between the ranks; without one, this process computes all shards.
        """
        self._transport = transport or LocalTransport()
        self.num_shards = num_shards
        self.ranges = split(num_shards, self._transport.size)
        self.own: Range = self.ranges[self._transport.rank]
        self._local, _ = merges(leaves(self.own), num_shards)
        nodes = [merges(leaves(r), num_shards)[1] for r in self.ranges]
        self._counts = [len(of_rank) for of_rank in nodes]
        self._plan, _ = merges([node for of_rank in nodes for node in of_rank], num_shards)

    @property
    def is_local(self) -> bool:
        """Whether this process computes all shards."""
        return self._transport.size == 1

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all shards, the same bits on every rank; a collective.

        Args:
            parts: tensors of this rank's shards, of one shape and dtype on all ranks.

        Raises:
            GroupBroken: a rank was lost.
            TaskError: the axis is closed.
        """
        self._check_open()
        nodes = _folded(parts, self._local)
        if not self.is_local:
            nodes = _folded(self._exchanged(nodes, self._counts), self._plan)
        return nodes[0]

    def maximum(self, parts: Sequence[Tensor]) -> Tensor:
        """The element-wise maximum over all shards, the same on every rank; a collective.

        Args:
            parts: tensors of this rank's shards, of one shape and dtype on all ranks.
        """
        self._check_open()
        greatest = functools.reduce(torch.maximum, parts)
        if self.is_local:
            return greatest
        return functools.reduce(torch.maximum, self._exchanged([greatest], [1] * len(self.ranges)))

    def all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of all shards, in order; a collective.

        Args:
            parts: tensors of this rank's shards, of one shape and dtype on all ranks.
        """
        self._check_open()
        if self.is_local:
            return list(parts)
        return self._exchanged(parts, [len(r) for r in self.ranges])

    def _check_open(self) -> None:
        if self.closed:
            raise TaskError(self.closed)

    def _exchanged(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Every rank's tensors, all of one shape, of which each rank has `counts[rank]`."""
        first = tensors[0]
        size = first.numel()
        out = first.new_empty((sum(counts), size))
        start = sum(counts[: self._transport.rank])
        for row, tensor in enumerate(tensors, start):
            out[row] = tensor.reshape(-1)
        own = out[start : start + len(tensors)]
        flat = out.view(-1)
        if size:
            # As bytes: transports move them, whatever the dtype.
            raw = flat.view(torch.uint8)
            width = size * first.element_size()
            self._transport.all_gather(
                own.reshape(-1).view(torch.uint8), raw, [count * width for count in counts]
            )
        return [row.view(first.shape) for row in out]


def _folded(parts: Sequence[Tensor], plan: Sequence[int]) -> list[Tensor]:
    """What is left of tensors after the additions of `layout.merges`; none is overwritten."""
    stack: list[Tensor] = []
    is_new: list[bool] = []
    for part, count in zip(parts, plan, strict=True):
        stack.append(part)
        is_new.append(False)
        for _ in range(count):
            right = stack.pop()
            is_new.pop()
            # Only sums that were made here may be added to in place.
            stack[-1] = stack[-1].add_(right) if is_new[-1] else stack[-1] + right
            is_new[-1] = True
    return stack
