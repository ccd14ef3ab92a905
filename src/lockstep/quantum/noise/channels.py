"""Channels: noise on some qubits, whose values are numbers or functions of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.angles import Angle, Expression
from lockstep.quantum.circuits.circuit import Circuit, as_integer, gate, kind_of
from lockstep.quantum.noise.kinds import CHANNELS, PAULI_KIND, PAULIS, TIME, Kraus, constant
from lockstep.quantum.simulation.derivatives import is_transformed

_COMPLETE = 1e-9
"""How far Σ KᴴK of given operators may be from the identity."""
_MOST_QUBITS = 4
"""Most qubits that a channel given by its operators acts on."""


PAULI_ERROR, QUBIT_CHANNEL = "PauliError", "QubitChannel"


@dataclass(frozen=True, eq=False)
class Channel:
    """Noise on some qubits; made by `channel`, `pauli_error` and `qubit_channel`.

    Attributes:
        name: name of the channel, as in PennyLane.
        qubits: qubits it acts on; the first is the low bit of its matrices.
        values: its values: numbers, or functions of parameters, as angles of gates are.
        operators: letters of a `PauliError`, one for each qubit.
        matrices: Kraus operators of a `QubitChannel`, [K, D, D], complex128.
    """

    name: str
    qubits: tuple[int, ...]
    values: tuple[Angle | Expression, ...] = ()
    operators: str = ""
    matrices: Tensor | None = None

    def kraus(self, values: Tensor) -> Kraus:
        """The channel's Kraus operators, as weights and matrices.

        Args:
            values: its values, real, [..., V].

        Returns:
            Weights [..., K] and matrices [..., K, D, D], differentiable in the values.

        Raises:
            ConfigError: a value is out of bounds, or its gradient is not finite: a trained gamma
                of 1.
        """
        self._check(values)
        # Numbers, too, come as functions of parameters, of derivative 0.
        trained = torch.tensor(self.trained, dtype=torch.bool, device=values.device)
        values = values.where(trained, values.detach())
        if self.matrices is not None:
            dtype = torch.complex64 if values.dtype == torch.float32 else torch.complex128
            matrices = self.matrices.to(values.device, dtype)
            weights = values.new_ones(*values.shape[:-1], len(matrices))
            return weights, matrices.expand(*values.shape[:-1], *matrices.shape)
        if self.operators:
            p = values[..., 0]
            whole = torch.ones(1, 1, dtype=torch.complex128)
            for letter in reversed(self.operators):  # the first qubit is the low bit
                one = PAULIS[letter]
                whole = torch.kron(whole, torch.tensor(one, dtype=torch.complex128))
            both = torch.stack([torch.eye(len(whole), dtype=torch.complex128), whole])
            return torch.stack([1 - p, p], -1), constant(values, *both.tolist())
        return CHANNELS[self.name].kraus(values)

    @cached_property
    def trained(self) -> tuple[bool, ...]:
        """For each of its values, whether it depends on parameters."""
        carriers = [Circuit(1, [gate("rx", 0, angle=value)]) for value in self.values]
        return tuple(carrier.num_parameters > 0 for carrier in carriers)

    @property
    def numbers(self) -> Tensor | None:
        """Its values, [V], float64; None where they depend on parameters."""
        if any(self.trained):
            return None
        carriers = Circuit(1, [gate("rx", 0, angle=value) for value in self.values])
        return carriers.angles(torch.zeros(0, dtype=torch.float64))

    def _check(self, values: Tensor) -> None:
        kind = PAULI_KIND if self.operators else CHANNELS.get(self.name)
        if kind is None:
            return
        least, greatest = values.detach().new_tensor(kind.bounds).unbind(-1)
        wrong = ~((values >= least) & (values <= greatest))
        if kind.bounds[-1] == TIME:
            wrong[..., 1:3] |= ~(values[..., 1:3] > 0)
        for place, name in enumerate(kind.values):
            if wrong[..., place].any():
                value = values[..., place][wrong[..., place]][0].item()
                low, high = kind.bounds[place]
                needed = f"from {low:g} to {high:g}" if high < TIME[1] else "positive"
                raise ConfigError(f"{self.name}: {name}={value:g} must be {needed}")
        has_gradient = values.requires_grad or is_transformed(values)
        for place, name in enumerate(kind.values):
            ends = has_gradient and self.trained[place] and name == "gamma"
            if ends and (values[..., place] == 1).any():
                raise ConfigError(
                    f"{self.name}: a trained gamma of 1 has no finite gradient; keep it below 1"
                )
        if self.name == "ResetError" and (values.sum(-1) > 1).any():
            raise ConfigError("ResetError: p0 + p1 must be at most 1")
        if kind.bounds[-1] == TIME and (values[..., 2] > 2 * values[..., 1]).any():
            raise ConfigError("ThermalRelaxationError: t2 must be at most 2 t1")


def channel(name: str, qubit: int, **values: Angle | Expression | float) -> Channel:
    """A channel on one qubit by name, as `channel("AmplitudeDamping", 0, gamma=0.1)`.

    Names, values and conventions are PennyLane's: `BitFlip(p)`, `PhaseFlip(p)`,
    `DepolarizingChannel(p)` (X, Y and Z with p/3 each; Qiskit Aer's parameter is 4/3 p),
    `AmplitudeDamping(gamma)`, `GeneralizedAmplitudeDamping(gamma, p)`, `PhaseDamping(gamma)`,
    `ResetError(p0, p1)` and `ThermalRelaxationError(pe, t1, t2, tg)`.

    Args:
        name: name of the channel.
        qubit: qubit it acts on.
        values: its values: numbers, or a `parameter` to train, as angles of gates are.

    Raises:
        ConfigError: there is no such channel, or its values have other names or are out of bounds.
    """
    if name not in CHANNELS:
        more = "pauli_error and qubit_channel make others"
        raise ConfigError(f"channel {name!r}: there is {', '.join(CHANNELS)}; {more}")
    wanted = CHANNELS[name].values
    if set(values) != set(wanted):
        raise ConfigError(
            f"{name}: needs {', '.join(wanted)}, not {', '.join(values) or 'nothing'}"
        )
    return _checked(Channel(name, _places([qubit], name), _values(name, values, wanted)))


def pauli_error(operators: str, *qubits: int, p: Angle | Expression | float) -> Channel:
    """Paulis on some qubits with probability p: PennyLane's `PauliError`.

    Args:
        operators: a letter I, X, Y or Z for each of the qubits, in their order.
        qubits: qubits they act on.
        p: probability, a number or a `parameter`.

    Raises:
        ConfigError: the letters do not fit the qubits, or p is out of bounds.
    """
    places = _places(qubits, PAULI_ERROR)
    if not isinstance(operators, str) or set(operators) - set("IXYZ"):
        raise ConfigError(f"{PAULI_ERROR}: {operators!r} must have letters of I, X, Y, Z")
    if len(operators) != len(places) or not 1 <= len(places) <= _MOST_QUBITS:
        raise ConfigError(
            f"{PAULI_ERROR}: needs a letter for each qubit, and from 1 to {_MOST_QUBITS} of them"
        )
    return _checked(Channel(PAULI_ERROR, places, _values(PAULI_ERROR, {"p": p}, ("p",)), operators))


def qubit_channel(matrices: Sequence[Tensor], *qubits: int) -> Channel:
    """A channel given by its Kraus operators: PennyLane's `QubitChannel`, Qiskit's `Kraus`.

    Args:
        matrices: the operators [2^k, 2^k] with Σ KᴴK = 1, real or complex.
        qubits: the k qubits they act on, from 1 to 4; the first is the low bit of the matrices.

    Raises:
        ConfigError: the operators are not complete, or do not fit the qubits.
    """
    places = _places(qubits, QUBIT_CHANNEL)
    size = 1 << len(places)
    given = list(matrices) if isinstance(matrices, (Sequence, Tensor)) else []
    if not 1 <= len(places) <= _MOST_QUBITS or not given:
        raise ConfigError(
            f"{QUBIT_CHANNEL}: needs a sequence of matrices, and from 1 to {_MOST_QUBITS} qubits"
        )
    for matrix in given:
        if not isinstance(matrix, Tensor) or matrix.shape != (size, size):
            shape = list(matrix.shape) if isinstance(matrix, Tensor) else kind_of(matrix)
            raise ConfigError(f"{QUBIT_CHANNEL}: matrices must be [{size}, {size}], not {shape}")
    kept = torch.stack([m.detach().to("cpu", torch.complex128) for m in given])
    gap = ((kept.mH @ kept).sum(0) - torch.eye(size)).abs().max()
    if not gap < _COMPLETE:
        raise ConfigError(
            f"{QUBIT_CHANNEL}: the sum of KᴴK must be the identity (it is off by {gap:.1e})"
        )
    return Channel(QUBIT_CHANNEL, places, matrices=kept)


def _places(qubits: Sequence[int], name: str) -> tuple[int, ...]:
    places = tuple(as_integer(q, f"{name}: qubit") for q in qubits)
    if len(set(places)) < len(places) or min(places, default=0) < 0:
        raise ConfigError(f"{name}: its qubits must be different, and not negative")
    return places


def _values(
    name: str, values: Mapping[str, Angle | Expression | float], wanted: Sequence[str]
) -> tuple[Angle | Expression, ...]:
    made = []
    for key in wanted:
        value = values[key]
        if isinstance(value, (bool, type(None))):
            raise ConfigError(f"{name}: {key} must be a number or a `parameter`, not {value!r}")
        try:
            carrier = gate("rx", 0, angle=value)  # as functions of parameters, values are angles
        except ConfigError as error:
            raise ConfigError(
                f"{name}: {key} must be a finite number or a `parameter`, not {value!r}"
            ) from error
        assert carrier.angle is not None
        made.append(carrier.angle)
    return tuple(made)


def _checked(made: Channel) -> Channel:
    """The channel, after a check of its values where all are numbers."""
    numbers = made.numbers
    if numbers is not None:
        made.kraus(numbers)
    return made
