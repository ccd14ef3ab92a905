"""Trajectories: noise simulated by state vectors, one for each shot.

Each shot follows one outcome of each channel, measurement and reset, drawn with its probability
(Dalibard, Castin and Mølmer, Phys. Rev. Lett. 68, 580 (1992)). The mean of |ψ><ψ| over shots is the
density matrix.

A state is divided by the root of the probability p of what was drawn, taken as a constant. So its
norm is 1, and the gradient of its squared norm is that of ln p: the mean of any quantity linear in
|ψ><ψ| has an unbiased gradient, since Σ_k p_k ∇(<ψ|M_kᴴ O M_k|ψ> / p_k) = ∇ tr(ρ O) where the p_k
are constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate
from lockstep.systems.quantum.circuits.gates import act
from lockstep.systems.quantum.hamiltonian import PauliOperator, hamiltonian_terms
from lockstep.systems.quantum.noise.channels import PROJECTORS, TO_ZERO, Channel
from lockstep.systems.quantum.noise.circuit import (
    DynamicCircuit,
    If,
    Measure,
    Operation,
    Reset,
    checked_circuit,
    checked_parameters,
)
from lockstep.systems.quantum.simulation.adjoint import differentiable_once, is_transformed
from lockstep.systems.quantum.simulation.measure import PauliSum
from lockstep.systems.quantum.simulation.parts import check_memory
from lockstep.systems.quantum.simulation.statevector import Simulator

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
    """The final states of shots.

    Attributes:
        states: state of each shot, [..., shots, 2^n], of norm 1. Differentiable once: the mean over
            shots of anything linear in |ψ><ψ| has an unbiased gradient. Gradients of anything else
            have no meaning.
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
        compiler = _Compiler(self._initial)
        self._steps = compiler.steps(circuit.operations)
        self._num_draws = compiler.num_draws

    def run(
        self,
        parameters: Tensor | None = None,
        shots: int = 1,
        key: int | None = None,
        first: int = 0,
    ) -> Trajectories:
        """Draw trajectories.

        Shot s of row b of the parameters depends on `key`, b and s only, so shots of several calls
        can be joined.

        Args:
            parameters: real tensor [..., num_parameters]; optional if there are none.
            shots: number of trajectories for each row of the parameters.
            key: key of the random numbers; by default drawn from torch's global generator, which
                Lockstep seeds for each microbatch.
            first: number of the first shot.

        Raises:
            ConfigError: the parameters are not such a tensor, a channel's value is out of bounds, a
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
        number = _checked_key(key)
        draws = [uniform(number, row, first, shots, self._num_draws) for row in range(len(flat))]
        start = _Shots(
            states=self._initial.state_at(flat.new_zeros(len(flat), 0)).repeat_interleave(shots, 0),
            bits=torch.zeros(len(flat) * shots, dtype=torch.int64, device=device),
            rows=torch.arange(len(flat), device=device).repeat_interleave(shots),
            draws=torch.cat(draws).to(device),
        )
        last = _Walk(circuit.angles(flat), circuit.values(flat)).run(start, self._steps)
        states = differentiable_once(last.states, _ONCE) if grads else last.states
        return Trajectories(states.view(*lead, shots, -1), last.bits.view(*lead, shots))


_BLOCK = 4
"""Numbers that Philox makes from one value of its counter."""


def uniform(key: int, row: int, first: int, shots: int, count: int) -> Tensor:
    """Uniform numbers in [0, 1), [shots, count], float64.

    Philox (Salmon et al. 2011) is counter-based: shot s has the numbers s·count … of the stream of
    its key and row, whichever shots are drawn together.

    Args:
        key: key of the numbers, from 0 to 2^64 less one.
        row: number of the row of parameters.
        first: number of the first shot.
        shots: number of shots.
        count: number of random numbers of a shot.
    """
    counter, skipped = divmod(first * count, _BLOCK)
    # NumPy would convert a list with large integers to floats.
    words = np.array([key, row], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=words, counter=[counter, 0, 0, 0]))
    drawn = generator.random(skipped + shots * count)[skipped:]
    return torch.from_numpy(drawn).view(shots, count)


def _checked_key(key: int | None) -> int:
    if key is None:
        return int(torch.randint((1 << 63) - 1, ()))
    number = as_integer(key, "key")
    if not 0 <= number < 1 << 64:
        raise ConfigError(f"key={key}: must be from 0 to 2^64 less one")
    return number


@dataclass(frozen=True, eq=False)
class _Unitary:
    """Successive gates, with the position of their first angle among all."""

    simulator: Simulator
    first: int


@dataclass(frozen=True, eq=False)
class _Jump:
    """A random operation, and the positions of its random number and first value among all."""

    operation: Channel | Measure | Reset
    draw: int
    first: int


@dataclass(frozen=True, eq=False)
class _Branch:
    """A condition, with the steps of both sides."""

    condition: If
    then: list[_Step]
    otherwise: list[_Step]


_Step = _Unitary | _Jump | _Branch


class _Compiler:
    """Assigns each operation its angles, values and random numbers.

    Every operation has random numbers of its own, those of both sides of a condition too. So what
    one shot draws does not depend on the outcomes of others.

    Attributes:
        num_draws: number of random numbers of a shot.
    """

    def __init__(self, like: Simulator) -> None:
        self.num_draws = 0
        self._like = like
        self._num_angles = 0
        self._num_values = 0

    def steps(self, operations: Sequence[Operation]) -> list[_Step]:
        """The steps of some operations, with successive gates in one step."""
        steps: list[_Step] = []
        for is_gate, run in groupby(operations, lambda each: isinstance(each, Gate)):
            if is_gate:
                steps.append(self._unitary([each for each in run if isinstance(each, Gate)]))
                continue
            for each in run:
                if isinstance(each, If):
                    sides = self.steps(each.then), self.steps(each.otherwise)
                    steps.append(_Branch(each, *sides))
                elif not isinstance(each, Gate):
                    steps.append(_Jump(each, self.num_draws, self._num_values))
                    self.num_draws += 2 if isinstance(each, Measure) and each.confusion else 1
                    self._num_values += len(each.values) if isinstance(each, Channel) else 0
        return steps

    def _unitary(self, gates: list[Gate]) -> _Unitary:
        circuit = Circuit(self._like.circuit.num_qubits, gates)
        simulator = Simulator(circuit, self._like.dtype, self._like.device)
        first = self._num_angles
        self._num_angles += len(circuit.with_angle)
        return _Unitary(simulator, first)


@dataclass(frozen=True, eq=False)
class _Shots:
    """The present state of N shots.

    Attributes:
        states: their states, [N, 2^n].
        bits: values of their classical bits, [N], int64.
        rows: rows of the parameters that they belong to, [N], int64.
        draws: their random numbers, [N, draws], float64.
    """

    states: Tensor
    bits: Tensor
    rows: Tensor
    draws: Tensor

    def some(self, which: Tensor) -> _Shots:
        """The shots of these numbers [M]."""
        return _Shots(*(t[which] for t in (self.states, self.bits, self.rows, self.draws)))

    def with_some(self, which: Tensor, others: _Shots) -> _Shots:
        """The shots, with those of these numbers [M] replaced by others."""
        states = self.states.index_copy(0, which, others.states)
        return replace(self, states=states, bits=self.bits.index_copy(0, which, others.bits))


class _Walk:
    """Applies steps to shots.

    Args:
        angles: angles of all gates, [B, G].
        values: values of all channels, [B, V].
    """

    def __init__(self, angles: Tensor, values: Tensor) -> None:
        self._angles = angles
        self._values = values

    def run(self, shots: _Shots, steps: Sequence[_Step]) -> _Shots:
        """The shots after some steps."""
        for step in steps:
            if not len(shots.bits):
                return shots
            if isinstance(step, _Unitary):
                shots = self._unitary(shots, step)
            elif isinstance(step, _Branch):
                shots = self._branch(shots, step)
            elif isinstance(step.operation, Channel):
                shots = self._channel(shots, step, step.operation)
            else:
                shots = self._outcome(shots, step, step.operation)
        return shots

    def _unitary(self, shots: _Shots, step: _Unitary) -> _Shots:
        count = len(step.simulator.circuit.with_angle)
        step_angles = self._angles[:, step.first : step.first + count]
        # With a single row, all shots share their matrices.
        angles = step_angles[0] if len(step_angles) == 1 else step_angles[shots.rows]
        return replace(shots, states=step.simulator.state_at(angles, shots.states))

    def _branch(self, shots: _Shots, step: _Branch) -> _Shots:
        holds = step.condition.holds(shots.bits)
        for steps, chosen in ((step.then, holds), (step.otherwise, ~holds)):
            which = chosen.nonzero()[:, 0]
            if steps and len(which):
                shots = shots.with_some(which, self.run(shots.some(which), steps))
        return shots

    def _channel(self, shots: _Shots, step: _Jump, channel: Channel) -> _Shots:
        values = self._values[:, step.first : step.first + len(channel.values)]
        weights, matrices = channel.kraus(values)
        is_trained = values.requires_grad and any(channel.trained)
        if is_trained and (weights.detach() <= 0).any() and channel.has_hidden_gradient(values):
            raise ConfigError(
                f"{channel.name}: a trained value makes an operator's weight 0, of which no "
                "trajectory can find the gradient; keep it away from the ends of its range, or use "
                "the density matrix (DensitySimulator)"
            )
        return _jumped(shots, step, weights, matrices, channel.qubits)[0]

    def _outcome(self, shots: _Shots, step: _Jump, operation: Measure | Reset) -> _Shots:
        pair = PROJECTORS if isinstance(operation, Measure) else TO_ZERO
        matrices = torch.tensor([pair], dtype=shots.states.dtype, device=shots.states.device)
        weights = matrices.real.new_ones(1, 2)
        shots, found = _jumped(shots, step, weights, matrices, (operation.qubit,))
        if isinstance(operation, Reset):
            return shots
        if operation.confusion is not None:
            ones = torch.tensor([row[1] for row in operation.confusion], dtype=torch.float64)
            found = (shots.draws[:, step.draw + 1] < ones.to(found.device)[found]).long()
        bits = shots.bits & ~(1 << operation.bit) | found << operation.bit
        return replace(shots, bits=bits)


def _jumped(
    shots: _Shots, step: _Jump, weights: Tensor, matrices: Tensor, qubits: Sequence[int]
) -> tuple[_Shots, Tensor]:
    """The shots after one Kraus operator each, drawn with its probability.

    Args:
        shots: N shots, whose states have norm 1.
        step: the step, which has a random number of each shot.
        weights: weights of the operators, [B, K], with B of 1 or the rows of parameters.
        matrices: their matrices, [B, K, D, D].
        qubits: qubits that the operators act on, low bit first.

    Returns:
        The shots, their states divided by the root of the probability of what was drawn (a
        constant), and the number of the operator that was drawn for each, [N].
    """
    states, draws = shots.states, shots.draws[:, step.draw]
    rows = torch.zeros_like(shots.rows) if len(weights) == 1 else shots.rows
    matrices = matrices.to(states.dtype)
    with torch.no_grad():
        reduced = _reduced(states, qubits)
        squares = matrices.mH @ matrices
        found = torch.einsum("nkij,nji->nk", squares[rows], reduced).real.double()
        likely = (found * weights[rows]).clamp(min=0)
        upto = likely.cumsum(-1)
        chosen = (upto <= draws[:, None] * upto[:, -1:]).sum(-1)
        # By rounding, the number may exceed all sums.
        last = likely.shape[-1] - 1 - (likely > 0).flip(-1).long().argmax(-1)
        chosen = torch.minimum(chosen, last)
        probability = likely.gather(-1, chosen[:, None])[:, 0].to(states.real)
    scale = (weights[rows, chosen] / probability).sqrt()
    operators = matrices[rows, chosen] * scale[:, None, None].to(states.dtype)
    return replace(shots, states=act(operators, states[..., None], qubits)[..., 0]), chosen


def _reduced(states: Tensor, qubits: Sequence[int]) -> Tensor:
    """The density matrices [N, D, D] of some qubits in states [N, 2^n]."""
    count = states.shape[-1].bit_length() - 1
    axes = [1 + count - 1 - q for q in reversed(qubits)]
    split = states.reshape(len(states), *(2,) * count)
    split = split.movedim(axes, [*range(1, len(qubits) + 1)]).reshape(
        len(states), 1 << len(qubits), -1
    )
    return split @ split.mH
