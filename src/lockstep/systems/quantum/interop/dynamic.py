"""Circuits with measurements in the middle, from and to Qiskit and OpenQASM 3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import kind_of
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, check_num_qubits
from lockstep.systems.quantum.interop.qasm_reader import reading
from lockstep.systems.quantum.interop.qasm_writer import expanded, header, line, to_qiskit
from lockstep.systems.quantum.interop.qiskit_reader import Reader, import_qiskit
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
    qiskit = import_qiskit()
    if not isinstance(source, qiskit.QuantumCircuit):
        raise ConfigError(f"must be a qiskit.QuantumCircuit, not {type(source).__name__}")
    return _read(source, list(source.parameters))


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
    reader = _DynamicReader({parameter: number for number, parameter in enumerate(parameters)})
    operations = reader.operations(source, range(source.num_qubits), range(source.num_clbits))
    return DynamicCircuit(source.num_qubits, list(operations), source.num_clbits, len(parameters))


class _DynamicReader(Reader):
    def operations(
        self, source: Any, qubits: Sequence[int], bits: Sequence[int]
    ) -> Iterator[Operation]:
        """The operations of a Qiskit circuit whose qubits and bits are `qubits` and `bits` here."""
        for instruction in source.data:
            self._count(instruction.operation)
            places = [qubits[source.find_bit(q).index] for q in instruction.qubits]
            own = [bits[source.find_bit(c).index] for c in instruction.clbits]
            yield from self._dynamic(instruction.operation, source, places, own, bits)

    def _dynamic(
        self,
        operation: Any,
        source: Any,
        places: Sequence[int],
        own: Sequence[int],
        bits: Sequence[int],
    ) -> Iterator[Operation]:
        """The operations of an instruction, which before Qiskit 2 may have a condition (`c_if`)."""
        from qiskit.circuit import ControlFlowOp

        condition = getattr(operation, "condition", None)
        if condition is None or isinstance(operation, ControlFlowOp):
            yield from self._unconditioned(operation, source, places, own, bits)
            return
        looked_at, value = self._condition(condition, source)
        plain = operation.to_mutable()
        plain.condition = None
        then = tuple(self._unconditioned(plain, source, places, own, bits))
        if then:
            yield If(tuple(bits[b] for b in looked_at), value, then)

    def _unconditioned(
        self,
        operation: Any,
        source: Any,
        places: Sequence[int],
        own: Sequence[int],
        bits: Sequence[int],
    ) -> Iterator[Operation]:
        from qiskit.circuit import (
            AnnotatedOperation,
            Barrier,
            ControlFlowOp,
            Delay,
            Gate,
            IfElseOp,
            Instruction,
        )  # fmt: skip
        from qiskit.circuit import Measure as QiskitMeasure
        from qiskit.circuit import Reset as QiskitReset

        if isinstance(operation, QiskitMeasure):
            yield Measure(places[0], own[0])
        elif isinstance(operation, QiskitReset):
            yield Reset(places[0])
        elif isinstance(operation, (Barrier, Delay)):
            return
        elif isinstance(operation, IfElseOp):
            looked_at, value = self._condition(operation.condition, source)
            sides = [
                () if body is None else tuple(self.operations(body, places, own))
                for body in operation.params
            ]
            yield If(tuple(bits[b] for b in looked_at), value, sides[0], sides[1])
        elif isinstance(operation, ControlFlowOp):
            raise ConfigError(
                f"{operation.name}: loops and switches are not supported, only if and else"
            )
        elif _is_kraus(operation):
            matrices = [torch.from_numpy(np.array(k, dtype=complex)) for k in operation.params]
            yield qubit_channel(matrices, *places)
        elif isinstance(operation, (Gate, AnnotatedOperation)) or not isinstance(
            operation, Instruction
        ):
            if places:  # a phase of the whole state is left out
                yield from self._operation(operation, places)
        elif operation.definition is not None:
            yield from self.operations(operation.definition, places, own)
        else:
            raise ConfigError(f"{operation.name}: this instruction is not supported")

    def _condition(self, condition: Any, source: Any) -> tuple[list[int], int]:
        """The bits of `source` that a condition looks at, low bit first, and their value."""
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
            return [source.find_bit(target).index], int(value)
        if isinstance(target, ClassicalRegister) and isinstance(condition, (tuple, expr.Binary)):
            return [source.find_bit(bit).index for bit in target], int(value)
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
        ConfigError: Qiskit is not installed, or there is what its circuits cannot have: a readout
            error, or a channel whose values depend on parameters.
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
        ConfigError: Qiskit, which takes unitaries apart, is not installed, or there is what
            OpenQASM cannot have: a channel or a readout error.
    """
    import_qiskit()
    _check(circuit)
    noisy = [each.name for each in circuit.every if isinstance(each, Channel)]
    if noisy:
        raise ConfigError(f"{noisy[0]}: OpenQASM has no noise; leave channels out")
    gates = [each for each in circuit.every if isinstance(each, Gate)]
    lines = header(expanded(Circuit(circuit.num_qubits, gates, circuit.num_parameters)))
    lines += [f"bit[{circuit.num_bits}] c;"] if circuit.num_bits else []
    return "\n".join([*lines, *_lines(circuit, circuit.operations)]) + "\n"


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
            own = to_qiskit(Circuit(circuit.num_qubits, [each], circuit.num_parameters))
            # Each call has a vector of its own.
            own = own.assign_parameters({p: vector[p.index] for p in own.parameters})
            made.compose(own, inplace=True)
        elif isinstance(each, Channel):
            made.append(_kraus(each, qiskit), each.qubits)
        elif isinstance(each, Measure):
            made.measure(each.qubit, each.bit)
        elif isinstance(each, Reset):
            made.reset(each.qubit)
        else:
            _append_if(made, each, circuit, vector, qiskit)
    return made


def _then(each: If) -> tuple[Operation, ...]:
    """What is done where the first bit of a condition is right: a condition on the others."""
    if len(each.bits) == 1:
        return each.then
    return (If(each.bits[1:], each.value >> 1, each.then, each.otherwise),)


def _append_if(made: Any, each: If, circuit: DynamicCircuit, vector: Any, qiskit: Any) -> None:
    bodies = [_body(circuit, side, vector, qiskit) for side in (_then(each), each.otherwise)]
    condition = made.clbits[each.bits[0]], each.value & 1
    otherwise = bodies[1] if each.otherwise else None
    made.if_else(condition, bodies[0], otherwise, made.qubits, made.clbits)


def _kraus(each: Channel, qiskit: Any) -> Any:
    from qiskit.quantum_info import Kraus

    numbers = each.numbers
    if numbers is None:
        raise ConfigError(f"{each.name}: its values must be numbers, for Qiskit has only matrices")
    weights, matrices = each.kraus(numbers)
    # By rounding, a weight of 0 may be less.
    operators = weights.clamp(min=0).sqrt()[:, None, None] * matrices
    return Kraus([operator.numpy() for operator in operators]).to_instruction()


def _lines(circuit: DynamicCircuit, operations: Sequence[Operation]) -> Iterator[str]:
    for each in operations:
        if isinstance(each, Gate):
            own = Circuit(circuit.num_qubits, [each], circuit.num_parameters)
            yield from map(line, expanded(own).gates)
        elif isinstance(each, Measure):
            yield f"c[{each.bit}] = measure q[{each.qubit}];"
        elif isinstance(each, Reset):
            yield f"reset q[{each.qubit}];"
        elif isinstance(each, If):
            yield f"if ({'' if each.value & 1 else '!'}c[{each.bits[0]}]) {{"
            yield from _lines(circuit, _then(each))
            if each.otherwise:
                yield "} else {"
                yield from _lines(circuit, each.otherwise)
            yield "}"
