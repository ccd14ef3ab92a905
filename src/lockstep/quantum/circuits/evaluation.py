"""The values of many angles at once, differentiable: those of one form are computed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lockstep.quantum.circuits.angles import Angle, AnyAngle

Form = tuple[object, ...]
"""An expression without its numbers: an operation and the forms of its operands, or a leaf."""

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
        places = sorted(range(len(order)), key=order.__getitem__)
        self._places = None if len(groups) < 2 else torch.tensor(places)

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
        if self._places is None:
            return columns[0]
        return torch.cat(columns, -1).index_select(-1, self._places.to(parameters.device))


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
        # A number is a number whatever the first parameter is: 0 · NaN would be NaN.
        chosen = chosen.masked_fill(self.is_number.to(parameters.device), 0)
        return chosen * self.scale.to(parameters) + self.offset.to(parameters)


def _form(angle: AnyAngle) -> Form:
    if isinstance(angle, Angle):
        return _NUMBER if angle.index is None else _LINEAR
    return (angle.operation, *map(_form, angle.operands))


def _leaves(angles: Sequence[AnyAngle]) -> list[_Leaves]:
    """The leaves of angles of one form, in the order in which `_value` asks for them."""
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
