"""Exact simulation: all 2^n amplitudes, for a batch of parameters, differentiable.

Gradients are found by adjoint differentiation (Jones and Gacon, arXiv:2009.02823): the backward
pass undoes the circuit on the state and on its gradient side by side. Beside the last state it
keeps a fixed number of bytes of earlier ones, which need not be undone; so memory does not depend
on the number of gates.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.errors import ConfigError
from lockstep.quantum.blocks import BlockMatrices
from lockstep.quantum.circuit import Circuit
from lockstep.quantum.fusion import MAX_TARGETS, Plan, plan

_COPIES = 2
"""States in memory while a circuit runs; with gradients, twice as many."""
KEPT_BYTES = 64 << 20
"""Of earlier states kept for the backward pass."""


class Simulator:
    """A circuit, ready to be run many times.

    Args:
        circuit: to simulate.
        dtype: complex64 or complex128.
        device: where to compute.
        max_targets: qubits of a fused block; 1 fuses only gates on one qubit.
    """

    def __init__(
        self,
        circuit: Circuit,
        dtype: torch.dtype = torch.complex128,
        device: torch.device | str = "cpu",
        max_targets: int = MAX_TARGETS,
    ) -> None:
        self.circuit = circuit
        self.dtype = dtype
        self.device = torch.device(device)
        self.plan = plan(circuit, max_targets)
        self.matrices = BlockMatrices(self.plan.blocks, dtype, self.device)

    def state(self, parameters: Tensor | None = None, initial: Tensor | None = None) -> Tensor:
        """The state after the circuit.

        Args:
            parameters: [..., num_parameters], real; may be left out where there are none.
            initial: [..., 2^n], complex, instead of |0…0>.

        Returns:
            [..., 2^n], complex, differentiable in both. Qubit 0 is the lowest bit of an index.

        Raises:
            ConfigError: the number of parameters is wrong, or the state does not fit into memory.
        """
        real = torch.float64 if self.dtype == torch.complex128 else torch.float32
        if parameters is None:
            parameters = torch.zeros(self.circuit.num_parameters, dtype=real, device=self.device)
        return self.state_at(self.circuit.angles(parameters.to(real)), initial)

    def state_at(self, angles: Tensor, initial: Tensor | None = None) -> Tensor:
        """As `state`, from the angles [..., G] of all gates that have one."""
        lead = angles.shape[:-1]
        if initial is not None:
            lead = torch.broadcast_shapes(lead, initial.shape[:-1])  # type: ignore[no-untyped-call]
        batch = lead.numel()
        grads = torch.is_grad_enabled() and (
            angles.requires_grad or (initial is not None and initial.requires_grad)
        )
        check_memory(self.circuit.num_qubits, self.dtype, batch, grads)
        # Without a batch of angles, all states share their matrices.
        rows = angles.reshape(angles.shape[:-1].numel(), angles.shape[-1])
        if len(rows) not in (1, batch):
            rows = angles.expand(*lead, -1).reshape(batch, -1)
        if initial is None:
            start = torch.zeros(
                batch, 1 << self.circuit.num_qubits, dtype=self.dtype, device=self.device
            )
            start[:, 0] = 1
        else:
            start = initial.to(self.dtype).expand(*lead, -1).reshape(batch, -1)
        found: Tensor = _Evolve.apply(rows, start, self)  # type: ignore[no-untyped-call]
        return found.view(*lead, -1)


def statevector(
    circuit: Circuit, parameters: Tensor | None = None, dtype: torch.dtype = torch.complex128
) -> Tensor:
    """The state [..., 2^n] after a circuit, for parameters [..., num_parameters].

    Raises:
        ConfigError: as `Simulator.state`.
    """
    device = "cpu" if parameters is None else parameters.device
    return Simulator(circuit, dtype, device).state(parameters)


def check_memory(
    num_qubits: int,
    dtype: torch.dtype,
    batch: int = 1,
    gradients: bool = False,
    num_ranks: int = 1,
    available: int | None = None,
) -> None:
    """Refuse states that do not fit.

    Args:
        num_qubits: of the circuit.
        dtype: of the amplitudes.
        batch: number of states.
        gradients: whether there will be a backward pass.
        num_ranks: the state is split over.
        available: bytes of a rank; of this machine, if left out.

    Raises:
        ConfigError: says how many bytes are needed, and how many ranks of this size would do.
    """
    have = memory_bytes() if available is None else available
    need = (batch << num_qubits) * dtype.itemsize * _COPIES * (2 if gradients else 1)
    if need <= have * num_ranks:
        return
    enough = 1
    while enough * have < need:
        enough *= 2
    states = f"{batch} states" if batch > 1 else "the state"
    raise ConfigError(
        f"{num_qubits} qubits: {states} and what it takes to compute with need {need:,} bytes, and "
        f"a rank has {have:,}; {enough} ranks would do"
    )


def memory_bytes() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _Evolve(torch.autograd.Function):
    """The state after all blocks, from angles [b, G] with b of 1 or B, and states [B, 2^n]."""

    @staticmethod
    def forward(ctx: Any, angles: Tensor, start: Tensor, simulator: Simulator) -> Tensor:
        matrices = simulator.matrices(angles)
        moving = _Moving(start)
        ctx.kept = {}
        room = KEPT_BYTES // start.nbytes if ctx.needs_input_grad[0] else 0
        for number, matrix in enumerate(matrices):
            moving.permute(simulator.plan.blocks[number].permutation)
            if len(ctx.kept) < room:
                ctx.kept[number] = moving.keep()
            moving.apply(matrix)
        moving.permute(simulator.plan.permutation)
        state = moving.states.clone() if moving.states is start else moving.states
        ctx.simulator = simulator
        ctx.save_for_backward(angles, state)
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        angles, state = ctx.saved_tensors
        laid_out: Plan = ctx.simulator.plan
        wants_angles, wants_start, _ = ctx.needs_input_grad
        with torch.enable_grad():
            variable = angles.detach().requires_grad_()
            matrices = ctx.simulator.matrices(variable)
        ket, bra = _Moving(state), _Moving(gradient.contiguous())
        ket.permute(_inverse(laid_out.permutation))
        bra.permute(_inverse(laid_out.permutation))
        numbers = range(len(laid_out.blocks))
        trained = [wants_angles and matrices[n].requires_grad for n in numbers]
        first = trained.index(True) if any(trained) else len(numbers)
        outputs, gradients = [], []
        for number in reversed(numbers):
            if number < first and not wants_start:
                break
            block, matrix = laid_out.blocks[number], matrices[number].detach()
            back = _inverse(block.permutation)
            if number in ctx.kept:
                ket = _Moving(ctx.kept[number])
            elif number >= first:
                ket.undo(matrix)
            if trained[number]:
                outputs.append(matrices[number])
                gradients.append(_matrix_gradient(matrix, ket.states, bra.states))
            if number - 1 not in ctx.kept and number > first:
                ket.permute(back)
            bra.undo(matrix)
            bra.permute(back)
        found = None
        if wants_angles:
            found = torch.zeros_like(angles)
            if outputs:
                (found,) = torch.autograd.grad(outputs, variable, gradients)
        return found, bra.states if wants_start else None, None


class _Moving:
    """States [B, 2^n] that blocks act on in turn, between two pieces of memory.

    Attributes:
        states: the present ones. Those given are not changed.
    """

    def __init__(self, states: Tensor) -> None:
        self.states = states
        self._given = states
        self._spare: Tensor | None = None

    def apply(self, matrix: Tensor) -> None:
        """A block on states whose axes lie as it wants them: [B, C R K] becomes [B, K C R]."""
        count, size = matrix.shape[1:3]
        target = self._target()
        before = self.states.view(len(target), count, -1, size)
        after = target.view(len(target), size, count, -1)
        for value in range(count):
            _product(matrix[:, value], before[:, value].mT, after[:, :, value])
        self._turn(target)

    def keep(self) -> Tensor:
        """The present states, whose memory is not used again."""
        self._given = self.states
        return self.states

    def undo(self, matrix: Tensor) -> None:
        """The inverse of `apply`: [B, K C R] becomes [B, C R K]."""
        count, size = matrix.shape[1:3]
        target = self._target()
        after = self.states.view(len(target), size, count, -1)
        before = target.view(len(target), count, -1, size)
        conjugate = matrix.conj().resolve_conj()
        for value in range(count):
            _product(after[:, :, value].mT, conjugate[:, value], before[:, value])
        self._turn(target)

    def permute(self, permutation: Sequence[int] | None) -> None:
        """Bring the n axes into another order."""
        if permutation is None:
            return
        target = self._target()
        shape = (len(target), *(2,) * len(permutation))
        moved = self.states.view(shape).permute(0, *(p + 1 for p in permutation))
        target.view(shape).copy_(moved)
        self._turn(target)

    def _target(self) -> Tensor:
        return torch.empty_like(self.states) if self._spare is None else self._spare

    def _turn(self, target: Tensor) -> None:
        self._spare = None if self.states is self._given else self.states
        self.states = target


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """The product left @ right into `out`, all of them [B or 1, rows, columns]."""
    if len(out) == 1:
        torch.mm(left[0], right[0], out=out[0])
    else:
        out.copy_(left @ right)


def _matrix_gradient(matrix: Tensor, ket: Tensor, bra: Tensor) -> Tensor:
    """The gradient in a block's matrix [b, C, K, K], b of 1 or B.

    Args:
        matrix: the block's.
        ket: [B, C R K], what it was applied to.
        bra: [B, K C R], the gradient of what came out.
    """
    batch, (count, size) = len(ket), matrix.shape[1:3]
    after = bra.view(batch, size, count, -1)
    before = ket.view(batch, count, -1, size)
    found = torch.empty_like(matrix)
    for value in range(count):
        # As (ket braᴴ)ᴴ: BLAS conjugates only what it transposes.
        left, right = before[:, value].mT, after[:, :, value].mH
        if batch == 1:
            found[0, value] = (left[0] @ right[0]).mH
        elif len(matrix) == 1:
            found[0, value] = (left @ right).sum(0).mH
        else:
            found[:, value] = (left @ right).mH
    return found


def _inverse(permutation: Sequence[int] | None) -> list[int] | None:
    """What undoes a permutation of axes."""
    if permutation is None:
        return None
    return sorted(range(len(permutation)), key=permutation.__getitem__)
