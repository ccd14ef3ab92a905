"""Trajectories: state vectors whose jumps and measurements are drawn, in place of a density matrix.

Each shot follows one outcome of each channel, measurement and reset, drawn with its probability
(Dalibard, Castin and Mølmer, Phys. Rev. Lett. 68, 580 (1992)). The mean of |ψ><ψ| over shots is the
density matrix.

A state is divided by the root of the probability p of what was drawn, taken as a constant. So its
norm is 1, and the gradient of its squared norm is that of ln p: the mean of any quantity linear in
|ψ><ψ| has an unbiased gradient, since Σ_k p_k ∇(<ψ|M_kᴴ O M_k|ψ> / p_k) = ∇ tr(ρ O) where the p_k
are constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import Circuit, as_integer
from lockstep.quantum.hamiltonians.operator import PauliOperator, hamiltonian_terms
from lockstep.quantum.noise.checks import checked_circuit, checked_parameters
from lockstep.quantum.noise.circuit import DynamicCircuit
from lockstep.quantum.noise.random import checked_key, uniform
from lockstep.quantum.noise.shots import Layout, Shots, Walk
from lockstep.quantum.simulation.derivatives import differentiable_once, is_transformed
from lockstep.quantum.simulation.measure import PauliSum
from lockstep.quantum.simulation.memory import check_memory
from lockstep.quantum.simulation.statevector import Simulator

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
