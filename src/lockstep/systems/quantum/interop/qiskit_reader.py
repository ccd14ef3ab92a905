"""Circuits from Qiskit: each instruction as known gates, or expanded by its definition.

An instruction is recognised by its class, never by its name, which users can choose.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np
import torch

from lockstep.errors import ConfigError, needing
from lockstep.systems.quantum.circuits.angles import (
    FUNCTIONS,
    Angle,
    AnyAngle,
    Formula,
    as_angle,
    function,
    parameter,
)
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, check_num_qubits, gate, unitary
from lockstep.systems.quantum.circuits.gates import KINDS, UNITARY

_OF_SYMPY = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "Abs": "abs"}
"""Functions whose names in SymPy are others than in `FUNCTIONS`."""


def read_angle(value: Any, numbers: Mapping[Any, int], name: str) -> AnyAngle:
    """An angle from a number or a `ParameterExpression` of Qiskit.

    Args:
        value: the number, or the expression.
        numbers: number of each parameter of the circuit.
        name: name of the gate, for errors.

    Raises:
        ConfigError: the value is not real, or holds a function that is not supported.
    """
    if value in numbers:
        return parameter(numbers[value])
    parameters = getattr(value, "parameters", ())
    try:
        if not parameters:
            return Angle(float(value))
        by_name = {p.name: numbers[p] for p in parameters}
        return _from_sympy(value.sympify(), by_name)
    except (TypeError, ValueError, ArithmeticError, RecursionError, ConfigError) as error:
        text = " ".join(str(value).split())[:200]
        raise ConfigError(f"gate {name}: angle {text} is not supported ({error})") from error


def _from_sympy(node: Any, numbers: Mapping[str, int]) -> AnyAngle:
    if getattr(node, "is_Symbol", False):
        return parameter(numbers[node.name])
    if getattr(node, "is_number", False):
        return Angle(float(node))  # a TypeError where it is not real
    kind = type(node).__name__
    operands = [_from_sympy(part, numbers) for part in getattr(node, "args", ())]
    if kind == "conjugate":  # of a real number
        return operands[0]
    known = _OF_SYMPY.get(kind, kind)
    if known in FUNCTIONS:
        return function(known, operands[0])
    combine = {"Add": operator.add, "Mul": operator.mul, "Pow": operator.pow}.get(kind)
    if combine is None:
        raise ConfigError(f"known are sums, products, powers, {', '.join(FUNCTIONS)}")
    combined: Formula = reduce(combine, operands)
    return as_angle(combined)


def written_angle(angle: AnyAngle, vector: Sequence[Any]) -> Any:
    """An angle as a number, or as a `ParameterExpression` of Qiskit.

    Args:
        angle: angle to write.
        vector: Qiskit's parameters, by number.

    Raises:
        ConfigError: it has a power of a negative number, which Qiskit has not.
    """
    if isinstance(angle, Angle):
        if angle.index is None:
            return angle.offset
        return angle.scale * vector[angle.index] + angle.offset
    values = [written_angle(operand, vector) for operand in angle.operands]
    if angle.operation == "add":
        return reduce(operator.add, values)
    if angle.operation == "mul":
        return reduce(operator.mul, values)
    if angle.operation == "pow":
        base, exponent = values
        if not isinstance(base, (int, float)):
            return base**exponent
        if base <= 0:
            raise ConfigError(f"angle {angle}: Qiskit has no powers of {base}")
        return (exponent * math.log(base)).exp()
    return getattr(values[0], angle.operation)()


_MOST_INSTRUCTIONS = 1_000_000
"""Most instructions of a circuit, after all definitions have been expanded."""
_WIDEST_MATRIX = 10
"""Most qubits of an instruction that has a matrix but no definition."""


def from_qiskit(source: Any) -> Circuit:
    """A circuit from a `qiskit.QuantumCircuit`; final measurements are left out.

    Parameters are numbered as in `source.parameters`. Gates that are not known are expanded by
    their definition. The global phase is kept.

    Args:
        source: a `qiskit.QuantumCircuit` of at least one qubit.

    Raises:
        ConfigError: Qiskit is not installed, `source` is no circuit of it, a gate has no definition
            in known ones (named), an angle holds a function that is not supported, or there is a
            measurement in the middle.
    """
    return read(source, parameters_of(source))


def parameters_of(source: Any) -> list[Any]:
    """The parameters of a `qiskit.QuantumCircuit`, in Qiskit's order.

    Raises:
        ConfigError: Qiskit is not installed, or `source` is not a circuit of it.
    """
    if not isinstance(source, import_qiskit().QuantumCircuit):
        raise ConfigError(f"must be a qiskit.QuantumCircuit, not {type(source).__name__}")
    return list(source.parameters)


def read(source: Any, parameters: Sequence[Any]) -> Circuit:
    """As `from_qiskit`, with the circuit's parameters in the order of their numbers."""
    check_num_qubits(source.num_qubits)
    gates = Reader(parameters).gates(source, range(source.num_qubits))
    return Circuit(source.num_qubits, gates, len(parameters))


def import_qiskit() -> Any:
    """The module `qiskit`.

    Raises:
        ConfigError: it is not installed.
    """
    with needing("quantum", "circuits of other libraries need Qiskit"):
        import qiskit
        import qiskit.circuit
        import qiskit.qasm2
    return qiskit


@cache
def gate_classes() -> dict[str, Any]:
    """Qiskit's class for each name in `gates.KINDS`."""
    from qiskit.circuit.library import get_standard_gate_name_mapping

    gates = get_standard_gate_name_mapping()
    return {name: gates[name].base_class for name in KINDS}


class Reader:
    """Reads the instructions of one circuit.

    Args:
        parameters: Qiskit's parameters, in the order of their numbers.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        from qiskit.circuit import library

        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._measured: set[int] = set()
        self._num_read = 0
        self._known = {kind: name for name, kind in gate_classes().items()}
        self._library = library

    def gates(self, source: Any, qubits: Sequence[int]) -> Iterator[Gate]:
        """The gates of a Qiskit circuit whose qubits are `qubits` here."""
        from qiskit.circuit import Barrier, Delay, Measure

        if qubits:
            angle = self._angle(source.global_phase, "global phase")
            if angle != Angle(0.0):
                yield from phase(angle, qubits[0])
        for instruction in source.data:
            operation = instruction.operation
            self._count(operation)
            inner_qubits = [qubits[source.find_bit(q).index] for q in instruction.qubits]
            if isinstance(operation, Measure):
                self._measured.update(inner_qubits)
            elif isinstance(operation, (Barrier, Delay)):
                continue
            elif inner_qubits:
                for part in self._operation(operation, inner_qubits):
                    self._check_measured(part, operation)
                    yield part
            elif qubits:
                for angle in self._phases(operation):
                    yield from phase(angle, qubits[0])

    def _operation(self, operation: Any, qubits: Sequence[int]) -> Iterator[Gate]:
        from qiskit.circuit import AnnotatedOperation, ControlledGate

        kind, library = getattr(operation, "base_class", type(operation)), self._library
        if getattr(operation, "condition", None) is not None:
            raise ConfigError(f"gate {operation.name}: conditions are not supported")
        if isinstance(operation, AnnotatedOperation):
            yield from self._annotated(operation, qubits)
        elif isinstance(operation, ControlledGate):
            bits = [operation.ctrl_state >> i & 1 for i in range(operation.num_ctrl_qubits)]
            yield from self._controlled(operation.base_gate, qubits, bits)
            if isinstance(operation.base_gate, library.UGate) and len(operation.params) == 4:
                # The phase γ of `cu`, which its base gate does not have.
                yield from _phase_of_controls(
                    self._angle(operation.params[3], operation.name), qubits[: len(bits)], bits
                )
        elif kind in self._known:
            params = operation.params
            angle = self._angle(params[0], operation.name) if params else None
            yield Gate(self._known[kind], tuple(qubits), angle)
        elif kind in (library.UGate, library.U3Gate):
            theta, phi, lam = (self._angle(p, operation.name) for p in operation.params[:3])
            yield gate("p", *qubits, angle=lam)
            yield gate("ry", *qubits, angle=theta)
            yield gate("p", *qubits, angle=phi)
        elif kind is library.U1Gate:
            yield gate("p", *qubits, angle=self._angle(operation.params[0], operation.name))
        elif kind is library.UnitaryGate:
            yield unitary(torch.from_numpy(np.array(operation.params[0])), *qubits)
        elif kind is library.PermutationGate:
            yield from _permutation(operation.pattern, qubits)
        else:
            yield from self._defined(operation, qubits)

    def _defined(self, operation: Any, qubits: Sequence[int]) -> Iterator[Gate]:
        """The gates of an instruction's definition, or else its matrix."""
        definition = getattr(operation, "definition", None)
        if definition is None and hasattr(operation, "to_circuit"):  # a Clifford is not a gate
            definition = operation.to_circuit()
        if definition is not None:
            yield from self.gates(definition, qubits)
        elif hasattr(operation, "__array__") and len(qubits) <= _WIDEST_MATRIX:
            yield unitary(torch.from_numpy(np.array(operation, dtype=np.complex128)), *qubits)
        else:
            raise ConfigError(
                f"gate {operation.name}: not supported, and not defined by gates that are "
                f"({', '.join(KINDS)}, u, {UNITARY}, and these with controls)"
            )

    def _controlled(self, base: Any, qubits: Sequence[int], bits: Sequence[int]) -> Iterator[Gate]:
        """An instruction under as many controls as there are bits, which come first."""
        controls, targets = qubits[: len(bits)], qubits[len(bits) :]
        if targets:
            for part in self._operation(base, targets):
                yield part.controlled(*controls, state=bits)
        else:
            for angle in self._phases(base):
                yield from _phase_of_controls(angle, controls, bits)

    def _annotated(self, operation: Any, qubits: Sequence[int]) -> Iterator[Gate]:
        """A base gate, and modifiers of which the last one is the outermost."""
        from qiskit.circuit import AnnotatedOperation, ControlModifier, InverseModifier

        *inner, modifier = operation.modifiers or [InverseModifier(), InverseModifier()]
        base = AnnotatedOperation(operation.base_op, inner) if inner else operation.base_op
        if isinstance(modifier, ControlModifier):
            bits = [modifier.ctrl_state >> i & 1 for i in range(modifier.num_ctrl_qubits)]
            yield from self._controlled(base, qubits, bits)
        elif isinstance(modifier, InverseModifier):
            yield from _inverse(self._operation(base, qubits))
        elif float(modifier.power).is_integer():
            for _ in range(abs(int(modifier.power))):
                self._count(operation)
                parts = self._operation(base, qubits)
                yield from _inverse(parts) if modifier.power < 0 else parts
        elif len(qubits) <= _WIDEST_MATRIX:
            yield unitary(torch.from_numpy(np.array(operation.to_matrix())), *qubits)
        else:
            raise ConfigError(f"gate {base.name}: a power of {modifier.power} on so many qubits")

    def _phases(self, operation: Any) -> Iterator[AnyAngle]:
        """The phases that an instruction on no qubits adds up."""
        if isinstance(operation, self._library.GlobalPhaseGate):
            yield self._angle(operation.params[0], operation.name)
            return
        definition = getattr(operation, "definition", None)
        if definition is None:
            raise ConfigError(f"gate {operation.name}: not supported on no qubits")
        yield self._angle(definition.global_phase, operation.name)
        for instruction in definition.data:
            self._count(operation)
            yield from self._phases(instruction.operation)

    def _angle(self, value: Any, name: str) -> AnyAngle:
        return read_angle(value, self._numbers, name)

    def _count(self, operation: Any) -> None:
        self._num_read += 1
        if self._num_read > _MOST_INSTRUCTIONS:
            raise ConfigError(
                f"gate {operation.name}: the circuit has more than {_MOST_INSTRUCTIONS:,} "
                "instructions when all definitions are expanded"
            )

    def _check_measured(self, part: Gate, operation: Any) -> None:
        late = self._measured.intersection(part.every_qubit)
        if late:
            raise ConfigError(
                f"a measurement in the middle: qubit {min(late)} is measured and then used by "
                f"{operation.name}; only measurements at the end are supported"
            )


def phase(angle: AnyAngle, qubit: int) -> Iterator[Gate]:
    """Gates on any qubit that give the whole state a phase."""
    for name in ("p", "x", "p", "x"):
        yield gate(name, qubit, angle=angle if name == "p" else None)


def _phase_of_controls(
    angle: AnyAngle, controls: Sequence[int], bits: Sequence[int]
) -> Iterator[Gate]:
    """A phase where all of these qubits are as their bits say."""
    *others, last = controls
    phase_gate = gate("p", last, angle=angle)
    flips = [] if bits[-1] else [gate("x", last)]
    yield from flips
    yield phase_gate.controlled(*others, state=bits[:-1]) if others else phase_gate
    yield from flips


def _inverse(gates: Iterable[Gate]) -> Iterator[Gate]:
    return (each.inverse() for each in reversed(list(gates)))


def _permutation(pattern: Iterable[int], qubits: Sequence[int]) -> Iterator[Gate]:
    """Swaps after which qubit i has the former state of qubit pattern[i]."""
    sources = [int(p) for p in pattern]
    for target, source in enumerate(sources):
        while source < target:  # an earlier swap has moved its state
            source = sources[source]
        if source != target:
            yield gate("swap", qubits[target], qubits[source])
