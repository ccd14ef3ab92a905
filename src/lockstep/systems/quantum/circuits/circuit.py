"""Circuits as data: gates on qubits, their angles numbers or functions of parameters.

Qubit 0 is the least significant bit of an amplitude's index, as in Qiskit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import (
    Angle,
    AnyAngle,
    Expression,
    Formula,
    as_angle,
    as_integer,
    kind_of,
)
from lockstep.systems.quantum.circuits.gates import KINDS, UNITARY, Evaluation, Kind

MAX_QUBITS = 62
"""Most qubits of a circuit: the index of an amplitude is an integer of 64 bits."""
_UNITARY_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Gate:
    """One gate.

    Attributes:
        name: name of the gate, a key of `gates.KINDS` or `unitary`.
        qubits: qubits it acts on; the first is the low bit of its matrix.
        angle: angle of the gate; None if its kind has none.
        controls: control qubits: the gate acts only where they are as `control_state` says.
        control_state: for each control, the value 0 or 1 that it must have.
        matrix: matrix of a `unitary`, [2^qubits, 2^qubits], complex128; None for other gates.
    """

    name: str
    qubits: tuple[int, ...]
    angle: AnyAngle | None = None
    controls: tuple[int, ...] = ()
    control_state: tuple[int, ...] = ()
    matrix: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the gate.

        Raises:
            ConfigError: there is no such gate, or its qubits, angle or matrix do not fit it.
        """
        for name in ("qubits", "controls", "control_state"):
            object.__setattr__(self, name, _integers(getattr(self, name), f"{self.name}: {name}"))
        if not self.control_state:
            object.__setattr__(self, "control_state", (1,) * len(self.controls))
        where = f"gate {self.name} on {', '.join(map(str, self.every_qubit)) or 'nothing'}"
        if self.name != UNITARY and self.name not in KINDS:
            raise ConfigError(f"{where}: not supported (there are: {', '.join(KINDS)}, {UNITARY})")
        if not self.qubits:
            raise ConfigError(f"{where}: needs at least one qubit beside controls")
        if not isinstance(self.angle, (Angle, Expression, type(None))):
            raise ConfigError(f"{where}: its angle must be an Angle, not {self.angle!r}")
        if (self.matrix is not None) != (self.name == UNITARY):
            raise ConfigError(f"{where}: {UNITARY}, and no other, is given by a matrix")
        if len(set(self.every_qubit)) < len(self.every_qubit) or min(self.every_qubit) < 0:
            raise ConfigError(f"{where}: its qubits must be different, and not negative")
        if len(self.control_state) != len(self.controls) or set(self.control_state) - {0, 1}:
            raise ConfigError(f"{where}: control_state must have one bit for each control")
        if self.matrix is not None:
            _check_matrix(self.matrix, where)
        if len(self.qubits) != self.kind.num_targets:
            raise ConfigError(f"{where}: needs {self.kind.num_targets} qubits beside controls")
        if (self.angle is not None) != self.kind.has_angle:
            needed = "an angle" if self.kind.has_angle else "no angle"
            raise ConfigError(f"{where}: needs {needed}")

    @cached_property
    def kind(self) -> Kind:
        """The kind of the gate: its matrix, as a function of its angle."""
        if self.matrix is None:
            return KINDS[self.name]
        return Kind(len(self.matrix).bit_length() - 1, self.matrix)

    @property
    def every_qubit(self) -> tuple[int, ...]:
        """Controls, then the qubits it acts on."""
        return (*self.controls, *self.qubits)

    @property
    def parameters(self) -> tuple[int, ...]:
        """Numbers of the parameters that its angle depends on, ascending."""
        return () if self.angle is None else self.angle.parameters

    def controlled(self, *controls: int, state: Sequence[int] | None = None) -> Gate:
        """The gate with further controls, before those it has.

        Args:
            controls: qubits that control the gate.
            state: for each of them, the value 0 or 1 that it must have; all 1 by default.

        Raises:
            ConfigError: a qubit is used twice, or the state does not fit the controls.
        """
        bits = (1,) * len(controls) if state is None else tuple(state)
        return replace(
            self,
            controls=(*controls, *self.controls),
            control_state=(*bits, *self.control_state),
        )

    def inverse(self) -> Gate:
        """The gate that undoes this one."""
        if self.angle is not None:
            return replace(self, angle=as_angle(-self.angle))
        return replace(self, name=UNITARY, matrix=self.kind.constant.mH.contiguous())


def gate(name: str, *qubits: int, angle: Formula | float | None = None) -> Gate:
    """A gate by name; `cx`, `ccz`, `crx`, … are gates with leading c's for controls.

    Args:
        name: a key of `gates.KINDS`, with a leading c for each control.
        qubits: the controls, then the qubits that the gate acts on, low bit first.
        angle: angle in radians, a number, a `parameter` or a formula of some, for gates that have
            one.

    Raises:
        ConfigError: there is no such gate, or its qubits or angle do not fit it.
    """
    base = name
    if not isinstance(name, str):
        raise ConfigError(f"gate {name!r}: its name must be a string")
    while base not in KINDS and base.startswith("c"):
        base = base[1:]
    count = len(name) - len(base)
    if angle is not None and not isinstance(angle, (Real, Formula)):
        raise ConfigError(
            f"gate {name}: its angle must be a number or a `parameter`, not {angle!r}"
        )
    own = None if angle is None else as_angle(angle)
    return Gate(base, qubits[count:], own, qubits[:count])


def unitary(matrix: Tensor, *qubits: int) -> Gate:
    """A gate given by its matrix.

    Args:
        matrix: unitary matrix [2^k, 2^k], real or complex.
        qubits: the k qubits it acts on; the first is the low bit of the matrix.

    Raises:
        ConfigError: the matrix is not unitary, or does not fit the qubits.
    """
    if not isinstance(matrix, Tensor):
        raise ConfigError(f"a unitary's matrix must be a torch.Tensor, not {kind_of(matrix)}")
    return Gate(UNITARY, qubits, matrix=matrix.to(torch.complex128))


@dataclass(frozen=True, eq=False)
class Circuit:
    """A sequence of gates on `num_qubits` qubits, which start as |0…0>.

    Attributes:
        num_qubits: number of qubits, from 1 to `MAX_QUBITS`.
        gates: the gates in the order in which they act.
        num_parameters: number of parameters that angles may depend on; by default, the highest
            index used plus one.
    """

    num_qubits: int
    gates: tuple[Gate, ...]
    num_parameters: int = field(default=-1)

    def __init__(
        self, num_qubits: int, gates: Iterable[Gate], num_parameters: int | None = None
    ) -> None:
        """Check and keep the gates.

        Raises:
            ConfigError: a gate acts on a qubit, or an angle depends on a parameter, that the
                circuit does not have.
        """
        num_qubits = check_num_qubits(num_qubits)
        given = tuple(gates) if isinstance(gates, Iterable) else (gates,)
        for number, each in enumerate(given):
            if not isinstance(each, Gate):
                raise ConfigError(f"gate {number}: must be a Gate, not {kind_of(each)}")
        if num_parameters is not None and as_integer(num_parameters, "num_parameters") < 0:
            raise ConfigError(f"num_parameters {num_parameters}: must not be negative")
        least = max((i for each in given for i in each.parameters), default=-1) + 1
        count = least if num_parameters is None else num_parameters
        for number, each in enumerate(given):
            if max(each.every_qubit) >= num_qubits:
                raise ConfigError(
                    f"gate {number} ({each.name}): qubit {max(each.every_qubit)} in a circuit of "
                    f"{num_qubits} qubits"
                )
        if least > count:
            raise ConfigError(f"parameter {least - 1} in a circuit of {count} parameters")
        object.__setattr__(self, "num_qubits", num_qubits)
        object.__setattr__(self, "gates", given)
        object.__setattr__(self, "num_parameters", count)

    @cached_property
    def with_angle(self) -> tuple[Gate, ...]:
        """The gates that have an angle, in order."""
        return tuple(g for g in self.gates if g.angle is not None)

    def angles(self, parameters: Tensor) -> Tensor:
        """The angles of all gates that have one.

        Args:
            parameters: real tensor [..., num_parameters].

        Returns:
            Angles in radians, [..., len(with_angle)].

        Raises:
            ConfigError: the parameters are not such a tensor.
        """
        return self._evaluation(self.check_parameters(parameters))

    def check_parameters(self, parameters: Tensor | None) -> Tensor:
        """The parameters [..., num_parameters]; None stands for those of a circuit that has none.

        Raises:
            ConfigError: they are not such a real tensor.
        """
        if parameters is None:
            if self.num_parameters:
                raise ConfigError(f"the circuit needs {self.num_parameters} parameters")
            return torch.zeros(0)
        if not isinstance(parameters, Tensor) or parameters.is_complex() or not parameters.dim():
            raise ConfigError(
                f"parameters must be a real tensor [..., num_parameters], not {kind_of(parameters)}"
            )
        if parameters.shape[-1] != self.num_parameters:
            raise ConfigError(
                f"{parameters.shape[-1]} parameters for a circuit of {self.num_parameters}"
            )
        return parameters

    @cached_property
    def _evaluation(self) -> Evaluation:
        return Evaluation([g.angle for g in self.with_angle if g.angle is not None])

    def inverse(self) -> Circuit:
        """The circuit that undoes this one."""
        undone = (g.inverse() for g in reversed(self.gates))
        return Circuit(self.num_qubits, undone, self.num_parameters)


def check_num_qubits(num_qubits: int) -> int:
    """A number of qubits as an int.

    Raises:
        ConfigError: it is not an integer from 1 to `MAX_QUBITS`.
    """
    count = as_integer(num_qubits, "num_qubits")
    if not 1 <= count <= MAX_QUBITS:
        raise ConfigError(f"{count} qubits: a circuit has from 1 to {MAX_QUBITS}")
    return count


def _integers(values: object, name: str) -> tuple[int, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ConfigError(f"{name} must be integers, not {values!r}")
    return tuple(as_integer(value, name) for value in values)


def _check_matrix(matrix: Tensor, where: str) -> None:
    size = len(matrix) if matrix.dim() else 0
    if matrix.shape != (size, size) or size < 2 or size & (size - 1):
        raise ConfigError(
            f"{where}: its matrix must be [2^k, 2^k] for k qubits, not {list(matrix.shape)}"
        )
    gap = (matrix @ matrix.mH - torch.eye(size, device=matrix.device)).abs().max()
    if not gap < _UNITARY_TOLERANCE:
        raise ConfigError(f"{where}: its matrix is not unitary (off by {gap:.1e})")
