"""Exact simulation: all 2^n amplitudes, for a batch of parameters, differentiable.

Gradients are found by adjoint differentiation (Jones and Gacon, arXiv:2009.02823): the backward
pass undoes the circuit on the state and on its gradient side by side. Beside the last state it
keeps a fixed number of bytes of earlier ones, which need not be undone; so memory does not depend
on the number of gates. From |0…0> on, a state has amplitudes only for the qubits that some gate has
touched.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.errors import ConfigError
from lockstep.quantum.blocks import BlockMatrices
from lockstep.quantum.circuit import Circuit
from lockstep.quantum.derivatives import OVER_RANKS, AddUp, evolve, only_once
from lockstep.quantum.evolution import Kept, Moving, Pool, added_up, matrix_gradient
from lockstep.quantum.fusion import MAX_TARGETS, Block, Plan, plan
from lockstep.quantum.memory import check_fits, check_memory, memory_bytes

KEPT_BYTES = 64 << 20
"""Of earlier states kept for the backward pass, on all ranks together."""
_COPIES_OF_A_BLOCK = 6
"""States in memory for each block whose gradient is to be differentiated."""


class Program(NamedTuple):
    """What is done to a state.

    Attributes:
        plan: the blocks.
        matrices: what makes their matrices.
    """

    plan: Plan
    matrices: BlockMatrices


class Simulator:
    """A circuit, ready to be run many times.

    Args:
        circuit: to simulate.
        dtype: complex64 or complex128.
        device: where to compute.
        max_targets: qubits of a fused block; 1 fuses only gates on one qubit.
        transport: to other ranks, a power of two of them, that each hold an equal part of the
            state: rank r has the amplitudes whose index has r for its high bits. All of them must
            do the same. Without it, the state is whole.

    Attributes:
        transport: to other ranks; None where the state is whole.
        num_ranks: that hold the state.
        rank: of this part.

    Raises:
        ConfigError: the number of ranks is not a power of two, or too great for so few qubits.
    """

    def __init__(
        self,
        circuit: Circuit,
        dtype: torch.dtype = torch.complex128,
        device: torch.device | str = "cpu",
        max_targets: int = MAX_TARGETS,
        transport: Transport | None = None,
    ) -> None:
        self.num_ranks = num_ranks = 1 if transport is None else transport.size
        self.transport = transport if num_ranks > 1 else None
        self.rank = 0 if self.transport is None else self.transport.rank
        if num_ranks & (num_ranks - 1):
            raise ConfigError(
                f"a state cannot be split over {num_ranks} ranks: their number must be a power of "
                "two"
            )
        self.circuit = circuit
        self.dtype = dtype
        self.device = torch.device(device)
        self._num_rank_axes = num_ranks.bit_length() - 1
        self._max_targets = max_targets
        self.num_local = circuit.num_qubits - self._num_rank_axes
        self.pool = Pool(KEPT_BYTES // num_ranks)
        self._memory = memory_bytes(self.device)
        self.from_zero = self._program(from_zero=True)

    @cached_property
    def from_any(self) -> Program:
        """The circuit's program for states that are given."""
        return self._program(from_zero=False)

    def _program(self, from_zero: bool) -> Program:
        laid_out = plan(self.circuit, self._max_targets, self._num_rank_axes, from_zero)
        return Program(laid_out, BlockMatrices(laid_out.blocks, self.dtype, self.device))

    def state(self, parameters: Tensor | None = None, initial: Tensor | None = None) -> Tensor:
        """The state after the circuit.

        Args:
            parameters: [..., num_parameters], real; may be left out where there are none.
            initial: [..., 2^n], complex, instead of |0…0>; this rank's part of it.

        Returns:
            [..., 2^n], complex, differentiable in both; with several ranks, this one's part of
            it. Qubit 0 is the lowest bit of an index.

        Raises:
            ConfigError: the number of parameters is wrong, or the state does not fit into memory.
        """
        real = torch.float64 if self.dtype == torch.complex128 else torch.float32
        if parameters is None:
            parameters = torch.zeros(self.circuit.num_parameters, dtype=real, device=self.device)
        return self.state_at(self.circuit.angles(parameters.to(real)), initial)

    def state_at(self, angles: Tensor, initial: Tensor | None = None) -> Tensor:
        """As `state`, from the angles [..., G] of all gates that have one."""
        if not torch.is_grad_enabled():
            angles = angles.detach()  # so that nothing is kept for a backward pass
        lead = angles.shape[:-1]
        if initial is not None:
            lead = torch.broadcast_shapes(lead, initial.shape[:-1])  # type: ignore[no-untyped-call]
        batch = lead.numel()
        grads = torch.is_grad_enabled() and (
            angles.requires_grad or (initial is not None and initial.requires_grad)
        )
        num_qubits, num_ranks = self.circuit.num_qubits, self.num_ranks
        check_memory(num_qubits, self.dtype, batch, grads, num_ranks, self._memory)
        if num_ranks > 1 and batch > 1:
            raise ConfigError(f"{batch} states at once: over {num_ranks} ranks there can be one")
        # Without a batch of angles, all states share their matrices.
        rows = angles.reshape(angles.shape[:-1].numel(), angles.shape[-1])
        if len(rows) not in (1, batch):
            rows = angles.expand(*lead, -1).reshape(batch, -1)
        if initial is None:
            is_first = float(self.rank == 0)
            start = torch.full((batch, 1), is_first, dtype=self.dtype, device=self.device)
            program = self.from_zero
        else:
            start = initial.to(self.dtype).expand(*lead, -1).reshape(batch, -1)
            program = self.from_any
        found: Tensor = _Evolve.apply(rows, start, self, program)  # type: ignore[no-untyped-call]
        return found.view(*lead, -1)

    def add_up(self, local: Tensor) -> Tensor:
        """The sum over all ranks of what each has found in its part of the state: [M], real.

        Differentiable: the gradient goes to all of them.
        """
        found: Tensor = AddUp.apply(local, self.transport)  # type: ignore[no-untyped-call]
        return found

    def part(self, block: Block) -> slice:
        """Which of a block's matrices are for this rank."""
        count = 1 << (len(block.controls) - len(block.rank_controls))
        high = self._num_rank_axes - 1
        value = 0
        for axis in block.rank_controls:
            value = 2 * value + (self.rank >> (high - axis) & 1)
        return slice(value * count, (value + 1) * count)


def statevector(
    circuit: Circuit, parameters: Tensor | None = None, dtype: torch.dtype = torch.complex128
) -> Tensor:
    """The state [..., 2^n] after a circuit, for parameters [..., num_parameters].

    Raises:
        ConfigError: as `Simulator.state`.
    """
    device = "cpu" if parameters is None else parameters.device
    return Simulator(circuit, dtype, device).state(parameters)


class _Evolve(torch.autograd.Function):
    """The state after all blocks, from angles [b, G] with b of 1 or B, and states [B, 2^m].

    The states have the axes with which the program begins.
    """

    @staticmethod
    def forward(
        ctx: Any, angles: Tensor, start: Tensor, simulator: Simulator, program: Program
    ) -> Tensor:
        with torch.set_grad_enabled(ctx.needs_input_grad[0]):
            ctx.variable = angles.detach().requires_grad_(ctx.needs_input_grad[0])
            ctx.matrices = program.matrices(ctx.variable)
        matrices = [matrix.detach() for matrix in ctx.matrices]
        moving = Moving(start, simulator.num_local, simulator.transport, simulator.pool)
        ctx.kept = Kept(simulator.pool)
        room = KEPT_BYTES // simulator.num_ranks if ctx.needs_input_grad[0] else 0
        for number, block in enumerate(program.plan.blocks):
            moving.move(block.moves)
            if moving.states.nbytes <= room:
                room -= moving.states.nbytes
                ctx.kept.add(number, moving)
            moving.apply(matrices[number][:, simulator.part(block)])
        moving.move(program.plan.moves)
        moving.release()
        state = moving.states.clone() if moving.states is start else moving.states
        ctx.simulator, ctx.program = simulator, program
        ctx.save_for_backward(angles, start, state)
        return state

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if not torch.is_grad_enabled():
            return *_adjoint(ctx, gradient), None, None
        # The gradient is to be differentiated.
        if ctx.simulator.transport is None:
            return *_by_autograd(ctx, gradient), None, None
        angles, start, _ = ctx.saved_tensors
        with torch.no_grad():
            found = _adjoint(ctx, gradient)
        one, two = (
            None if own is None else only_once(own, OVER_RANKS, gradient, angles, start)
            for own in found
        )
        return one, two, None, None


def _adjoint(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in the angles and in the first states, by undoing the circuit."""
    _, _, state = ctx.saved_tensors
    simulator: Simulator = ctx.simulator
    laid_out, transport = ctx.program.plan, simulator.transport
    wants_angles, wants_start, *_ = ctx.needs_input_grad
    matrices = ctx.matrices
    common = simulator.num_local, transport, simulator.pool
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
        part = simulator.part(block)
        matrix = matrices[number].detach()[:, part]
        if number in ctx.kept:
            ket.release()
            ket = Moving(ctx.kept[number], *common)
        elif number >= first:
            ket.undo(matrix)
        if trained[number]:
            outputs.append(matrices[number])
            whole = torch.zeros_like(matrices[number])
            whole[:, part] = matrix_gradient(matrix, ket.states, bra.states)
            gradients.append(whole)
        if number == last and not wants_start:
            break
        if number - 1 not in ctx.kept and number > first:
            ket.move_back(block.moves)
        bra.undo(matrix)
        bra.move_back(block.moves)
    ket.release()
    bra.release()
    found = None
    if wants_angles:
        found = torch.zeros_like(ctx.variable)
        if outputs:
            (found,) = torch.autograd.grad(outputs, ctx.variable, gradients, retain_graph=True)
        found = added_up(found.flatten(), transport).view_as(found)
    return found, bra.states if wants_start else None


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
        "use fewer states at once, or the parameter-shift rule (lockstep.quantum.shift)",
    )
    # Views, since the states may depend on the angles in other ways, too.
    angles, start = angles.view_as(angles), start.view_as(start)
    needed = ctx.needs_input_grad[:2]
    wanted = [own for own, is_needed in zip((angles, start), needed, strict=True) if is_needed]
    last = evolve(start, laid_out, matrices(angles))
    if last.requires_grad:
        found = torch.autograd.grad(
            last, wanted, gradient, create_graph=True, materialize_grads=True
        )
    else:  # no gate depends on a parameter
        found = tuple(torch.zeros_like(own) for own in wanted)
    each = iter(found)
    one, two = (next(each) if is_needed else None for is_needed in needed)
    return one, two
