"""Circuits with measurements in the middle, reset and conditions, to Qiskit and OpenQASM 3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import Circuit, Gate, kind_of
from lockstep.quantum.interop.qasm_writer import expanded, header, line
from lockstep.quantum.interop.qiskit_reader import import_qiskit
from lockstep.quantum.interop.qiskit_writer import to_qiskit
from lockstep.quantum.noise.channels import Channel
from lockstep.quantum.noise.circuit import DynamicCircuit, If, Measure, Operation, Reset


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
