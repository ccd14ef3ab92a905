"""Circuits with measurements in the middle, reset and conditions, from Qiskit and OpenQASM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import check_num_qubits
from lockstep.quantum.interop.qasm_reader import reading
from lockstep.quantum.interop.qiskit_reader import Reader, import_qiskit
from lockstep.quantum.noise.channels import qubit_channel
from lockstep.quantum.noise.circuit import DynamicCircuit, If, Measure, Operation, Reset


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
