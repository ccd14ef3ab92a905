"""Channels: noise on some qubits, as Kraus operators by PennyLane's names.

A channel is ρ → Σ_k w_k M_k ρ M_kᴴ with weights w_k and matrices M_k: Kraus operators √w_k M_k,
whose weights are separate so that derivatives at strength 0 are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import (
    Angle,
    Expression,
    as_angle,
    as_integer,
    kind_of,
)
from lockstep.systems.quantum.circuits.gates import PAULIS, Evaluation, pauli_matrix
from lockstep.systems.quantum.simulation.adjoint import is_transformed

Kraus = tuple[Tensor, Tensor]
"""Weights [..., K], real, and matrices [..., K, D, D], complex, of K Kraus operators."""


@dataclass(frozen=True)
class ChannelKind:
    """The Kraus operators of all channels of one name.

    Attributes:
        values: names of its values, in order.
        bounds: least and greatest value of each.
        kraus: function from values [..., V] to Kraus operators.
    """

    values: tuple[str, ...]
    bounds: tuple[tuple[float, float], ...]
    kraus: Callable[[Tensor], Kraus]


def _complex(like: Tensor) -> torch.dtype:
    return torch.complex64 if like.dtype == torch.float32 else torch.complex128


def constant(like: Tensor, *rows: Sequence[Sequence[complex]]) -> Tensor:
    """Constant matrices [..., K, D, D], expanded to the batch of values [..., V]."""
    matrices = torch.tensor(rows, dtype=_complex(like), device=like.device)
    return matrices.expand(*like.shape[:-1], *matrices.shape)


TO_ZERO = (((1, 0), (0, 0)), ((0, 1), (0, 0)))
"""|0><0| and |0><1|."""
_TO_ONE = (((0, 0), (1, 0)), ((0, 0), (0, 1)))
"""|1><0| and |1><1|."""
PROJECTORS = (((1, 0), (0, 0)), ((0, 0), (0, 1)))
"""The projections of a measurement, for the outcomes 0 and 1."""


def _pauli(string: str) -> Callable[[Tensor], Kraus]:
    """A Pauli string with probability p."""
    pauli = pauli_matrix(string)
    both = torch.stack([torch.eye(len(pauli), dtype=torch.complex128), pauli]).tolist()

    def kraus(values: Tensor) -> Kraus:
        p = values[..., 0]
        return torch.stack([1 - p, p], -1), constant(values, *both)

    return kraus


def _depolarizing(values: Tensor) -> Kraus:
    p = values[..., 0]
    return torch.stack([1 - p, p / 3, p / 3, p / 3], -1), constant(values, *PAULIS.values())


def _fading(values: Tensor, first: int) -> Tensor:
    """diag(1, √(1 - γ)), or with `first` = 0 diag(√(1 - γ), 1)."""
    left = 1 - values[..., 0]
    # At 0 the root has no finite derivative; `_check` refuses trained values there.
    root = left.where(left > 0, 1).sqrt().where(left > 0, 0)
    pair = (torch.ones_like(root), root) if first else (root, torch.ones_like(root))
    return torch.diag_embed(torch.stack(pair, -1)).to(_complex(values))


def _amplitude_damping(values: Tensor) -> Kraus:
    gamma = values[..., 0]
    matrices = torch.stack([_fading(values, 1), constant(values, TO_ZERO[1])[..., 0, :, :]], -3)
    return torch.stack([torch.ones_like(gamma), gamma], -1), matrices


def _generalized_amplitude_damping(values: Tensor) -> Kraus:
    """With probability p towards |1>, as PennyLane has it; towards |0> else."""
    gamma, p = values.unbind(-1)
    down, up = constant(values, TO_ZERO[1], _TO_ONE[0]).unbind(-3)
    matrices = torch.stack([_fading(values, 1), down, _fading(values, 0), up], -3)
    return torch.stack([1 - p, (1 - p) * gamma, p, p * gamma], -1), matrices


def _phase_damping(values: Tensor) -> Kraus:
    gamma = values[..., 0]
    matrices = torch.stack([_fading(values, 1), constant(values, PROJECTORS[1])[..., 0, :, :]], -3)
    return torch.stack([torch.ones_like(gamma), gamma], -1), matrices


def _reset_error(values: Tensor) -> Kraus:
    p0, p1 = values.unbind(-1)
    weights = torch.stack([1 - p0 - p1, p0, p0, p1, p1], -1)
    return weights, constant(values, PAULIS["I"], *TO_ZERO, *_TO_ONE)


def _thermal_relaxation(values: Tensor) -> Kraus:
    """Generalized amplitude damping, then the rest of the dephasing given by T2.

    Populations decay by exp(-t/T1) and coherences by exp(-t/T2), of which damping alone gives
    exp(-t/2T1). The same channel for T2 up to 2 T1.
    """
    excited, t1, t2, time = values.unbind(-1)
    gamma = -torch.expm1(-time / t1)
    flip = (1 - (time / (2 * t1) - time / t2).exp()) / 2
    weights, matrices = _generalized_amplitude_damping(torch.stack([gamma, excited], -1))
    phases, turning = _pauli("Z")(flip[..., None])
    both = (turning[..., :, None, :, :] @ matrices[..., None, :, :, :]).flatten(-4, -3)
    return (phases[..., :, None] * weights[..., None, :]).flatten(-2), both


_SHARE = (0.0, 1.0)
TIME = (0.0, float("inf"))

CHANNELS: Mapping[str, ChannelKind] = MappingProxyType(
    {
        "BitFlip": ChannelKind(("p",), (_SHARE,), _pauli("X")),
        "PhaseFlip": ChannelKind(("p",), (_SHARE,), _pauli("Z")),
        "DepolarizingChannel": ChannelKind(("p",), (_SHARE,), _depolarizing),
        "AmplitudeDamping": ChannelKind(("gamma",), (_SHARE,), _amplitude_damping),
        "GeneralizedAmplitudeDamping": ChannelKind(
            ("gamma", "p"), (_SHARE, _SHARE), _generalized_amplitude_damping
        ),
        "PhaseDamping": ChannelKind(("gamma",), (_SHARE,), _phase_damping),
        "ResetError": ChannelKind(("p0", "p1"), (_SHARE, _SHARE), _reset_error),
        "ThermalRelaxationError": ChannelKind(
            ("pe", "t1", "t2", "tg"), (_SHARE, TIME, TIME, TIME), _thermal_relaxation
        ),
    }
)
"""Channels on one qubit by name; `PauliError` and `QubitChannel` have further arguments."""

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
        # Numbers are evaluated with the parameters, too; they must get no gradient.
        trained = torch.tensor(self.trained, dtype=torch.bool, device=values.device)
        values = values.where(trained, values.detach())
        if self.matrices is not None:
            matrices = self.matrices.to(values.device, _complex(values))
            weights = values.new_ones(*values.shape[:-1], len(matrices))
            return weights, matrices.expand(*values.shape[:-1], *matrices.shape)
        return self._kind.kraus(values)

    @property
    def trained(self) -> tuple[bool, ...]:
        """For each of its values, whether it depends on parameters."""
        return tuple(bool(value.parameters) for value in self.values)

    @property
    def numbers(self) -> Tensor | None:
        """Its values, [V], float64; None where they depend on parameters."""
        if any(self.trained):
            return None
        return Evaluation(self.values)(torch.zeros(0, dtype=torch.float64))

    @cached_property
    def _kind(self) -> ChannelKind:
        if self.operators:
            # The first qubit is the low bit.
            return ChannelKind(("p",), (_SHARE,), _pauli(self.operators[::-1]))
        return CHANNELS[self.name]

    def has_hidden_gradient(self, values: Tensor) -> bool:
        """Whether an operator of weight 0 gets another weight when the values [B, V] change.

        An operator whose weight stays 0 adds nothing to a gradient.
        """
        with torch.enable_grad():
            values = values.detach().requires_grad_()
            weights, _ = self.kraus(values)
            absent = weights.where(weights <= 0, 0).sum(0)
            slopes = [torch.autograd.grad(one, values, retain_graph=True)[0] for one in absent]
        return any(bool(slope.any()) for slope in slopes)

    def _check(self, values: Tensor) -> None:
        if self.matrices is not None:
            return
        kind = self._kind
        least, greatest = values.detach().new_tensor(kind.bounds).unbind(-1)
        wrong = ~((values >= least) & (values <= greatest))
        if kind.bounds[-1] == TIME:
            wrong[..., 1:3] |= ~(values[..., 1:3] > 0)
        for i, name in enumerate(kind.values):
            if wrong[..., i].any():
                value = values[..., i][wrong[..., i]][0].item()
                low, high = kind.bounds[i]
                needed = f"from {low:g} to {high:g}" if high < TIME[1] else "positive"
                raise ConfigError(f"{self.name}: {name}={value:g} must be {needed}")
        has_gradient = values.requires_grad or is_transformed(values)
        for i, name in enumerate(kind.values):
            is_trained = has_gradient and self.trained[i] and name == "gamma"
            if is_trained and (values[..., i] == 1).any():
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
    return _checked(Channel(name, _checked_qubits([qubit], name), _values(name, values, wanted)))


def pauli_error(operators: str, *qubits: int, p: Angle | Expression | float) -> Channel:
    """Paulis on some qubits with probability p: PennyLane's `PauliError`.

    Args:
        operators: a letter I, X, Y or Z for each of the qubits, in their order.
        qubits: qubits they act on.
        p: probability, a number or a `parameter`.

    Raises:
        ConfigError: the letters do not fit the qubits, or p is out of bounds.
    """
    checked = _checked_qubits(qubits, PAULI_ERROR)
    if not isinstance(operators, str) or set(operators) - set("IXYZ"):
        raise ConfigError(f"{PAULI_ERROR}: {operators!r} must have letters of I, X, Y, Z")
    if len(operators) != len(checked) or not 1 <= len(checked) <= _MOST_QUBITS:
        raise ConfigError(
            f"{PAULI_ERROR}: needs a letter for each qubit, and from 1 to {_MOST_QUBITS} of them"
        )
    values = _values(PAULI_ERROR, {"p": p}, ("p",))
    return _checked(Channel(PAULI_ERROR, checked, values, operators))


def qubit_channel(matrices: Sequence[Tensor], *qubits: int) -> Channel:
    """A channel given by its Kraus operators: PennyLane's `QubitChannel`, Qiskit's `Kraus`.

    Args:
        matrices: the operators [2^k, 2^k] with Σ KᴴK = 1, real or complex.
        qubits: the k qubits they act on, from 1 to 4; the first is the low bit of the matrices.

    Raises:
        ConfigError: the operators are not complete, or do not fit the qubits.
    """
    checked = _checked_qubits(qubits, QUBIT_CHANNEL)
    size = 1 << len(checked)
    given = list(matrices) if isinstance(matrices, (Sequence, Tensor)) else []
    if not 1 <= len(checked) <= _MOST_QUBITS or not given:
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
    return Channel(QUBIT_CHANNEL, checked, matrices=kept)


def _checked_qubits(qubits: Sequence[int], name: str) -> tuple[int, ...]:
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
        if isinstance(value, bool):
            raise ConfigError(f"{name}: {key} must be a number or a `parameter`, not {value!r}")
        try:
            made.append(as_angle(value))
        except ConfigError as error:
            raise ConfigError(
                f"{name}: {key} must be a finite number or a `parameter`, not {value!r}"
            ) from error
    return tuple(made)


def _checked(made: Channel) -> Channel:
    """The channel, after a check of its values where all are numbers."""
    numbers = made.numbers
    if numbers is not None:
        made.kraus(numbers)
    return made
