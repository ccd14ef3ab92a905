"""States through all blocks of a circuit, and gradients by adjoint differentiation.

The backward pass undoes the circuit on the state and on its gradient side by side (Jones and Gacon,
arXiv:2009.02823). Beside the last state it keeps a fixed number of bytes of earlier ones, which
need not be undone; so memory does not depend on the number of gates. From |0…0> on, a state has
amplitudes only for the qubits that some gate has touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.quantum.circuits.blocks import BlockMatrices
from lockstep.quantum.circuits.fusion import Plan
from lockstep.quantum.simulation.derivatives import OVER_RANKS, evolve, only_once
from lockstep.quantum.simulation.evolution import Kept, Moving, parts_gradient
from lockstep.quantum.simulation.memory import check_fits
from lockstep.quantum.simulation.parts import StatePart, added_up

KEPT_BYTES = 64 << 20
"""Bytes of earlier states kept for the backward pass, on all ranks together, and as many of spare
memory."""
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
        # The gradient is to be differentiated.
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
    laid_out = ctx.program.plan
    wants_angles, wants_start, *_ = ctx.needs_input_grad
    matrices = ctx.matrices
    ket, bra = Moving(state, part), Moving(gradient.contiguous(), part)
    ket.move_back(laid_out.moves)
    bra.move_back(laid_out.moves)
    numbers = range(len(laid_out.blocks))
    trained = [wants_angles and matrices[n].requires_grad for n in numbers]
    first = trained.index(True) if any(trained) else len(numbers)
    outputs, gradients = [], []
    last = 0 if wants_start else first
    for number in reversed(numbers[last:]):
        block = laid_out.blocks[number]
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
    """The gradients in the angles and in the first states, as functions that autograd knows.

    Raises:
        ConfigError: the states after each block do not fit into memory.
    """
    angles, start, state = ctx.saved_tensors
    laid_out, matrices = ctx.program
    check_fits(
        f"second derivatives of {len(laid_out.blocks)} blocks of gates",
        _COPIES_OF_A_BLOCK * len(laid_out.blocks) * state.nbytes,
        state.device,
        "use fewer states at once, or the parameter-shift rule (lockstep.quantum.simulation.shift)",
    )
    # Views, since the states may depend on the angles in other ways, too.
    angles, start = angles.view_as(angles), start.view_as(start)
    needed = ctx.needs_input_grad[:2]
    wanted = [own for own, is_needed in zip((angles, start), needed, strict=True) if is_needed]
    last = evolve(start, laid_out, matrices(angles))
    if last.requires_grad:
        gradients = torch.autograd.grad(
            last, wanted, gradient, create_graph=True, materialize_grads=True
        )
    else:  # no gate depends on a parameter
        gradients = tuple(torch.zeros_like(own) for own in wanted)
    each = iter(gradients)
    one, two = (next(each) if is_needed else None for is_needed in needed)
    return one, two
