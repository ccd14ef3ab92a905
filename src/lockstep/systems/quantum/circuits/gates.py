"""The supported gates as matrices and functions of their angle.

A gate has no angle, or one: its matrix is constant + cos(s φ) · cosine + sin(s φ) · sine.
Controls are not part of a gate's kind: any gate can be controlled by any number of qubits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lockstep.systems.quantum.circuits.angles import Angle, AnyAngle

Matrix = Sequence[Sequence[complex]]

PAULIS: Mapping[str, Matrix] = MappingProxyType(
    {"I": ((1, 0), (0, 1)), "X": ((0, 1), (1, 0)), "Y": ((0, -1j), (1j, 0)), "Z": ((1, 0), (0, -1))}
)
"""The matrix of each letter of a Pauli string."""


@dataclass(frozen=True, eq=False)
class Kind:
    """The matrix of all gates of one name, as a function of their angle.

    Attributes:
        num_targets: number of qubits it acts on, without controls.
        constant: constant term, [2^targets, 2^targets], complex128; the whole matrix of a gate
            without angle.
        cosine: coefficient of cos(frequency · φ), of the same shape and dtype; None without an
            angle.
        sine: coefficient of sin(frequency · φ), of the same shape and dtype; None without an angle.
        frequency: the factor s of the angle φ; 0 without an angle.
    """

    num_targets: int
    constant: Tensor
    cosine: Tensor | None = None
    sine: Tensor | None = None
    frequency: float = 0.0

    @property
    def has_angle(self) -> bool:
        """Whether its matrix depends on an angle."""
        return self.cosine is not None

    def matrices(self, angles: Tensor, dtype: torch.dtype = torch.complex128) -> Tensor:
        """The matrices [..., 2^targets, 2^targets] at some angles, of a gate that has one.

        Args:
            angles: angles in radians, real, [...].
            dtype: dtype of the terms, complex64 or complex128.
        """
        assert self.cosine is not None
        assert self.sine is not None
        terms = (self.constant, self.cosine, self.sine)
        constant, cosine, sine = (term.to(angles.device, dtype) for term in terms)
        phase = (angles * self.frequency)[..., None, None]
        return constant + phase.cos() * cosine + phase.sin() * sine


def _tensor(matrix: Any) -> Tensor:
    return torch.tensor(matrix, dtype=torch.complex128)


def _fixed(matrix: Matrix) -> Kind:
    return Kind(len(matrix).bit_length() - 1, _tensor(matrix))


def pauli_matrix(string: str) -> Tensor:
    """The matrix [2^n, 2^n], complex128, of a Pauli string whose last letter is for the low bit."""
    one = torch.ones(1, 1, dtype=torch.complex128)
    return reduce(torch.kron, (_tensor(PAULIS[letter]) for letter in string), one)


def _rotation(string: str) -> Kind:
    """exp(-i φ/2 P) = cos(φ/2) - i sin(φ/2) P."""
    pauli = pauli_matrix(string)
    identity = torch.eye(len(pauli), dtype=torch.complex128)
    return Kind(len(string), torch.zeros_like(identity), identity, -1j * pauli, 0.5)


_R = math.sqrt(0.5)
_T = complex(_R, _R)
_SX: Matrix = ((0.5 + 0.5j, 0.5 - 0.5j), (0.5 - 0.5j, 0.5 + 0.5j))
_SXDG: Matrix = ((0.5 - 0.5j, 0.5 + 0.5j), (0.5 + 0.5j, 0.5 - 0.5j))

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "id": _fixed(PAULIS["I"]),
        "x": _fixed(PAULIS["X"]),
        "y": _fixed(PAULIS["Y"]),
        "z": _fixed(PAULIS["Z"]),
        "h": _fixed(((_R, _R), (_R, -_R))),
        "s": _fixed(((1, 0), (0, 1j))),
        "sdg": _fixed(((1, 0), (0, -1j))),
        "t": _fixed(((1, 0), (0, _T))),
        "tdg": _fixed(((1, 0), (0, _T.conjugate()))),
        "sx": _fixed(_SX),
        "sxdg": _fixed(_SXDG),
        "swap": _fixed(((1, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (0, 0, 0, 1))),
        **{f"r{string.lower()}": _rotation(string) for string in ("X", "Y", "Z", "XX", "YY", "ZZ")},
        "p": Kind(
            1,
            _tensor(((1, 0), (0, 0))),
            _tensor(((0, 0), (0, 1))),
            _tensor(((0, 0), (0, 1j))),
            1.0,
        ),
    }
)
"""Name to kind. The names are Qiskit's; matrices of two qubits have the first one as low bit."""

UNITARY = "unitary"
"""The name of a gate that is given by its matrix."""


def with_controls(matrix: Tensor, values: Sequence[int]) -> Tensor:
    """A matrix that acts only where further bits, above its own, have these values.

    Args:
        matrix: complex matrix [..., K, K].
        values: value 0 or 1 of each of c further bits, low bit first.

    Returns:
        Matrix [..., 2^c K, 2^c K].
    """
    for value in values:
        size = matrix.shape[-1]
        identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        zero = torch.zeros_like(matrix)
        low, high = (identity, matrix) if value else (matrix, identity)
        top, bottom = torch.cat([low, zero], -1), torch.cat([zero, high], -1)
        matrix = torch.cat([top, bottom], -2)
    return matrix


def act(matrix: Tensor, product: Tensor, bits: Sequence[int]) -> Tensor:
    """The product of a matrix, which acts on some bits of the row number, and another matrix.

    Args:
        matrix: complex matrix [..., 2^m, 2^m].
        product: complex matrix [..., K, K] to multiply it with.
        bits: the m bits of the row number, low bit first.

    Returns:
        Matrix [..., K, K].
    """
    *lead, size, columns = product.shape
    num_bits = size.bit_length() - 1
    if len(bits) == 1:
        rows = (size >> (bits[0] + 1), 2, columns << bits[0])
        after = matrix.unsqueeze(-3) @ product.reshape(*lead, *rows)
        return after.reshape(*after.shape[:-3], size, columns)
    axes = [len(lead) + num_bits - 1 - bit for bit in reversed(bits)]
    front = list(range(len(lead), len(lead) + len(bits)))
    moved = product.reshape(*lead, *(2,) * num_bits, columns).movedim(axes, front)
    after = matrix @ moved.reshape(*lead, 1 << len(bits), columns * size >> len(bits))
    lead = list(after.shape[:-2])
    after = after.reshape(*lead, *(2,) * num_bits, columns).movedim(front, axes)
    return after.reshape(*lead, size, columns)


def shift_rule(kind: Kind, controlled: bool) -> list[tuple[float, float]]:
    """The terms (coefficient, shift in radians) of d f/dφ = Σ coefficient · f(φ + shift).

    Here f is a probability, or an expectation value, as a function of the gate's angle φ.

    Two terms where f has one frequency (Mitarai et al., Phys. Rev. A 98, 032309 (2018)), four for
    controlled rotations, which have 1/2 and 1 (Anselmetti et al., New J. Phys. 23, 113010 (2021)).

    Args:
        kind: kind of a gate with an angle.
        controlled: whether the gate has controls.
    """
    quarter = math.pi / 2
    if not controlled or kind.frequency == 1.0:
        return [(0.5, quarter), (-0.5, -quarter)]
    plus, minus = ((math.sqrt(2) + sign) / (4 * math.sqrt(2)) for sign in (1, -1))
    return [(plus, quarter), (-plus, -quarter), (-minus, 3 * quarter), (minus, -3 * quarter)]


Form = tuple[object, ...]
"""The structure of an expression: an operation and the forms of its operands, or a leaf."""

_NUMBER: Form = ("number",)
_LINEAR: Form = ("linear",)


class Evaluation:
    """Computes angles from parameters.

    Args:
        angles: angles of all gates that have one, in order.
    """

    def __init__(self, angles: Sequence[AnyAngle]) -> None:
        groups: dict[Form, list[int]] = {}
        forms = [_form(angle) for angle in angles]
        if set(forms) <= {_NUMBER, _LINEAR}:
            forms = [_LINEAR] * len(forms)
        for number, form in enumerate(forms):
            groups.setdefault(form, []).append(number)
        self._groups = [
            (form, _leaves([angles[m] for m in members])) for form, members in groups.items()
        ]
        order = [m for members in groups.values() for m in members]
        columns = sorted(range(len(order)), key=order.__getitem__)
        self._columns = None if len(groups) < 2 else torch.tensor(columns)

    def __call__(self, parameters: Tensor) -> Tensor:
        """The angles [..., G] in radians, from parameters [..., num_parameters]."""
        if not self._groups:
            return parameters[..., :0]
        if not parameters.shape[-1]:
            parameters = parameters.new_zeros(*parameters.shape[:-1], 1)
        lead = parameters.shape[:-1]
        columns = [
            _value(form, iter(leaves), parameters).expand(*lead, -1)
            for form, leaves in self._groups
        ]
        if self._columns is None:
            return columns[0]
        return torch.cat(columns, -1).index_select(-1, self._columns.to(parameters.device))


class _Leaves:
    """The angles at one leaf of a form."""

    def __init__(self, angles: Sequence[Angle]) -> None:
        float64 = torch.float64
        self.index = torch.tensor([a.index or 0 for a in angles], dtype=torch.int64)
        self.is_number = torch.tensor([a.index is None for a in angles])
        self.scale = torch.tensor([a.scale for a in angles], dtype=float64)
        self.offset = torch.tensor([a.offset for a in angles], dtype=float64)

    def linear(self, parameters: Tensor) -> Tensor:
        chosen = parameters.index_select(-1, self.index.to(parameters.device))
        # Numbers must not depend on parameter 0, even if it is NaN: 0 · NaN is NaN.
        chosen = chosen.masked_fill(self.is_number.to(parameters.device), 0)
        return chosen * self.scale.to(parameters) + self.offset.to(parameters)


def _form(angle: AnyAngle) -> Form:
    if isinstance(angle, Angle):
        return _NUMBER if angle.index is None else _LINEAR
    return (angle.operation, *map(_form, angle.operands))


def _leaves(angles: Sequence[AnyAngle]) -> list[_Leaves]:
    """The leaves of angles of one form, in the order in which `_value` needs them."""
    every = zip(*map(_angles_in, angles), strict=True)
    return [_Leaves(leaf) for leaf in every]


def _angles_in(angle: AnyAngle) -> Iterator[Angle]:
    if isinstance(angle, Angle):
        yield angle
    else:
        for operand in angle.operands:
            yield from _angles_in(operand)


def _value(form: Form, leaves: Iterator[_Leaves], parameters: Tensor) -> Tensor:
    """The values [..., members] or [members] of all angles of a form."""
    if form == _LINEAR:
        return next(leaves).linear(parameters)
    if form == _NUMBER:
        return next(leaves).offset.to(parameters)
    operation, *operands = form
    values = [_value(o, leaves, parameters) for o in operands if isinstance(o, tuple)]
    if len(values) == 1:
        single: Tensor = getattr(torch, str(operation))(values[0])
        return single
    total, binary = values[0], getattr(torch, str(operation))
    for value in values[1:]:
        total = binary(total, value)
    return total
