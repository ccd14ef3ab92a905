"""The axis of depth: which blocks a rank computes, and what goes from stage to stage.

A block is a fixed part of a model, as a microbatch is of a batch. Nothing is summed along this
axis: activations go one way, and their gradients the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from lockstep.comm.transport import LocalTransport, Sending, Transport
from lockstep.errors import TaskError
from lockstep.parallel.layout import Range

_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MOST_DIMS = 8

Moment = Literal["send", "receive"]
"""Before tensors go to another stage, and before this one waits for them."""


def _nothing(moment: Moment) -> None:
    pass


_HEADER = 32
"""Numbers of a tensor's header: dtype, whether it has a gradient, number of dims, dims."""


class DepthAxis:
    """The ranks that compute one microbatch after another, each some of the blocks.

    Attributes:
        stages: range of blocks of each stage.
        stage: number of this rank's stage.
        own: range of blocks of this rank.
    """

    def __init__(
        self,
        stages: Sequence[Range],
        transport: Transport | None = None,
        device: torch.device | None = None,
        at: Callable[[Moment], None] = _nothing,
    ) -> None:
        """Take a place.

        Args:
            stages: range of blocks of each stage, in order.
            transport: transport between the ranks, one for each stage; without one, this process
                computes all blocks.
            device: device of all tensors; host memory by default.
            at: function that is called at each moment.
        """
        self._transport = transport or LocalTransport()
        self._device = device or torch.device("cpu")
        self.stages = list(stages)
        self.stage = self._transport.rank
        self.own = self.stages[self.stage]
        self._at = at
        self._under_way: list[Sending] = []

    @property
    def is_first(self) -> bool:
        """Whether this rank computes the first block."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the last block."""
        return self.stage == len(self.stages) - 1

    def stage_of(self, block: int) -> int:
        """The stage that computes a block."""
        return next(n for n, blocks in enumerate(self.stages) if block in range(*blocks))

    def send(self, tensors: Sequence[Tensor | None], stage: int) -> None:
        """Begin to send tensors to a stage; `finish` must follow before the step ends.

        Raises:
            TaskError: a tensor is one that cannot be sent, see `check_sendable`.
        """
        self._at("send")
        header = torch.zeros(1 + len(tensors), _HEADER, dtype=torch.int64)
        header[0, 0] = len(tensors)
        payloads = []
        for row, tensor in zip(header[1:], tensors, strict=True):
            if tensor is None:
                row[0] = -1
                continue
            check_sendable(tensor, "Pipeline: another stage is to have")
            values = [_DTYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.dim()]
            values += tensor.shape
            row[: len(values)] = torch.tensor(values)
            payloads.append(_bytes(tensor.detach().contiguous()))
        for message in (header[0], header[1:].reshape(-1), *payloads):
            if message.numel():
                there = message.to(self._device)
                self._under_way.append(self._transport.send(there, stage))

    def receive(self, stage: int) -> list[Tensor | None]:
        """The next tensors that a stage has sent, as leaves of this rank's graph."""
        self._at("receive")
        count = int(self._received((_HEADER,), torch.int64, stage)[0])
        rows = self._received((count * _HEADER,), torch.int64, stage) if count else torch.empty(0)
        tensors: list[Tensor | None] = []
        for row in rows.view(-1, _HEADER).tolist():
            if row[0] < 0:
                tensors.append(None)
                continue
            dtype, with_gradient, num_dims = row[:3]
            tensor = self._received(row[3 : 3 + num_dims], _DTYPES[dtype], stage)
            tensors.append(tensor.requires_grad_(bool(with_gradient)))
        return tensors

    def finish(self) -> None:
        """Return when all that this rank has sent is under way no longer."""
        for message in self._under_way:
            message.wait()
        # Not earlier: what an error leaves under way may still be read from the memory it holds.
        self._under_way.clear()

    def _received(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        if tensor.numel():
            self._transport.receive(_bytes(tensor), stage)
        return tensor


def check_sendable(tensor: Tensor, what: str) -> None:
    """Refuse a tensor that cannot go to another stage.

    Args:
        tensor: tensor of the user's.
        what: beginning of the message: what the tensor is.

    Raises:
        TaskError: it is not dense, or has a dtype or a number of dims that no message can tell of.
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
        f"{what} {has}, which cannot go to another stage: give a dense tensor of at most "
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
