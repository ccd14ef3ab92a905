"""Block by block: parameters are whole while their block is computed, gradients until it is left.

The rest of the time a rank has its slices of them only (ZeRO-3 and ZeRO-2: Rajbhandari et al. 2020,
sections 5.2 and 5.3). A forward pass goes through the blocks of this rank from the first to the
last, and a backward pass from the last to the first. While a block is computed, the slices of the
next one travel, and the gradients of the one before, if the transport can do that meanwhile
(`Transport.runs_ahead`). Ranks that have no microbatch go through blocks as the others do, since
they keep slices that the others need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import torch

from lockstep.comm.mailbox import Started
from lockstep.comm.transport import GroupBroken
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.placement import Placement
from lockstep.engine.step.workspace import Workspace
from lockstep.errors import TaskError
from lockstep.nn.row import Row
from lockstep.parallel.rounds import Rounds

Moment = Literal["unshard", "ahead", "leave"]
"""Before the slices of a segment of parameters come together, while those of the next block travel,
and before the gradients of a segment are sent."""


class BlockStorage:
    """Gathers and frees the parameters of blocks, and sends gradients to the ranks that sum them.

    All calls are collectives of the ranks that hold the same blocks (`Placement.storage`).
    """

    def __init__(self, row: Row, placement: Placement, at: Callable[[Moment], None]) -> None:
        self._row, self._placement, self._at = row, placement, at
        self._users: Counter[int] = Counter()
        self._ahead: dict[int, Started] = {}
        self._next, self._has_leaf, self._is_kept = -1, False, False
        self._is_backward, self._is_regular = False, True
        row.descend = self.descend
        if placement.in_slices:
            row.storage = self

    def use(self, flat: FlatTensors, workspace: Workspace) -> None:
        """Work on this memory from now on."""
        assert isinstance(workspace.reduction, Rounds)
        self._flat, self._workspace, self._rounds = flat, workspace, workspace.reduction
        [self._own] = self._placement.own.blocks
        self._segments = {
            block: [s for s, of in enumerate(flat.blocks) if of == block and flat.segments[s].numel]
            for block in range(*self._own)
        }
        self._sizes = [numel * dtype.itemsize for dtype, numel in flat.segments]
        self._room = 2 * max(sum(self._sizes[s] for s in of) for of in self._segments.values())
        self._users.clear()

    def restart(self) -> None:
        """Forget an interrupted pass, whose group was given up."""
        for started in self._ahead.values():
            with suppress(GroupBroken):
                started.wait()
        for segment in {*+self._users, *self._ahead}:
            self._flat.close(segment)
        self._users.clear()
        self._ahead.clear()
        self._row.ties.share()
        self._is_kept = self._is_backward = False
        self._is_regular = True

    def unshard(self, block: int) -> None:
        """Have the parameters of a block."""
        for segment in self._needed(block):
            self._users[segment] += 1
            if self._users[segment] > 1:
                continue
            if segment in self._ahead:
                self._ahead[segment].wait()
                del self._ahead[segment]
            else:
                self._at("unshard")
                self._workspace.gather(segment)
        self._row.ties.share()

    def prefetch(self, block: int) -> None:
        """Begin to have the parameters of the block that comes next, if there is one.

        Two of the largest blocks are the most that a rank has at a time.
        """
        if block not in self._segments:
            return
        for segment in self._needed(block):
            taken = {*+self._users, *self._ahead}
            size = self._sizes[segment]
            has_room = sum(self._sizes[s] for s in taken) + size <= self._room
            if segment not in taken and has_room and self._workspace.runs_ahead(size):
                self._at("unshard")
                self._ahead[segment] = self._workspace.start_gathering(segment)
                self._at("ahead")

    def reshard(self, block: int) -> None:
        """Free the parameters of a block, unless its backward pass comes next."""
        is_last = block == self._row.num_blocks - 1
        self._is_kept = torch.is_grad_enabled() and is_last
        if not self._is_kept:
            self._drop(block)

    def skip_forward(self) -> None:
        """Go through all blocks without a microbatch."""
        if self._placement.in_slices:
            for block in range(*self._own):
                self.unshard(block)
                self.prefetch(block + 1)
                self.reshard(block)

    def begin_backward(self, has_leaf: bool = True) -> None:
        """Begin with the last block.

        Args:
            has_leaf: whether there is a microbatch.
        """
        self._has_leaf, self._next, self._is_backward = has_leaf, self._own.last - 1, True
        # Not in step with autograd where the loss calls the model more than once.
        self._is_regular &= not has_leaf or self._row.num_calls <= 1
        self.descend(self._next)

    def descend(self, block: int) -> None:
        """Have the parameters of a block, and be done with those behind it.

        Raises:
            TaskError: the loss computes gradients itself, with parameters in slices.
        """
        if not self._is_backward:
            if self._placement.in_slices:
                raise TaskError(
                    "Task.loss: computes gradients itself (torch.autograd.grad), for which the "
                    "parameters of all blocks are needed; set sharding=gradients"
                )
            self._is_regular = False
        if not self._is_regular:
            return
        while self._next >= max(block, self._own.first):
            self._leave(self._next + 1)
            if self._placement.in_slices and not self._is_kept:
                self.unshard(self._next)
            if self._placement.in_slices:
                self.prefetch(self._next - 1)
            self._is_kept = False
            self._next -= 1

    def end_backward(self) -> None:
        """Be done with all blocks, also those that the backward pass has not come to."""
        self.descend(self._own.first)
        if self._is_regular:
            self._leave(self._own.first)
        self._is_backward, self._is_regular = False, True

    def _leave(self, block: int) -> None:
        """Send the gradients of a block, and free its parameters."""
        if block == self._own.last:
            return
        if block not in self._placement.late_blocks:
            for segment in self._segments[block]:
                self._at("leave")
                gradients = self._flat.take_gradients(segment) if self._has_leaf else None
                self._rounds.take(segment, gradients)
        if self._placement.in_slices:
            self._drop(block)

    def _drop(self, block: int) -> None:
        for segment in self._needed(block):
            self._users[segment] -= 1
            if not self._users[segment]:
                self._flat.check_views(segment)
                self._flat.close(segment)
        self._row.ties.share()

    def _needed(self, block: int) -> list[int]:
        """Segments with parameters that a block computes with: also such as earlier ones have."""
        homes = {block, *self._row.shared_with(block)}
        return [segment for there in sorted(homes) for segment in self._segments[there]]
