"""A model as a row of blocks, which ranks can share out among them by ranges: stages.

Each stage runs the same `Task.loss`. Where the loss calls the model, all but the last leave it
there: they send what their blocks have computed to the next stage, and only the last one, whose
blocks give the model's output, computes the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.random import Stream, random_key, seed_all
from lockstep.errors import TaskError
from lockstep.nn.holding import Storage, Tie, Ties
from lockstep.parallel.axes import DepthAxis, check_sendable
from lockstep.parallel.layout import Range


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


class Row(ABC):
    """The blocks of a model in the order in which a forward pass comes to them.

    Attributes:
        axis: the blocks that this rank computes; None outside of a run.
        storage: where parameters of blocks are; None if they are all in memory (`sharding`).
        descend: function that is called with the number of each block but the last when its
            backward pass begins, and that of later ones is over.
        entered: function that is called with the number of each block that begins.
        is_called_once: whether a loss may call the model no more than once.
        num_calls: how often the loss has called it.
        inputs: what the stage before has sent for the newest forward pass.
        ties: parameters of several blocks, once `untie` was called.
    """

    has_stages = True
    """Whether stages can be made of the blocks."""

    def __init__(self) -> None:
        self.axis: DepthAxis | None = None
        self.storage: Storage | None = None
        self.descend: Callable[[int], None] | None = None
        self.entered: Callable[[int], None] | None = None
        self.is_called_once = False
        self.inputs: list[Tensor] = []
        self.ties = Ties([])
        self.num_calls, self._is_open = 0, False

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The model."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks."""

    @property
    def groups(self) -> list[Range]:
        """Ranges of blocks that no two stages share: a stage begins at the first of one."""
        return [Range(number, number + 1) for number in range(self.num_blocks)]

    @abstractmethod
    def watched(self) -> list[nn.Module]:
        """Modules whose passes may be struck by faults."""

    @abstractmethod
    def block_of(self, name: str) -> int:
        """The number of the block that a parameter, buffer or module belongs to, by its name.

        Raises:
            TaskError: it belongs to none.
        """

    @abstractmethod
    def state_of(self, block: int) -> dict[str, Tensor]:
        """Tensors of the model's `state_dict`, among them all that belong to a block."""

    @abstractmethod
    def parameters_of(self, block: int) -> list[nn.Parameter]:
        """Parameters that a block computes with, also such as other blocks have."""

    def shared_with(self, block: int) -> set[int]:
        """Earlier blocks that have parameters which a block computes with, too."""
        return {tie.first for tie in self.ties if tie.block == block and tie.is_shared}

    @property
    def late_blocks(self) -> set[int]:
        """Blocks whose gradients are complete only at the end of a backward pass."""
        return {tie.first for tie in self.ties}

    def settle(self) -> bool:
        """Take the order of blocks from the passes of the trial; returns whether it is another.

        Raises:
            TaskError: there is none.
        """
        return False

    def homes(self) -> dict[str, int]:
        """The first block that has each parameter, by the parameter's name."""
        originals = {name: tie.original for tie in self.ties for name in tie.names}
        named = list(self.module.named_parameters(remove_duplicate=False))
        firsts: dict[int, int] = {}
        for name, parameter in named:
            block = self.block_of(originals.get(name, name))
            firsts[id(parameter)] = min(block, firsts.get(id(parameter), block))
        return {name: firsts[id(parameter)] for name, parameter in named}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within it the task's loss is computed, on all stages; else stages refuse to be called."""
        self.num_calls, self._is_open = 0, True
        try:
            yield
        finally:
            self._is_open = False

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

    def untie(self) -> None:
        """Give each block its own tensor for a parameter that an earlier block has, too.

        It shares the memory of the first one, but has a gradient of its own.
        """
        firsts: dict[int, tuple[str, int]] = {}
        ties: dict[tuple[int, int], Tie] = {}
        named = list(self.module.named_parameters(remove_duplicate=False))
        for name, parameter in sorted(named, key=lambda pair: self.block_of(pair[0])):
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
            self.module.get_submodule(path)._parameters[key] = tie.copy
        self.ties = Ties(list(ties.values()))


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


_ROW = "_lockstep_row"
"""Where a model that is no `Pipeline` keeps its row."""


def row_of(model: nn.Module) -> Row | None:
    """The row of blocks that a model is; None if it is one block."""
    if isinstance(model, Row):
        return model
    row: Row | None = model.__dict__.get(_ROW)
    return row


def set_row(model: nn.Module, row: Row | None) -> None:
    """Have `row_of` give this for a model; None for nothing."""
    if row is None:
        model.__dict__.pop(_ROW, None)
    else:
        model.__dict__[_ROW] = row


def boundary(x: Tensor, descend: Callable[[], None] | None = None) -> Tensor:
    """The same values on the way from one block to the next, as they arrive at another rank.

    Strides and alignment may change what kernels round.

    Args:
        x: tensor that a block has returned.
        descend: called when the backward pass comes back here.
    """
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


def check_passed(values: Sequence[Any], block: str, is_in_run: bool) -> None:
    """Refuse what cannot go from a block to the next.

    Args:
        values: what the block has returned.
        block: the block, for the message.
        is_in_run: whether the next block may be on another rank.

    Raises:
        TaskError: naming the block.
    """
    for value in values:
        if not isinstance(value, Tensor):
            raise TaskError(
                f"{block} returned a {type(value).__name__}; what goes from block to block must be "
                "a tensor or a tuple of tensors"
            )
        if is_in_run:
            check_sendable(value, f"{block} returned")
