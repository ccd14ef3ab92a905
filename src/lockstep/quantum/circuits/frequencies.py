"""How expectation values depend on single parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.angles import Angle
from lockstep.quantum.circuits.circuit import Circuit, Gate
from lockstep.quantum.circuits.gates import shift_rule

_TWO_TERMS = 2


def frequencies(circuit: Circuit, only: Sequence[int] | None = None) -> Tensor:
    """The frequency of expectation values, as sinusoids of each parameter.

    Args:
        circuit: circuit.
        only: numbers of the parameters; all by default.

    Returns:
        Frequencies, above 0, float64, one for each parameter asked for. A parameter without gates
        has 1.

    Raises:
        ConfigError: a parameter has several: it is used by several gates, by a controlled rotation,
            or in a formula.
    """
    users: dict[int, list[Gate]] = {}
    for gate in circuit.with_angle:
        for number in gate.angle.parameters if gate.angle is not None else ():
            users.setdefault(number, []).append(gate)
    numbers = range(circuit.num_parameters) if only is None else only
    return torch.tensor([_frequency(n, users.get(n, [])) for n in numbers], dtype=torch.float64)


def _frequency(number: int, users: Sequence[Gate]) -> float:
    if not users:
        return 1.0
    gate = users[0]
    if len(users) > 1:
        problem = f"is used by {len(users)} gates"
    elif not isinstance(gate.angle, Angle):
        problem = f"is part of the formula {gate.angle}"
    elif len(shift_rule(gate.kind, bool(gate.controls))) > _TWO_TERMS:
        problem = f"is used by a controlled {gate.name}"
    else:
        return abs(float(gate.angle.scale)) or 1.0
    raise ConfigError(
        f"parameter {number} {problem}: expectation values are no sinusoid of one frequency in it"
    )
