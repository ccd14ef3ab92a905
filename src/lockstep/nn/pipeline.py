"""A model that is written as a row of blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.random import Stream, random_key, seed_all
from lockstep.errors import TaskError
from lockstep.nn.row import Row, StageDone, boundary, check_passed


class Pipeline(nn.Sequential, Row):
    """Blocks that are called one after another, as `torch.nn.Sequential`.

    What goes from block to block is a tensor or a tuple of tensors, which is the next block's
    arguments. `mesh.pp` ranks each compute a range of blocks. Random numbers that a block draws
    depend on its number, so it does not matter which rank computes it.

    A parameter of several blocks, such as the weight of an embedding and of the head, has one
    gradient for each of them; they are added in the order of blocks.

    Args:
        blocks: modules.

    Raises:
        TaskError: something else than a tensor goes from a block to the next, or the loss calls
            the model twice and `mesh.pp` is more than 1.
    """

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        Row.__init__(self)

    @property
    def module(self) -> nn.Module:
        """Itself."""
        return self

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self)

    def watched(self) -> list[nn.Module]:
        """The blocks."""
        return list(self)

    def state_of(self, block: int) -> dict[str, Tensor]:
        """Tensors of a block by their names in the model."""
        name, module = list(self._modules.items())[block]
        assert module is not None, "it has been called"
        state: dict[str, Tensor] = module.state_dict(prefix=f"{name}.")
        return state

    def parameters_of(self, block: int) -> list[nn.Parameter]:
        """Parameters of a block."""
        return list(self[block].parameters())

    def forward(self, *inputs: Any) -> Any:
        """What the last block returns.

        Raises:
            StageDone: this rank does not compute the last block.
        """
        if self.axis is None:
            return self._through(range(len(self)), inputs)
        self._check_calls()
        key = torch.initial_seed()
        if not self.axis.is_first:
            self.inputs = self.axis.receive_inputs()
            inputs = tuple(boundary(x) for x in self.inputs)
        outputs = self._through(range(*self.axis.own), inputs, key)
        if not self.axis.is_last:
            raise StageDone(_state(outputs), self.axis)
        # What the loss draws behind the model does not depend on what its blocks drew.
        seed_all(random_key(key, Stream.BLOCKS, len(self)))
        return outputs

    def _through(self, numbers: range, inputs: Any, key: int | None = None) -> Any:
        blocks = list(self._modules.items())
        outputs: Any = inputs
        for number in numbers:
            name, block = blocks[number]
            if block is None:
                raise TaskError(f"Pipeline: block {name} is None; every block must be a module")
            if key is not None:
                seed_all(random_key(key, Stream.BLOCKS, number))
            if self.entered is not None:
                self.entered(number)
            if self.storage is not None:
                self.storage.unshard(number)
                self.storage.prefetch(number + 1)
            outputs = block(*inputs)
            if self.storage is not None:
                self.storage.reshard(number)
            if number < len(self) - 1:
                inputs = self._to_next_block(outputs, number, key is not None)
                outputs = inputs
        if self.entered is not None:
            self.entered(len(self))
        return outputs

    def _to_next_block(self, outputs: Any, number: int, is_in_run: bool) -> tuple[Tensor, ...]:
        state, name = _state(outputs), list(self._modules)[number]
        check_passed(state, f"Pipeline: block {name}", is_in_run)
        if not is_in_run:
            return state
        descend = None if self.descend is None else partial(self.descend, number)
        return tuple(boundary(x, descend) for x in state)

    def block_of(self, name: str) -> int:
        """The number of the block that a parameter, buffer or module belongs to, by its name.

        Raises:
            TaskError: it belongs to none.
        """
        blocks = list(self._modules)
        block = name.partition(".")[0]
        if block not in blocks:
            raise TaskError(
                f"build_model: {name} is the Pipeline's own and belongs to no block, so it is not "
                "known which stage has it (mesh.pp); put it into a block"
            )
        return blocks.index(block)


def _state(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
