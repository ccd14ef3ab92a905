"""Density matrices: exact simulation of circuits with noise, measurements and conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.circuit import Gate
from lockstep.systems.quantum.circuits.gates import act, with_controls
from lockstep.systems.quantum.hamiltonian import (
    PauliOperator,
    hamiltonian_terms,
    masks_of,
    pauli_phases,
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
from lockstep.systems.quantum.simulation.measure import PauliSum
from lockstep.systems.quantum.simulation.parts import check_fits, checked_amplitudes

_COPIES = 4
"""Density matrices in memory at a time, without gradients."""
_COPIES_OF_AN_OPERATION = 3
"""Further ones for each operation, with gradients."""


@dataclass(frozen=True, eq=False)
class DensityState:
    """The final state of a circuit.

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
            x, _ = masks_of(string)
            factor = (coefficient * pauli_phases(string, index)).to(density.dtype)
            total = total + (density[..., index, index ^ x] * factor).sum(-1).real
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
            parameters: real tensor [..., num_parameters]; optional if there are none.

        Returns:
            State whose tensors are differentiable in the parameters, any number of times.

        Raises:
            ConfigError: the parameters are not such a tensor, a channel's value is out of bounds,
                or the density matrices do not fit into memory.
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
                values = [next(self._values) for _ in each.values]
                empty = branches.real.new_zeros(len(branches), 0)
                weights, matrices = each.kraus(torch.stack(values, -1) if values else empty)
                branches = _superoperator(branches, weights, matrices, each.qubits)
            elif isinstance(each, Reset):
                matrices = torch.tensor([TO_ZERO], dtype=branches.dtype, device=branches.device)
                weights = branches.real.new_ones(1, 2)
                branches = _superoperator(branches, weights, matrices, (each.qubit,))
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
        """Run both sides, each on its own branches only: all is linear in the density matrices."""
        values = torch.arange(branches.shape[1], device=branches.device)
        where = each.holds(values)[:, None, None]
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


def _measured(branches: Tensor, each: Measure) -> Tensor:
    """Remove coherences between outcomes, and move each outcome to the branches it is read as."""
    batch, count, size, _ = branches.shape
    bit = torch.arange(size, device=branches.device) >> each.qubit & 1
    found = [
        branches.where((bit[:, None] == value) & (bit[None, :] == value), 0) for value in (0, 1)
    ]
    read = each.confusion or ((1.0, 0.0), (0.0, 1.0))
    split = (batch, count >> each.bit + 1, 2, 1 << each.bit, size, size)
    # The sum over the bit's former values: it is overwritten.
    zero, one = (outcome.view(split).sum(2) for outcome in found)
    both = [read[0][value] * zero + read[1][value] * one for value in (0, 1)]
    return torch.stack(both, 2).reshape(branches.shape)
