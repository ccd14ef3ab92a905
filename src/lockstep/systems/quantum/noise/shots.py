"""Shots that go through a circuit side by side, with random numbers keyed by shot and place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate
from lockstep.systems.quantum.circuits.steps import act
from lockstep.systems.quantum.noise.channels import PROJECTORS, TO_ZERO, Channel
from lockstep.systems.quantum.noise.circuit import If, Measure, Operation, Reset
from lockstep.systems.quantum.simulation.statevector import Simulator

_BLOCK = 4
"""Numbers that one value of Philox' counter makes."""


def uniform(key: int, row: int, first: int, shots: int, places: int) -> Tensor:
    """Uniform numbers in [0, 1), [shots, places], float64.

    Philox (Salmon et al. 2011) is counter-based: shot s has the numbers s·places … of the stream
    of its key and row, whichever shots are drawn together.

    Args:
        key: key of the numbers, from 0 to 2^64 less one.
        row: number of the row of parameters.
        first: number of the first shot.
        shots: number of shots.
        places: number of random numbers of a shot.
    """
    start = first * places
    # Of a list with large integers NumPy would make floats.
    words = np.array([key, row], dtype=np.uint64)
    bits = np.random.Philox(key=words, counter=[start // _BLOCK, 0, 0, 0])
    generator = np.random.Generator(bits)
    skipped = start % _BLOCK
    drawn = generator.random(skipped + shots * places)[skipped:]
    return torch.from_numpy(drawn).view(shots, places)


def checked_key(key: int | None) -> int:
    """The key, drawn from torch's global generator where there is none.

    Lockstep seeds this generator for each microbatch.

    Raises:
        ConfigError: it is not an integer from 0 to 2^64 less one.
    """
    if key is None:
        return int(torch.randint((1 << 63) - 1, ()))
    number = as_integer(key, "key")
    if not 0 <= number < 1 << 64:
        raise ConfigError(f"key={key}: must be from 0 to 2^64 less one")
    return number


@dataclass(frozen=True, eq=False)
class Unitary:
    """Gates that follow one another, with the place of their first angle among all."""

    simulator: Simulator
    first: int


@dataclass(frozen=True, eq=False)
class Jump:
    """An operation whose outcome is drawn, with the places of its random number and first value."""

    operation: Channel | Measure | Reset
    place: int
    first: int = 0


@dataclass(frozen=True, eq=False)
class Choice:
    """A condition, with the steps of both sides."""

    condition: If
    then: list[Step]
    otherwise: list[Step]


Step = Unitary | Jump | Choice


class Layout:
    """Gives each operation its angles, values and random numbers.

    Attributes:
        places: number of random numbers of a shot, whichever way it goes.
    """

    def __init__(self, like: Simulator) -> None:
        self.places = 0
        self._like = like
        self._num_angles = 0
        self._num_values = 0

    def steps(self, operations: Sequence[Operation]) -> list[Step]:
        """The steps of some operations, neighbouring gates together."""
        made: list[Step] = []
        waiting: list[Gate] = []
        for each in operations:
            if isinstance(each, Gate):
                waiting.append(each)
                continue
            self._flush(waiting, made)
            if isinstance(each, If):
                made.append(Choice(each, self.steps(each.then), self.steps(each.otherwise)))
                continue
            made.append(Jump(each, self.places, self._num_values))
            self.places += 2 if isinstance(each, Measure) and each.confusion else 1
            self._num_values += len(each.values) if isinstance(each, Channel) else 0
        self._flush(waiting, made)
        return made

    def _flush(self, waiting: list[Gate], made: list[Step]) -> None:
        if waiting:
            circuit = Circuit(self._like.circuit.num_qubits, waiting)
            simulator = Simulator(circuit, self._like.dtype, self._like.device)
            made.append(Unitary(simulator, self._num_angles))
            self._num_angles += len(circuit.with_angle)
            waiting.clear()


@dataclass(frozen=True, eq=False)
class Shots:
    """N shots on their way.

    Attributes:
        states: their states, [N, 2^n].
        bits: values of their classical bits, [N], int64.
        rows: rows of the parameters that they belong to, [N], int64.
        numbers: their random numbers, [N, places], float64.
    """

    states: Tensor
    bits: Tensor
    rows: Tensor
    numbers: Tensor

    def some(self, which: Tensor) -> Shots:
        """The shots of these numbers [M]."""
        return Shots(*(t[which] for t in (self.states, self.bits, self.rows, self.numbers)))

    def with_some(self, which: Tensor, others: Shots) -> Shots:
        """The shots, with others in the places of these numbers [M]."""
        states = self.states.index_copy(0, which, others.states)
        return replace(self, states=states, bits=self.bits.index_copy(0, which, others.bits))


class Walk:
    """Takes shots through steps.

    Args:
        angles: angles of all gates, [B, G].
        values: values of all channels, [B, V].
    """

    def __init__(self, angles: Tensor, values: Tensor) -> None:
        self._angles = angles
        self._values = values

    def run(self, shots: Shots, steps: Sequence[Step]) -> Shots:
        """The shots after some steps."""
        for step in steps:
            if not len(shots.bits):
                return shots
            if isinstance(step, Unitary):
                shots = self._turned(shots, step)
            elif isinstance(step, Choice):
                shots = self._chosen(shots, step)
            elif isinstance(step.operation, Channel):
                shots = self._channel(shots, step, step.operation)
            else:
                shots = self._found(shots, step, step.operation)
        return shots

    def _turned(self, shots: Shots, step: Unitary) -> Shots:
        count = len(step.simulator.circuit.with_angle)
        own = self._angles[:, step.first : step.first + count]
        # Of a single row, all shots share their matrices.
        angles = own[0] if len(own) == 1 else own[shots.rows]
        return replace(shots, states=step.simulator.state_at(angles, shots.states))

    def _chosen(self, shots: Shots, step: Choice) -> Shots:
        holds = torch.ones_like(shots.bits, dtype=torch.bool)
        for place, bit in enumerate(step.condition.bits):
            holds &= (shots.bits >> bit & 1) == (step.condition.value >> place & 1)
        for steps, chosen in ((step.then, holds), (step.otherwise, ~holds)):
            which = chosen.nonzero()[:, 0]
            if steps and len(which):
                shots = shots.with_some(which, self.run(shots.some(which), steps))
        return shots

    def _channel(self, shots: Shots, step: Jump, channel: Channel) -> Shots:
        values = self._values[:, step.first : step.first + len(channel.values)]
        weights, matrices = channel.kraus(values)
        is_trained = values.requires_grad and any(channel.trained)
        if is_trained and (weights.detach() <= 0).any() and _may_appear(channel, values):
            raise ConfigError(
                f"{channel.name}: a trained value makes an operator's weight 0, of which no "
                "trajectory can find the gradient; keep it away from the ends of its range, or use "
                "the density matrix (DensitySimulator)"
            )
        rows = torch.zeros_like(shots.rows) if len(values) == 1 else shots.rows
        numbers = shots.numbers[:, step.place]
        states, _ = jumped(shots.states, weights, matrices, rows, channel.qubits, numbers)
        return replace(shots, states=states)

    def _found(self, shots: Shots, step: Jump, operation: Measure | Reset) -> Shots:
        pair = PROJECTORS if isinstance(operation, Measure) else TO_ZERO
        matrices = torch.tensor([pair], dtype=shots.states.dtype, device=shots.states.device)
        weights = matrices.real.new_ones(1, 2)
        rows, numbers = torch.zeros_like(shots.rows), shots.numbers[:, step.place]
        states, found = jumped(shots.states, weights, matrices, rows, (operation.qubit,), numbers)
        if isinstance(operation, Reset):
            return replace(shots, states=states)
        if operation.confusion is not None:
            ones = torch.tensor([row[1] for row in operation.confusion], dtype=torch.float64)
            found = (shots.numbers[:, step.place + 1] < ones.to(found.device)[found]).long()
        bits = shots.bits & ~(1 << operation.bit) | found << operation.bit
        return replace(shots, states=states, bits=bits)


def _may_appear(channel: Channel, values: Tensor) -> bool:
    """Whether the weight of an operator that is 0 changes with the trained values [B, V].

    An operator whose weight stays 0 adds nothing to a gradient.
    """
    with torch.enable_grad():
        values = values.detach().requires_grad_()
        weights, _ = channel.kraus(values)
        absent = weights.where(weights <= 0, 0).sum(0)
        slopes = [torch.autograd.grad(one, values, retain_graph=True)[0] for one in absent]
    return any(bool(slope.any()) for slope in slopes)


def jumped(
    states: Tensor,
    weights: Tensor,
    matrices: Tensor,
    rows: Tensor,
    qubits: Sequence[int],
    numbers: Tensor,
) -> tuple[Tensor, Tensor]:
    """States after one Kraus operator each, drawn with its probability.

    Args:
        states: states of norm 1, [N, 2^n].
        weights: weights of the operators, [B, K].
        matrices: their matrices, [B, K, D, D].
        rows: row of weights and matrices of each state, [N].
        qubits: qubits that the operators act on, low bit first.
        numbers: uniform random numbers, [N], float64.

    Returns:
        The states divided by the root of the probability of what was drawn, a constant, and the
        number of the operator that was drawn for each, [N].
    """
    matrices = matrices.to(states.dtype)
    with torch.no_grad():
        reduced = _reduced(states, qubits)
        squares = matrices.mH @ matrices
        found = torch.einsum("nkij,nji->nk", squares[rows], reduced).real.double()
        likely = (found * weights[rows]).clamp(min=0)
        upto = likely.cumsum(-1)
        chosen = (upto <= numbers[:, None] * upto[:, -1:]).sum(-1)
        # By rounding, the number may lie behind all.
        last = likely.shape[-1] - 1 - (likely > 0).flip(-1).long().argmax(-1)
        chosen = torch.minimum(chosen, last)
        probability = likely.gather(-1, chosen[:, None])[:, 0].to(states.real)
    scale = (weights[rows, chosen] / probability).sqrt()
    own = matrices[rows, chosen] * scale[:, None, None].to(states.dtype)
    return act(own, states[..., None], qubits)[..., 0], chosen


def _reduced(states: Tensor, qubits: Sequence[int]) -> Tensor:
    """The density matrices [N, D, D] of some qubits in states [N, 2^n]."""
    count = states.shape[-1].bit_length() - 1
    axes = [1 + count - 1 - q for q in reversed(qubits)]
    split = states.reshape(len(states), *(2,) * count)
    split = split.movedim(axes, [*range(1, len(qubits) + 1)]).reshape(
        len(states), 1 << len(qubits), -1
    )
    return split @ split.mH
