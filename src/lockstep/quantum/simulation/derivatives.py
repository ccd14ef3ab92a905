"""Derivatives of derivatives: evolution that autograd can follow, and refusals where none is.

Adjoint differentiation computes a gradient outside of autograd, which then takes it for a constant.
So where a graph of the gradient is asked for (`create_graph=True`), the states are computed again
by operations that autograd knows. That costs memory for the states after each block. The same
operations are what `torch.func` and forward-mode differentiation transform, in any combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.fusion import Move, Plan
from lockstep.quantum.simulation.parts import StatePart, added_up


def evolve(states: Tensor, plan: Plan, matrices: Sequence[Tensor]) -> Tensor:
    """The states after all blocks, differentiable any number of times.

    Args:
        states: [B, 2^m], complex, with the axes with which the plan begins.
        plan: plan of an unsplit state: none of its moves is between ranks.
        matrices: matrices of each block, [B or 1, C, K, K], complex.

    Returns:
        States [B, 2^n], complex.
    """
    for block, matrix in zip(plan.blocks, matrices, strict=True):
        states = _moved(states, block.moves)
        count, size = matrix.shape[1:3]
        before = states.reshape(len(states), count, -1, size)
        states = (matrix @ before.mT).transpose(1, 2).flatten(1)
    return _moved(states, plan.moves)


def _moved(states: Tensor, moves: Sequence[Move]) -> Tensor:
    for move in moves:
        assert move is not None, "axes of ranks are never moved without ranks"
        if isinstance(move, int):
            states = functional.pad(states.unsqueeze(-1), (0, (1 << move) - 1)).flatten(1)
        else:
            axes = states.reshape(len(states), *(2,) * len(move))
            states = axes.permute(0, *(axis + 1 for axis in move)).flatten(1)
    return states


def is_transformed(*tensors: Tensor) -> bool:
    """Whether `torch.func` transforms the calling code, or a tensor has a tangent (forward mode).

    Then only operations that torch knows may act on the tensors.
    """
    if torch._C._are_functorch_transforms_active():  # as torch.autograd.Function asks itself
        return True
    parts = [forward_ad.unpack_dual(tensor) for tensor in tensors]  # type: ignore[no-untyped-call]
    return any(part.tangent is not None for part in parts)


def unwrapped(tensor: Tensor) -> Tensor:
    """The values that `torch.func` computes with, of all tensors of `vmap` in place of this one."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def num_copies(tensor: Tensor) -> int:
    """How many tensors of its shape `torch.func.vmap` computes at once in place of this one."""
    return max(1, unwrapped(tensor).numel() // max(1, tensor.numel()))


def only_once(gradient: Tensor, message: str, *causes: Tensor) -> Tensor:
    """A gradient that cannot be differentiated: an error, where autograd would give 0 silently.

    Args:
        gradient: tensor of any shape that was computed outside of autograd, such as a gradient.
        message: message of the error.
        causes: tensors that the gradient depends on.

    Returns:
        The gradient; a `ConfigError` is raised when it is differentiated.
    """
    guarded: Tensor = _OnlyOnce.apply(gradient, message, *causes)  # type: ignore[no-untyped-call]
    return guarded


class _OnlyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, message: str, *causes: Tensor) -> Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ConfigError(ctx.message)


def differentiable_once(tensor: Tensor, message: str) -> Tensor:
    """The same tensor, of any shape, whose second derivatives raise a `ConfigError`.

    Args:
        tensor: tensor that may be differentiated once.
        message: message of the error.
    """
    guarded: Tensor = _DifferentiableOnce.apply(tensor, message)  # type: ignore[no-untyped-call]
    return guarded


class _DifferentiableOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, message: str) -> Tensor:
        ctx.message = message
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            gradient = only_once(gradient, ctx.message, gradient, *ctx.saved_tensors)
        return gradient, None


class AddUp(torch.autograd.Function):
    """The sum [M] of all parts' tensors, of which [L, M] are here; its gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, part: StatePart) -> Tensor:  # noqa: D102
        ctx.part = part
        return added_up(local, part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        if ctx.part.num_parts > 1 and torch.is_grad_enabled():
            gradient = only_once(gradient, OVER_RANKS, gradient)
        return gradient.expand(ctx.part.num_here, *gradient.shape), None


OVER_RANKS = (
    "second derivatives of a state that is split over ranks or parts are not supported; simulate "
    "it whole (a Simulator without transport and parts)"
)
