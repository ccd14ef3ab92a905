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

from lockstep.comm.transport import Transport
from lockstep.quantum.circuits.blocks import BlockMatrices
from lockstep.quantum.circuits.fusion import Block, Plan
from lockstep.quantum.simulation.derivatives import OVER_RANKS, evolve, only_once
from lockstep.quantum.simulation.evolution import Kept, Moving, Pool, added_up, matrix_gradient
from lockstep.quantum.simulation.memory import check_fits

KEPT_BYTES = 64 << 20
"""Bytes of earlier states kept for the backward pass, on all ranks together."""
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


class StatePart:
    """The part of a state that this rank has, and the memory for it.

    Args:
        num_local: number of qubits whose axes are on this rank; the others are the bits of the
            rank's number.
        rank: number of the part of the state that this rank has.
        transport: transport to the ranks that have the other parts; None where the state is whole.
    """

    def __init__(self, num_local: int, rank: int, transport: Transport | None) -> None:
        self.num_local = num_local
        self.rank = rank
        self.transport = transport
        self.num_ranks = 1 if transport is None else transport.size
        self.pool = Pool(KEPT_BYTES // self.num_ranks)

    def matrices_of(self, block: Block) -> slice:
        """The slice of a block's matrices that this rank applies, by the bits of its number."""
        count = 1 << (len(block.controls) - len(block.rank_controls))
        high = self.num_ranks.bit_length() - 2
        value = 0
        for axis in block.rank_controls:
            value = 2 * value + (self.rank >> (high - axis) & 1)
        return slice(value * count, (value + 1) * count)


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
        moving = Moving(start, part.num_local, part.transport, part.pool)
        ctx.kept = Kept(part.pool)
        room = KEPT_BYTES // part.num_ranks if ctx.needs_input_grad[0] else 0
        for number, block in enumerate(program.plan.blocks):
            moving.move(block.moves)
            if moving.states.nbytes <= room:
                room -= moving.states.nbytes
                ctx.kept.add(number, moving)
            moving.apply(matrices[number][:, part.matrices_of(block)])
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
        if ctx.part.transport is None:
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
    common = part.num_local, part.transport, part.pool
    ket, bra = Moving(state, *common), Moving(gradient.contiguous(), *common)
    ket.move_back(laid_out.moves)
    bra.move_back(laid_out.moves)
    numbers = range(len(laid_out.blocks))
    trained = [wants_angles and matrices[n].requires_grad for n in numbers]
    first = trained.index(True) if any(trained) else len(numbers)
    outputs, gradients = [], []
    last = 0 if wants_start else first
    for number in reversed(numbers[last:]):
        block = laid_out.blocks[number]
        own = part.matrices_of(block)
        matrix = matrices[number].detach()[:, own]
        if number in ctx.kept:
            ket.release()
            ket = Moving(ctx.kept[number], *common)
        elif number >= first:
            ket.undo(matrix)
        if trained[number]:
            outputs.append(matrices[number])
            whole = torch.zeros_like(matrices[number])
            whole[:, own] = matrix_gradient(matrix, ket.states, bra.states)
            gradients.append(whole)
        if number == last and not wants_start:
            break
        if number - 1 not in ctx.kept and number > first:
            ket.move_back(block.moves)
        bra.undo(matrix)
        bra.move_back(block.moves)
    ket.release()
    bra.release()
    angle_gradient = None
    if wants_angles:
        angle_gradient = torch.zeros_like(ctx.variable)
        if outputs:
            (angle_gradient,) = torch.autograd.grad(
                outputs, ctx.variable, gradients, retain_graph=True
            )
        angle_gradient = added_up(angle_gradient.flatten(), part.transport).view_as(angle_gradient)
    return angle_gradient, bra.states if wants_start else None


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
