"""The Kraus operators of channels, by the names that PennyLane gives these; autograd follows them.

A channel is ρ → Σ_k w_k M_k ρ M_kᴴ with weights w_k and matrices M_k: Kraus operators √w_k M_k,
whose weights are kept apart so that derivatives at strength 0 are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

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


def constant(like: Tensor, *rows: Sequence[Sequence[complex]]) -> Tensor:
    """Matrices [..., K, D, D] that depend on nothing, beside values [..., V]."""
    dtype = torch.complex64 if like.dtype == torch.float32 else torch.complex128
    matrices = torch.tensor(rows, dtype=dtype, device=like.device)
    return matrices.expand(*like.shape[:-1], *matrices.shape)


_I = ((1, 0), (0, 1))
_X = ((0, 1), (1, 0))
_Y = ((0, -1j), (1j, 0))
_Z = ((1, 0), (0, -1))
TO_ZERO = (((1, 0), (0, 0)), ((0, 1), (0, 0)))
"""|0><0| and |0><1|."""
_TO_ONE = (((0, 0), (1, 0)), ((0, 0), (0, 1)))
"""|1><0| and |1><1|."""
PROJECTORS = (((1, 0), (0, 0)), ((0, 0), (0, 1)))
"""What a measurement does to the state, for the outcomes 0 and 1."""


def _flip(matrix: Sequence[Sequence[complex]]) -> Callable[[Tensor], Kraus]:
    def kraus(values: Tensor) -> Kraus:
        p = values[..., 0]
        return torch.stack([1 - p, p], -1), constant(values, _I, matrix)

    return kraus


def _depolarizing(values: Tensor) -> Kraus:
    p = values[..., 0]
    return torch.stack([1 - p, p / 3, p / 3, p / 3], -1), constant(values, _I, _X, _Y, _Z)


def _fading(values: Tensor, first: int) -> Tensor:
    """diag(1, √(1 - γ)), or with `first` = 0 diag(√(1 - γ), 1)."""
    left = 1 - values[..., 0]
    # At 0 the root has no finite derivative; it is asked for only where γ is a number.
    root = left.where(left > 0, 1).sqrt().where(left > 0, 0)
    pair = (torch.ones_like(root), root) if first else (root, torch.ones_like(root))
    return torch.diag_embed(torch.stack(pair, -1)).to(constant(values, _I).dtype)


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
    return weights, constant(values, _I, *TO_ZERO, *_TO_ONE)


def _thermal_relaxation(values: Tensor) -> Kraus:
    """Generalized amplitude damping, then the dephasing that is left to T2.

    Populations decay by exp(-t/T1) and coherences by exp(-t/T2), of which damping alone gives
    exp(-t/2T1). The same channel for T2 up to 2 T1.
    """
    excited, t1, t2, time = values.unbind(-1)
    gamma = -torch.expm1(-time / t1)
    flip = (1 - (time / (2 * t1) - time / t2).exp()) / 2
    weights, matrices = _generalized_amplitude_damping(torch.stack([gamma, excited], -1))
    phases, turning = _flip(_Z)(flip[..., None])
    both = (turning[..., :, None, :, :] @ matrices[..., None, :, :, :]).flatten(-4, -3)
    return (phases[..., :, None] * weights[..., None, :]).flatten(-2), both


_SHARE = (0.0, 1.0)
TIME = (0.0, float("inf"))

CHANNELS: Mapping[str, ChannelKind] = MappingProxyType(
    {
        "BitFlip": ChannelKind(("p",), (_SHARE,), _flip(_X)),
        "PhaseFlip": ChannelKind(("p",), (_SHARE,), _flip(_Z)),
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
PAULI_KIND = ChannelKind(("p",), (_SHARE,), _flip(_X))
"""The values of a `PauliError`; its operators depend on its letters."""
PAULIS: Mapping[str, Sequence[Sequence[complex]]] = MappingProxyType(
    {"I": _I, "X": _X, "Y": _Y, "Z": _Z}
)
"""Matrix of each letter."""
