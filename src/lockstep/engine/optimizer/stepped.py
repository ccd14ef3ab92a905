"""What an optimizer steps on this rank, and what it may keep of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn, optim

from lockstep.engine.optimizer.optimizer_state import is_savable, to_json
from lockstep.errors import TaskError
from lockstep.parallel.layout import Range


class Stepped(NamedTuple):
    """A tensor that an optimizer steps: a whole parameter, or a part of flat memory."""

    owner: str
    """The key that its state is kept under: its name, or the number of its group."""
    tensor: nn.Parameter
    group: int
    segment: int
    range: Range


def check_savable(
    optimizer: optim.Optimizer, own: Tensor, is_flat: bool, key: str, value: Any
) -> None:
    """Refuse state of a parameter that no checkpoint can hold.

    Args:
        optimizer: optimizer that keeps the state.
        own: what it is kept of.
        is_flat: whether that is a part of flat memory.
        key: key of the state.
        value: the state.

    Raises:
        TaskError: naming the key.
    """
    name = type(optimizer).__name__
    if isinstance(value, Tensor) and value.dim() > 0 and is_savable(value):
        if is_flat and (value.shape, value.dtype) != (own.shape, own.dtype):
            raise TaskError(
                f"build_optimizer: {name} keeps state {key!r} of {value.dtype} "
                f"{tuple(value.shape)} for parameters of {own.dtype} {tuple(own.shape)}; that "
                "of an element-wise optimizer must be like them: leave out `elementwise = True`"
            )
        return
    try:
        to_json(value)
    except TypeError as error:
        raise TaskError(
            f"build_optimizer: {name} keeps state {key!r} of type {error}, which a checkpoint "
            "cannot hold; use numbers and dense tensors"
        ) from None
