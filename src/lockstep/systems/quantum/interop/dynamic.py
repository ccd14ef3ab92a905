"""Circuits with measurements in the middle, from and to Qiskit and OpenQASM 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import kind_of
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, check_num_qubits
from lockstep.systems.quantum.interop.qasm import (
    expanded,
    expanded_gate,
    header,
    line,
    qiskit_gate,
    reading,
)
from lockstep.systems.quantum.interop.qiskit_reader import Reader, import_qiskit, parameters_of
from lockstep.systems.quantum.noise.channels import Channel, qubit_channel
from lockstep.systems.quantum.noise.circuit import DynamicCircuit, If, Measure, Operation, Reset


def dynamic_from_qiskit(source: Any) -> DynamicCircuit:
    """A circuit with measurements, resets, `if_test`, `c_if` and Kraus channels from Qiskit.

    Gates are read as by `from_qiskit`; parameters are numbered as in `source.parameters`. Global
    phases are left out, since no measurement sees them.

    Args:
        source: a `qiskit.QuantumCircuit` of at least one qubit.

    Raises:
        ConfigError: as `from_qiskit`; or there is a loop, a switch or another instruction that is
            not supported (named), or a condition that does not compare bits with a value.
    """
    return _read(source, parameters_of(source))


def dynamic_from_qasm(text: str) -> DynamicCircuit:
    """A circuit with measurements, resets and conditions from OpenQASM 2 or 3.

    The parameters of version 3 are numbered in the order in which the text declares them.

    Args:
        text: program in OpenQASM.

    Raises:
        ConfigError: the text cannot be read, or as `dynamic_from_qiskit`.
    """
    return reading(text, _read)


def _read(source: Any, parameters: Sequence[Any]) -> DynamicCircuit:
    check_num_qubits(source.num_qubits)
    reader = _DynamicReader(parameters)
    operations = reader.operations(source, range(source.num_qubits), range(source.num_clbits))
    return DynamicCircuit(source.num_qubits, operations, source.num_clbits, len(parameters))


class _DynamicReader(Reader):
    def operations(
        self, source: Any, qubits: Sequence[int], bits: Sequence[int]
    ) -> Iterator[Operation]:
        """The operations of a Qiskit circuit whose qubits and bits are `qubits` and `bits` here."""

        def bit_of(clbit: Any) -> int:
            index: int = source.find_bit(clbit).index
            return bits[index]

        for instruction in source.data:
            self._count(instruction.operation)
            own_qubits = [qubits[source.find_bit(q).index] for q in instruction.qubits]
            own_bits = [bit_of(c) for c in instruction.clbits]
            yield from self._dynamic(instruction.operation, own_qubits, own_bits, bit_of)

    def _dynamic(
        self,
        operation: Any,
        qubits: Sequence[int],
        bits: Sequence[int],
        bit_of: Callable[[Any], int],
    ) -> Iterator[Operation]:
        """The operations of an instruction, which before Qiskit 2 may have a condition (`c_if`)."""
        from qiskit import circuit as kinds

        condition = getattr(operation, "condition", None)
        if isinstance(operation, kinds.IfElseOp):
            sides = [
                () if body is None else tuple(self.operations(body, qubits, bits))
                for body in operation.params
            ]
            yield If(*_condition(condition, bit_of), *sides)
        elif isinstance(operation, kinds.ControlFlowOp):
            raise ConfigError(
                f"{operation.name}: loops and switches are not supported, only if and else"
            )
        elif condition is not None:
            plain = operation.to_mutable()
            plain.condition = None
            then = tuple(self._dynamic(plain, qubits, bits, bit_of))
            if then:
                yield If(*_condition(condition, bit_of), then)
        elif isinstance(operation, kinds.Measure):
            yield Measure(qubits[0], bits[0])
        elif isinstance(operation, kinds.Reset):
            yield Reset(qubits[0])
        elif isinstance(operation, (kinds.Barrier, kinds.Delay)):
            return
        elif _is_kraus(operation):
            matrices = [torch.from_numpy(np.array(k, dtype=complex)) for k in operation.params]
            yield qubit_channel(matrices, *qubits)
        elif isinstance(operation, (kinds.Gate, kinds.AnnotatedOperation)) or not isinstance(
            operation, kinds.Instruction
        ):
            if qubits:  # no measurement sees a phase of the whole state
                yield from self._operation(operation, qubits)
        elif operation.definition is not None:
            yield from self.operations(operation.definition, qubits, bits)
        else:
            raise ConfigError(f"{operation.name}: this instruction is not supported")


def _condition(condition: Any, bit_of: Callable[[Any], int]) -> tuple[tuple[int, ...], int]:
    """The bits that a condition depends on, low bit first, and the value they must have."""
    from qiskit.circuit import ClassicalRegister, Clbit
    from qiskit.circuit.classical import expr

    target, value = condition if isinstance(condition, tuple) else (condition, 1)
    while isinstance(target, expr.Cast):
        target = target.operand
    if isinstance(target, expr.Unary) and target.op in (
        expr.Unary.Op.LOGIC_NOT, expr.Unary.Op.BIT_NOT,
    ):  # fmt: skip
        target, value = target.operand, 0
    elif isinstance(target, expr.Binary) and target.op is expr.Binary.Op.EQUAL:
        sides = (target.left, target.right)
        values = [side for side in sides if isinstance(side, expr.Value)]
        if len(values) == 1:
            target = next(side for side in sides if not isinstance(side, expr.Value))
            value = int(values[0].value)
    if isinstance(target, expr.Var):
        target = target.var
    if isinstance(target, Clbit):
        return (bit_of(target),), int(value)
    if isinstance(target, ClassicalRegister) and isinstance(condition, (tuple, expr.Binary)):
        return tuple(bit_of(bit) for bit in target), int(value)
    raise ConfigError(
        "a condition must compare a bit or a register with a value; others are not supported"
    )


def _is_kraus(operation: Any) -> bool:
    """Whether it is what `qiskit.quantum_info.Kraus.to_instruction` makes, which has no class."""
    params = getattr(operation, "params", [])
    return (
        operation.name == "kraus"
        and getattr(operation, "definition", None) is None
        and bool(params)
        and all(isinstance(p, np.ndarray) and p.ndim == 2 for p in params)
    )


def dynamic_to_qiskit(circuit: DynamicCircuit) -> Any:
    """The circuit as `qiskit.QuantumCircuit`: its parameters a ParameterVector θ, channels Kraus.

    Args:
        circuit: circuit to write.

    Raises:
        ConfigError: Qiskit is not installed, or there is what its circuits cannot express: a
            readout error, or a channel whose values depend on parameters.
    """
    qiskit = import_qiskit()
    _check(circuit)
    vector = qiskit.circuit.ParameterVector("θ", circuit.num_parameters)
    return _body(circuit, circuit.operations, vector, qiskit)


def dynamic_to_qasm(circuit: DynamicCircuit) -> str:
    """The circuit as a program in OpenQASM 3; parameter i is the i-th input, `theta_i`.

    Args:
        circuit: circuit to write.

    Raises:
        ConfigError: Qiskit, which decomposes unitaries, is not installed, or there is what OpenQASM
            cannot express: a channel or a readout error.
    """
    import_qiskit()
    _check(circuit)
    noisy = [each.name for each in circuit.every if isinstance(each, Channel)]
    if noisy:
        raise ConfigError(f"{noisy[0]}: OpenQASM has no noise; leave channels out")
    gates = [each for each in circuit.every if isinstance(each, Gate)]
    lines = header(expanded(Circuit(circuit.num_qubits, gates, circuit.num_parameters)))
    lines += [f"bit[{circuit.num_bits}] c;"] if circuit.num_bits else []
    return "\n".join([*lines, *_lines(circuit.operations)]) + "\n"


def _check(circuit: DynamicCircuit) -> None:
    if not isinstance(circuit, DynamicCircuit):
        raise ConfigError(f"must be a DynamicCircuit, not {kind_of(circuit)}")
    if any(isinstance(each, Measure) and each.confusion for each in circuit.every):
        raise ConfigError("measure: a readout error cannot be written; leave `confusion` out")


def _body(
    circuit: DynamicCircuit, operations: Sequence[Operation], vector: Any, qiskit: Any
) -> Any:
    """Operations as a circuit of all qubits and bits."""
    made = qiskit.QuantumCircuit(circuit.num_qubits, circuit.num_bits)
    for each in operations:
        if isinstance(each, Gate):
            made.append(qiskit_gate(each, vector), each.every_qubit)
        elif isinstance(each, Channel):
            made.append(_kraus(each), each.qubits)
        elif isinstance(each, Measure):
            made.measure(each.qubit, each.bit)
        elif isinstance(each, Reset):
            made.reset(each.qubit)
        else:
            sides = (_then(each), each.otherwise)
            then, otherwise = (_body(circuit, side, vector, qiskit) for side in sides)
            made.if_else(
                (made.clbits[each.bits[0]], each.value & 1),
                then,
                otherwise if each.otherwise else None,
                made.qubits,
                made.clbits,
            )
    return made


def _then(each: If) -> tuple[Operation, ...]:
    """The operations where the first bit of a condition is right: a condition on the others."""
    if len(each.bits) == 1:
        return each.then
    return (If(each.bits[1:], each.value >> 1, each.then, each.otherwise),)


def _kraus(each: Channel) -> Any:
    from qiskit.quantum_info import Kraus

    numbers = each.numbers
    if numbers is None:
        raise ConfigError(f"{each.name}: its values must be numbers, for Qiskit has only matrices")
    weights, matrices = each.kraus(numbers)
    # A weight of 0 may be rounded to less.
    operators = weights.clamp(min=0).sqrt()[:, None, None] * matrices
    return Kraus([operator.numpy() for operator in operators]).to_instruction()


def _lines(operations: Sequence[Operation]) -> Iterator[str]:
    for each in operations:
        if isinstance(each, Gate):
            yield from map(line, expanded_gate(each))
        elif isinstance(each, Measure):
            yield f"c[{each.bit}] = measure q[{each.qubit}];"
        elif isinstance(each, Reset):
            yield f"reset q[{each.qubit}];"
        elif isinstance(each, If):
            yield f"if ({'' if each.value & 1 else '!'}c[{each.bits[0]}]) {{"
            yield from _lines(_then(each))
            if each.otherwise:
                yield "} else {"
                yield from _lines(each.otherwise)
            yield "}"
