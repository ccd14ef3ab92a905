"""A model as a row of blocks, which ranks can share out among them by ranges: stages.

Each stage runs the same `Task.loss`. Where the loss calls the model, all but the last leave it
there: they send what their blocks have computed to the next stage, and only the last one, whose
blocks give the model's output, computes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.random import Stream, random_key, seed_all
from lockstep.errors import TaskError
from lockstep.nn.ties import Storage, Tie, Ties
from lockstep.parallel.depth_axis import DepthAxis, check_sendable


class StageDone(BaseException):
    """Ends a forward pass on a stage that is not the last. Not an error, so nobody catches it.

    Attributes:
        outputs: what the stage's last block returned.
    """

    def __init__(self, outputs: tuple[Tensor, ...], axis: DepthAxis) -> None:
        super().__init__("the rest of this forward pass is computed by the next stage")
        self.outputs = outputs
        self._axis = axis

    def send(self) -> None:
        """Begin to send the outputs to the next stage; `DepthAxis.finish` must follow."""
        self._axis.send_outputs(self.outputs)


class Pipeline(nn.Sequential):
    """Blocks that are called one after another, as `torch.nn.Sequential`.

    What goes from block to block is a tensor or a tuple of tensors, which is the next block's
    arguments. `mesh.pp` ranks each compute a range of blocks. Random numbers that a block draws
    depend on its number, so it does not matter which rank computes it.

    A parameter of several blocks, such as the weight of an embedding and of the head, has one
    gradient for each of them; they are added in the order of blocks.

    Args:
        blocks: modules.

    Attributes:
        axis: the blocks that this rank computes; None outside of a run, where the model is a plain
            `Sequential`.
        storage: where parameters of blocks are; None if they are all in memory (`sharding`).
        descend: function that is called with the number of each block but the last when its
            backward pass begins, and that of later ones is over.
        inputs: what the stage before has sent for the newest forward pass.
        ties: parameters of several blocks, once `untie` was called.

    Raises:
        TaskError: something else than a tensor goes from a block to the next, or the loss calls
            the model twice and `mesh.pp` is more than 1.
    """

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.axis: DepthAxis | None = None
        self.storage: Storage | None = None
        self.descend: Callable[[int], None] | None = None
        self.is_called_once = False
        self.inputs: list[Tensor] = []
        self.ties = Ties([])
        self.num_calls, self._is_open = 0, False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within it the task's loss is computed, on all stages; else stages refuse to be called."""
        self.num_calls, self._is_open = 0, True
        try:
            yield
        finally:
            self._is_open = False

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
            inputs = tuple(_boundary(x, None) for x in self.inputs)
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
            if self.storage is not None:
                self.storage.unshard(number)
            outputs = block(*inputs)
            if self.storage is not None:
                self.storage.reshard(number)
            if number < len(self) - 1:
                inputs = self._to_next_block(outputs, number, key is not None)
                outputs = inputs
        return outputs

    def _to_next_block(self, outputs: Any, number: int, is_in_run: bool) -> tuple[Tensor, ...]:
        state, name = _state(outputs), list(self._modules)[number]
        for value in state:
            if not isinstance(value, Tensor):
                raise TaskError(
                    f"Pipeline: block {name} returned a {type(value).__name__}; what goes from "
                    "block to block must be a tensor or a tuple of tensors"
                )
            if is_in_run:
                check_sendable(value, f"Pipeline: block {name} returned")
        # As it would arrive at another rank: strides and alignment may change what kernels round.
        if not is_in_run:
            return state
        descend = None if self.descend is None else partial(self.descend, number)
        return tuple(_boundary(x, descend) for x in state)

    def _check_calls(self) -> None:
        assert self.axis is not None
        is_divided = len(self.axis.stages) > 1 or self.storage is not None
        if is_divided and not self._is_open:
            raise TaskError(
                "the model is in stages (mesh.pp) or in slices (sharding=parameters), which only "
                "Task.loss and Task.evaluate may call; compute it there, or set mesh.pp=1 and "
                "sharding=gradients"
            )
        if self._is_open:
            self.num_calls += 1
        if self.is_called_once and self.num_calls > 1:
            raise TaskError(
                "Task.loss or Task.evaluate calls the model twice, and a model in stages (mesh.pp) "
                "or in slices (sharding=parameters) is computed once for each microbatch; put both "
                "calls into one, or set mesh.pp=1 and sharding=gradients"
            )

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

    def untie(self) -> None:
        """Give each block its own tensor for a parameter that an earlier block has, too.

        It shares the memory of the first one, but has a gradient of its own.
        """
        firsts: dict[int, tuple[str, int]] = {}
        ties: dict[tuple[int, int], Tie] = {}
        for name, parameter in list(self.named_parameters(remove_duplicate=False)):
            block = self.block_of(name)
            original, first = firsts.setdefault(id(parameter), (name, block))
            if block == first:
                continue
            tie = ties.get((id(parameter), block))
            if tie is None:
                check_sendable(parameter, f"build_model: {name} of an earlier block is")
                copy = nn.Parameter(parameter.data, parameter.requires_grad)
                tie = Tie(original, [], first, block, parameter, copy)
                ties[id(parameter), block] = tie
            tie.names.append(name)
            path, _, key = name.rpartition(".")
            self.get_submodule(path)._parameters[key] = tie.copy
        self.ties = Ties(list(ties.values()))


def _boundary(x: Tensor, descend: Callable[[], None] | None) -> Tensor:
    """The same values on the way from one block to the next."""
    passed: Tensor = _Boundary.apply(x, descend)  # type: ignore[no-untyped-call]
    return passed


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, descend: Callable[[], None] | None) -> Tensor:
        ctx.descend = descend
        # Not a view, which a block that begins in place (`nn.ReLU(inplace=True)`) may not change.
        return x.detach() if _is_plain(x) else x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Autograd comes here when all later blocks are done: it takes the newest node that it can.
        if ctx.descend is not None:
            ctx.descend()
        plain = _is_plain(gradient)
        return gradient if plain else gradient.clone(memory_format=torch.contiguous_format), None


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.storage_offset() == 0


def _state(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
