"""States through all blocks of a circuit, and gradients by adjoint differentiation.

The backward pass undoes the circuit on the state and on its gradient side by side (Jones and Gacon,
arXiv:2009.02823). Beside the last state it keeps a fixed number of bytes of earlier ones, which
need not be undone; so memory does not depend on the number of gates. A state that starts as |0…0>
has amplitudes only for the qubits that some gate has touched.

This computes a gradient outside of autograd, which then treats it as a constant. So where a graph
of the gradient is needed (`create_graph=True`), the states are computed again by operations that
autograd records, at the cost of memory for the states after each block. The same operations are
used under `torch.func` and forward-mode differentiation, in any combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.blocks import BlockMatrices
from lockstep.systems.quantum.circuits.fusion import Move, Plan
from lockstep.systems.quantum.simulation.evolution import Kept, Moving, parts_gradient
from lockstep.systems.quantum.simulation.parts import StatePart, added_up, check_fits


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
    if torch._C._are_functorch_transforms_active():  # torch.autograd.Function calls this, too
        return True
    parts = [forward_ad.unpack_dual(tensor) for tensor in tensors]  # type: ignore[no-untyped-call]
    return any(part.tangent is not None for part in parts)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor below all wrappers of `torch.func`, with the values of a whole `vmap`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def num_copies(tensor: Tensor) -> int:
    """How many tensors of this shape `torch.func.vmap` computes at once."""
    return max(1, unwrapped(tensor).numel() // max(1, tensor.numel()))


def only_once(gradient: Tensor, message: str, *causes: Tensor) -> Tensor:
    """A gradient that raises an error when differentiated, where autograd would silently give 0.

    Args:
        gradient: tensor of any shape that was computed outside of autograd.
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


KEPT_BYTES = 64 << 20
"""Bytes of earlier states kept for the backward pass, on all ranks together, and at most as many of
unused memory."""
_COPIES_OF_A_BLOCK = 6
"""States in memory for each block whose gradient is to be differentiated."""


class Program(NamedTuple):
    """The operations that take a state through a circuit.

    Attributes:
        plan: the blocks, with the moves of axes between them.
        matrices: function from angles to the matrices of all blocks.
    """

    plan: Plan
    matrices: BlockMatrices


class Evolve(torch.autograd.Function):
    """The state after all blocks, from angles [b, G] with b of 1 or B, and states [B, 2^m].

    The states have the axes with which the program begins.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, angles: Tensor, start: Tensor, part: StatePart, program: Program
    ) -> Tensor:
        with torch.set_grad_enabled(ctx.needs_input_grad[0]):
            ctx.variable = angles.detach().requires_grad_(ctx.needs_input_grad[0])
            ctx.matrices = program.matrices(ctx.variable)
        matrices = [matrix.detach() for matrix in ctx.matrices]
        moving = Moving(start, part)
        ctx.kept = Kept(part.pool)
        room = part.kept_bytes if ctx.needs_input_grad[0] else 0
        for number, block in enumerate(program.plan.blocks):
            moving.move(block.moves)
            if moving.states.nbytes <= room:
                room -= moving.states.nbytes
                ctx.kept.add(number, moving)
            moving.apply(matrices[number], block)
        moving.move(program.plan.moves)
        moving.release()
        state = moving.states.clone() if moving.states is start else moving.states
        ctx.part, ctx.program = part, program
        ctx.save_for_backward(angles, start, state)
        return state

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        if not torch.is_grad_enabled():
            return *_adjoint(ctx, gradient), None, None
        # Grad mode is on: the caller wants a graph of the gradient (create_graph=True).
        if ctx.part.num_parts == 1:
            return *_by_autograd(ctx, gradient), None, None
        angles, start, _ = ctx.saved_tensors
        with torch.no_grad():
            gradients = _adjoint(ctx, gradient)
        one, two = (
            None if own is None else only_once(own, OVER_RANKS, gradient, angles, start)
            for own in gradients
        )
        return one, two, None, None


def _adjoint(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in the angles and in the first states, by undoing the circuit."""
    _, _, state = ctx.saved_tensors
    part: StatePart = ctx.part
    plan = ctx.program.plan
    wants_angles, wants_start, *_ = ctx.needs_input_grad
    matrices = ctx.matrices
    ket, bra = Moving(state, part), Moving(gradient.contiguous(), part)
    ket.move_back(plan.moves)
    bra.move_back(plan.moves)
    numbers = range(len(plan.blocks))
    trained = [wants_angles and matrices[n].requires_grad for n in numbers]
    first = trained.index(True) if any(trained) else len(numbers)
    outputs, gradients = [], []
    last = 0 if wants_start else first
    for number in reversed(numbers[last:]):
        block = plan.blocks[number]
        matrix = matrices[number].detach()
        if number in ctx.kept:
            ket.release()
            ket = Moving(ctx.kept[number], part)
        elif number >= first:
            ket.undo(matrix, block)
        if trained[number]:
            outputs.append(matrices[number])
            gradients.append(parts_gradient(part, block, matrix, ket.states, bra.states))
        if number == last and not wants_start:
            break
        if number - 1 not in ctx.kept and number > first:
            ket.move_back(block.moves)
        bra.undo(matrix, block)
        bra.move_back(block.moves)
    ket.release()
    bra.release()
    angle_gradient = None
    if wants_angles:
        angle_gradient = torch.zeros_like(ctx.variable)
        if outputs:
            (angle_gradient,) = torch.autograd.grad(
                outputs, ctx.variable, _summed(gradients, part), retain_graph=True
            )
    return angle_gradient, bra.states if wants_start else None


def _summed(gradients: list[Tensor], part: StatePart) -> list[Tensor]:
    """The sums over all parts of gradients [L, ...], each [...], with one exchange."""
    if part.num_parts == 1:
        return [gradient[0] for gradient in gradients]
    sizes = [gradient[0].numel() for gradient in gradients]
    flat = torch.cat([gradient.flatten(1) for gradient in gradients], 1)
    sums = added_up(flat, part).split_with_sizes(sizes)
    return [own.view(g.shape[1:]) for own, g in zip(sums, gradients, strict=True)]


def _by_autograd(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in the angles and in the first states, by operations that autograd records.

    Raises:
        ConfigError: the states after each block do not fit into memory.
    """
    angles, start, state = ctx.saved_tensors
    plan, matrices = ctx.program
    check_fits(
        f"second derivatives of {len(plan.blocks)} blocks of gates",
        _COPIES_OF_A_BLOCK * len(plan.blocks) * state.nbytes,
        state.device,
        "use fewer states at once, or the parameter-shift rule (lockstep.quantum.shifted)",
    )
    # Views: the initial states may themselves depend on the angles, which must not count here.
    angles, start = angles.view_as(angles), start.view_as(start)
    needed = ctx.needs_input_grad[:2]
    wanted = [own for own, is_needed in zip((angles, start), needed, strict=True) if is_needed]
    last = evolve(start, plan, matrices(angles))
    if last.requires_grad:
        gradients = torch.autograd.grad(
            last, wanted, gradient, create_graph=True, materialize_grads=True
        )
    else:  # no gate depends on a parameter
        gradients = tuple(torch.zeros_like(own) for own in wanted)
    each = iter(gradients)
    one, two = (next(each) if is_needed else None for is_needed in needed)
    return one, two
