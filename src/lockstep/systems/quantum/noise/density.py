"""The two simulators of noise: density matrices, and trajectories of state vectors.

Each shot follows one outcome of each channel, measurement and reset, drawn with its probability
(Dalibard, Castin and Mølmer, Phys. Rev. Lett. 68, 580 (1992)). The mean of |ψ><ψ| over shots is the
density matrix.

A state is divided by the root of the probability p of what was drawn, taken as a constant. So its
norm is 1, and the gradient of its squared norm is that of ln p: the mean of any quantity linear in
|ψ><ψ| has an unbiased gradient, since Σ_k p_k ∇(<ψ|M_kᴴ O M_k|ψ> / p_k) = ∇ tr(ρ O) where the p_k
are constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate
from lockstep.systems.quantum.circuits.steps import act, with_controls
from lockstep.systems.quantum.hamiltonians.operator import (
    PauliOperator,
    hamiltonian_terms,
    masks_of,
    parity_signs,
)
from lockstep.systems.quantum.noise.channels import TO_ZERO, Channel
from lockstep.systems.quantum.noise.circuit import (
    DynamicCircuit,
    If,
    Measure,
    Operation,
    Reset,
    checked_circuit,
    checked_parameters,
)
from lockstep.systems.quantum.noise.shots import Layout, Shots, Walk, checked_key, uniform
from lockstep.systems.quantum.simulation.adjoint import differentiable_once, is_transformed
from lockstep.systems.quantum.simulation.measure import PauliSum
from lockstep.systems.quantum.simulation.parts import check_fits, check_memory, checked_amplitudes
from lockstep.systems.quantum.simulation.statevector import Simulator

_COPIES = 4
"""Density matrices in memory at a time, without gradients."""
_COPIES_OF_AN_OPERATION = 3
"""Further ones for each operation, with gradients."""


@dataclass(frozen=True, eq=False)
class DensityState:
    """What a circuit ends in.

    Attributes:
        branches: for each value of the classical bits, the density matrix times the probability of
            that value, [..., 2^bits, 2^n, 2^n], complex; differentiable.
    """

    branches: Tensor

    @property
    def density(self) -> Tensor:
        """The density matrix, whatever the bits, [..., 2^n, 2^n]."""
        return self.branches.sum(-3)

    @property
    def bits(self) -> Tensor:
        """The probability of each value of the classical bits, [..., 2^bits], real."""
        return self.branches.diagonal(dim1=-2, dim2=-1).real.sum(-1)

    @property
    def probabilities(self) -> Tensor:
        """The probability of each outcome of a measurement of all qubits, [..., 2^n], real."""
        return self.branches.diagonal(dim1=-2, dim2=-1).real.sum(-2)

    def expectation(self, hamiltonian: PauliSum | PauliOperator) -> Tensor:
        """The expectation value tr(ρ H), [...], real, differentiable.

        Raises:
            ConfigError: the Hamiltonian is of another number of qubits.
        """
        density = self.density
        terms = hamiltonian_terms(hamiltonian)
        index = torch.arange(density.shape[-1], device=density.device)
        if 1 << len(next(iter(terms))) != len(index):
            raise ConfigError(
                f"Pauli strings of {len(next(iter(terms)))} letters for a density matrix of "
                f"{len(index).bit_length() - 1} qubits"
            )
        total = density.real.new_zeros(density.shape[:-2])
        for string, coefficient in terms.items():
            x, z = masks_of(string)
            factor = coefficient * 1j ** (x & z).bit_count() * parity_signs(index, z)
            total = total + (density[..., index, index ^ x] * factor.to(density.dtype)).sum(-1).real
        return total


class DensitySimulator:
    """Simulates a circuit with noise by its density matrix, for about ten qubits at most.

    Args:
        circuit: circuit to simulate.
        dtype: dtype of the density matrix, complex64 or complex128.
        device: device on which it is computed.

    Raises:
        ConfigError: an argument has the wrong type, or there is no such device.
    """

    def __init__(
        self,
        circuit: DynamicCircuit,
        dtype: torch.dtype = torch.complex128,
        device: torch.device | str = "cpu",
    ) -> None:
        self.circuit = checked_circuit(circuit)
        self.dtype, self.device = checked_amplitudes(dtype, device)

    def run(self, parameters: Tensor | None = None) -> DensityState:
        """The state after the circuit.

        Args:
            parameters: real tensor [..., num_parameters]; may be left out where there are none.

        Returns:
            State whose tensors are differentiable in the parameters, any number of times.

        Raises:
            ConfigError: the parameters are no such tensor, a channel's value is out of bounds, or
                the density matrices do not fit into memory.
        """
        circuit, real = self.circuit, self.dtype.to_real()
        given = checked_parameters(circuit, parameters, real, self.device)
        lead = given.shape[:-1]
        flat = given.reshape(lead.numel(), given.shape[-1])
        angles, values = circuit.angles(flat), circuit.values(flat)
        grads = torch.is_grad_enabled() and given.requires_grad
        copies = _COPIES + grads * _COPIES_OF_AN_OPERATION * len(circuit.every)
        size = 1 << circuit.num_qubits
        check_fits(
            f"density matrices of {circuit.num_qubits} qubits and {circuit.num_bits} bits",
            (copies * len(flat) * self.dtype.itemsize << circuit.num_bits) * size * size,
            self.device,
            "use trajectories (TrajectorySimulator)",
        )
        shape = (len(flat), 1 << circuit.num_bits, size, size)
        branches = torch.zeros(shape, dtype=self.dtype, device=self.device)
        branches[:, 0, 0, 0] = 1
        evolution = _Evolution(iter(angles.unbind(-1)), iter(values.unbind(-1)))
        branches = evolution.run(branches, circuit.operations)
        return DensityState(branches.view(*lead, *shape[1:]))


class _Evolution:
    """Takes branches [B, 2^m, N, N] through operations.

    Args:
        angles: angles [B] of the gates, in the order of the operations.
        values: values [B] of the channels, in that order.
    """

    def __init__(self, angles: Iterator[Tensor], values: Iterator[Tensor]) -> None:
        self._angles = angles
        self._values = values

    def run(self, branches: Tensor, operations: Sequence[Operation]) -> Tensor:
        for each in operations:
            if isinstance(each, Gate):
                branches = self._gate(branches, each)
            elif isinstance(each, Channel):
                own = [next(self._values) for _ in each.values]
                empty = branches.real.new_zeros(len(branches), 0)
                weights, matrices = each.kraus(torch.stack(own, -1) if own else empty)
                branches = _superoperator(branches, weights, matrices, each.qubits)
            elif isinstance(each, Reset):
                branches = _moved_to_zero(branches, each.qubit)
            elif isinstance(each, Measure):
                branches = _measured(branches, each)
            else:
                branches = self._conditioned(branches, each)
        return branches

    def _gate(self, branches: Tensor, each: Gate) -> Tensor:
        kind = each.kind
        matrix = kind.matrices(next(self._angles)) if kind.has_angle else kind.constant[None]
        matrix = with_controls(matrix.to(branches), each.control_state)[:, None]
        bits = (*each.qubits, *each.controls)
        left = act(matrix, branches, bits)
        return act(matrix.conj(), left.mT, bits).mT

    def _conditioned(self, branches: Tensor, each: If) -> Tensor:
        """All is linear in the density matrices: two runs, each with the others' branches as 0."""
        index = torch.arange(branches.shape[1], device=branches.device)
        holds = torch.ones_like(index, dtype=torch.bool)
        for place, bit in enumerate(each.bits):
            holds &= (index >> bit & 1) == (each.value >> place & 1)
        where = holds[:, None, None]
        then = self.run(branches.where(where, 0), each.then)
        return then + self.run(branches.where(~where, 0), each.otherwise)


def _superoperator(
    branches: Tensor, weights: Tensor, matrices: Tensor, qubits: Sequence[int]
) -> Tensor:
    """Σ w M ρ Mᴴ of branches [B, C, N, N]; weights [B, K] and matrices [B, K, D, D]."""
    size = matrices.shape[-1]
    products = matrices[..., :, None, :, None] * matrices.conj()[..., None, :, None, :]
    whole = (weights[..., None, None, None, None] * products).sum(1)
    whole = whole.reshape(-1, 1, size * size, size * size).to(branches)
    count = branches.shape[-1].bit_length() - 1
    # Columns of the density matrix are the low bits of the vector, rows the high ones.
    bits = (*qubits, *(count + q for q in qubits))
    return act(whole, branches.flatten(-2)[..., None], bits).view_as(branches)


def _moved_to_zero(branches: Tensor, qubit: int) -> Tensor:
    like = branches.real.new_empty(1, 0)
    matrices = torch.tensor([TO_ZERO], dtype=branches.dtype, device=branches.device)
    return _superoperator(branches, like.new_ones(1, 2), matrices, (qubit,))


def _measured(branches: Tensor, each: Measure) -> Tensor:
    """Coherences between outcomes vanish; each outcome goes to the branches of what is read."""
    batch, count, size, _ = branches.shape
    bit = torch.arange(size, device=branches.device) >> each.qubit & 1
    found = [
        branches.where((bit[:, None] == value) & (bit[None, :] == value), 0) for value in (0, 1)
    ]
    read = each.confusion or ((1.0, 0.0), (0.0, 1.0))
    split = (batch, count >> each.bit + 1, 2, 1 << each.bit, size, size)
    # Whatever the bit was before, it is overwritten.
    zero, one = (outcome.view(split).sum(2) for outcome in found)
    both = [read[0][value] * zero + read[1][value] * one for value in (0, 1)]
    return torch.stack(both, 2).reshape(branches.shape)


_ONCE = (
    "second derivatives of trajectories are not supported: outcomes of probability 0 are never "
    "drawn, and may have curvature; use the density matrix (DensitySimulator)"
)
_TRANSFORMED = (
    "torch.func and forward-mode tangents do not go through trajectories: use torch.autograd, or "
    "the density matrix (DensitySimulator)"
)


@dataclass(frozen=True, eq=False)
class Trajectories:
    """What the shots end in.

    Attributes:
        states: state of each shot, [..., shots, 2^n], of norm 1. Differentiable once: the mean over
            shots of what is linear in |ψ><ψ| has an unbiased gradient; of anything else it has none
            that is meant.
        bits: value of the classical bits of each shot, [..., shots], int64; bit b of it is
            classical bit b.
    """

    states: Tensor
    bits: Tensor

    @property
    def weights(self) -> Tensor:
        """1 for each shot, [..., shots], with the gradient of the logarithm of its probability.

        The mean over shots of `weights` times a function of `bits` is the mean of that function,
        with an unbiased gradient.
        """
        return torch.view_as_real(self.states).square().sum((-1, -2))

    def expectation(self, hamiltonian: PauliSum | PauliOperator) -> Tensor:
        """The expectation value of each shot, [..., shots], real; their mean estimates tr(ρ H).

        Raises:
            ConfigError: the Hamiltonian is of another number of qubits.
        """
        return PauliSum(hamiltonian_terms(hamiltonian)).expectation(self.states)


class TrajectorySimulator:
    """Simulates a circuit with noise by trajectories.

    Args:
        circuit: circuit to simulate.
        dtype: dtype of the amplitudes, complex64 or complex128.
        device: device on which the states are computed.

    Raises:
        ConfigError: an argument has the wrong type.
    """

    def __init__(
        self,
        circuit: DynamicCircuit,
        dtype: torch.dtype = torch.complex128,
        device: torch.device | str = "cpu",
    ) -> None:
        self.circuit = checked_circuit(circuit)
        self._initial = Simulator(Circuit(circuit.num_qubits, []), dtype, device)
        layout = Layout(self._initial)
        self._program = layout.steps(circuit.operations)
        self._places = layout.places

    def run(
        self,
        parameters: Tensor | None = None,
        shots: int = 1,
        key: int | None = None,
        first: int = 0,
    ) -> Trajectories:
        """Draw trajectories.

        Shot s of row b of the parameters depends on `key`, b and s only; those of two calls may be
        put together.

        Args:
            parameters: real tensor [..., num_parameters]; may be left out where there are none.
            shots: number of trajectories for each row of the parameters.
            key: key of the random numbers; by default drawn from torch's global generator, which
                Lockstep seeds for each microbatch.
            first: number of the first shot.

        Raises:
            ConfigError: the parameters are no such tensor, a channel's value is out of bounds, a
                number is negative, the states do not fit into memory, `torch.func` or forward mode
                differentiates, or a gradient would be biased: an operator of a channel has weight
                0, but no longer when a trained value changes.
        """
        if as_integer(shots, "shots") < 1 or as_integer(first, "first") < 0:
            raise ConfigError(f"shots={shots}, first={first}: must be at least 1, and at least 0")
        circuit, dtype, device = self.circuit, self._initial.dtype, self._initial.device
        given = checked_parameters(circuit, parameters, dtype.to_real(), device)
        if is_transformed(given):
            raise ConfigError(_TRANSFORMED)
        lead = given.shape[:-1]
        flat = given.reshape(lead.numel(), given.shape[-1])
        grads = torch.is_grad_enabled() and given.requires_grad
        check_memory(circuit.num_qubits, dtype, len(flat) * shots, grads)
        number = checked_key(key)
        drawn = [uniform(number, row, first, shots, self._places) for row in range(len(flat))]
        start = Shots(
            states=self._initial.state_at(flat.new_zeros(len(flat), 0)).repeat_interleave(shots, 0),
            bits=torch.zeros(len(flat) * shots, dtype=torch.int64, device=device),
            rows=torch.arange(len(flat), device=device).repeat_interleave(shots),
            numbers=torch.cat(drawn).to(device),
        )
        last = Walk(circuit.angles(flat), circuit.values(flat)).run(start, self._program)
        states = differentiable_once(last.states, _ONCE) if grads else last.states
        return Trajectories(states.view(*lead, shots, -1), last.bits.view(*lead, shots))
