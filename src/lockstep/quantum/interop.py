"""Circuits from and to Qiskit, OpenQASM 2 and 3, and their drawings; through Qiskit, an extra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lockstep.errors import ConfigError
from lockstep.quantum.circuit import Angle, Circuit, Gate, unitary
from lockstep.quantum.gates import KINDS, UNITARY

_IGNORED = ("barrier", "delay")


def from_qiskit(source: Any) -> Circuit:
    """A circuit from a `qiskit.QuantumCircuit`; final measurements are left out.

    Parameters are numbered as in `source.parameters`. Gates that are not known are taken apart by
    their definition.

    Raises:
        ConfigError: Qiskit is not installed, a gate has no definition in known ones (named), an
            angle is not linear in one parameter, or there is a measurement in the middle.
    """
    _qiskit()
    numbers = {parameter: number for number, parameter in enumerate(source.parameters)}
    _check_measurements(source)
    gates = list(_gates(source, list(range(source.num_qubits)), numbers))
    return Circuit(source.num_qubits, gates, len(numbers))


def to_qiskit(circuit: Circuit) -> Any:
    """The circuit as `qiskit.QuantumCircuit`, its parameters a ParameterVector θ.

    Raises:
        ConfigError: Qiskit is not installed.
    """
    qiskit = _qiskit()
    from qiskit.circuit.library import UnitaryGate, get_standard_gate_name_mapping

    known = get_standard_gate_name_mapping()
    vector = qiskit.circuit.ParameterVector("θ", circuit.num_parameters)
    made = qiskit.QuantumCircuit(circuit.num_qubits)
    for gate in circuit.gates:
        if gate.matrix is not None:
            operation = UnitaryGate(gate.matrix.numpy())
        elif gate.angle is None:
            operation = known[gate.name].base_class()
        else:
            angle = gate.angle
            value = angle.offset
            if angle.index is not None:
                value = angle.scale * vector[angle.index] + angle.offset
            operation = known[gate.name].base_class(value)
        if gate.controls:
            # Qiskit has the first control as the low bit of the state.
            state = sum(bit << i for i, bit in enumerate(gate.control_state))
            operation = operation.control(len(gate.controls), ctrl_state=state)
        made.append(operation, [*gate.controls, *gate.qubits])
    return made


def from_qasm(text: str) -> Circuit:
    """A circuit from OpenQASM 2 or 3.

    Raises:
        ConfigError: the text cannot be read, or as `from_qiskit`.
    """
    qiskit = _qiskit()
    from qiskit.exceptions import QiskitError

    try:
        if "OPENQASM 3" in text:
            from qiskit import qasm3

            source = qasm3.loads(text)
        else:
            custom = qiskit.qasm2.LEGACY_CUSTOM_INSTRUCTIONS
            source = qiskit.qasm2.loads(text, custom_instructions=custom)
    except (QiskitError, ImportError) as error:
        raise ConfigError(f"OpenQASM: {str(error).strip()}") from error
    return from_qiskit(source)


def to_qasm(circuit: Circuit, version: int = 2) -> str:
    """The circuit as OpenQASM; version 2 has no parameters, so all angles must be numbers.

    Raises:
        ConfigError: version 2 and there are parameters, or Qiskit is not installed.
    """
    _qiskit()
    from qiskit import qasm2, qasm3

    if version == 3:
        return str(qasm3.dumps(to_qiskit(circuit)))
    if circuit.num_parameters:
        raise ConfigError(
            f"OpenQASM 2 has no parameters, the circuit has {circuit.num_parameters}; bind them "
            "with `bound`, or take version 3"
        )
    return str(qasm2.dumps(to_qiskit(circuit)))


def bound(circuit: Circuit, parameters: torch.Tensor) -> Circuit:
    """The circuit with numbers [num_parameters] for its parameters."""
    values = iter(circuit.angles(parameters.double()).tolist())
    gates = []
    for g in circuit.gates:
        number = None if g.angle is None else Angle(next(values))
        gates.append(Gate(g.name, g.qubits, number, g.controls, g.control_state, g.matrix))
    return Circuit(circuit.num_qubits, gates)


def drawing(circuit: Circuit, **options: Any) -> str:
    """The circuit in text, as Qiskit draws it; `options` are those of `QuantumCircuit.draw`."""
    return str(to_qiskit(circuit).draw("text", **options))


def _qiskit() -> Any:
    try:
        import qiskit
        import qiskit.circuit
        import qiskit.qasm2
    except ImportError as error:
        raise ConfigError(
            'circuits of others need Qiskit: pip install "lockstep-train[quantum]"'
        ) from error
    return qiskit


def _check_measurements(source: Any) -> None:
    measured: set[Any] = set()
    for instruction in source.data:
        name = instruction.operation.name
        late = measured.intersection(instruction.qubits)
        if late and name not in ("measure", *_IGNORED):
            where = source.find_bit(next(iter(late))).index
            raise ConfigError(
                f"a measurement in the middle: qubit {where} is measured and then used by {name}; "
                "only measurements at the end are supported"
            )
        if name == "measure":
            measured.update(instruction.qubits)


def _gates(source: Any, qubits: list[int], numbers: Mapping[Any, int]) -> Iterator[Gate]:
    """The gates of a Qiskit circuit whose qubits are `qubits` here."""
    phase = _angle(source.global_phase, numbers, "global phase")
    if phase.index is not None:
        raise ConfigError("global phase: must be a number, not a parameter")
    if phase.offset:
        factor = complex(np.exp(1j * phase.offset))
        yield unitary(factor * torch.eye(2, dtype=torch.complex128), qubits[0])
    for instruction in source.data:
        operation = instruction.operation
        if operation.name == "measure" or operation.name in _IGNORED:
            continue
        if getattr(operation, "condition", None) is not None:
            raise ConfigError(f"gate {operation.name}: conditions are not supported")
        places = [qubits[source.find_bit(q).index] for q in instruction.qubits]
        yield from _translated(operation, places, numbers)


def _translated(operation: Any, places: list[int], numbers: Mapping[Any, int]) -> Iterator[Gate]:
    base, num_controls, state = operation, 0, 0
    if hasattr(operation, "base_gate") and hasattr(operation, "ctrl_state"):
        base, num_controls = operation.base_gate, operation.num_ctrl_qubits
        state = operation.ctrl_state
    controls, targets = places[:num_controls], places[num_controls:]
    bits = [state >> i & 1 for i in range(num_controls)]
    for gate in _plain(base, targets, numbers):
        yield gate.controlled(*controls, state=bits) if controls else gate


def _plain(operation: Any, places: list[int], numbers: Mapping[Any, int]) -> Iterator[Gate]:
    name = operation.name
    if name == "u" or name == "u3":
        theta, phi, lam = (_angle(p, numbers, name) for p in operation.params)
        yield Gate("p", tuple(places), lam)
        yield Gate("ry", tuple(places), theta)
        yield Gate("p", tuple(places), phi)
    elif name in KINDS:
        angle = _angle(operation.params[0], numbers, name) if operation.params else None
        yield Gate(name, tuple(places), angle)
    elif name == "u1":
        yield Gate("p", tuple(places), _angle(operation.params[0], numbers, name))
    elif name == UNITARY:
        yield unitary(torch.from_numpy(np.array(operation.params[0])), *places)
    elif getattr(operation, "definition", None) is not None and operation.definition.data:
        yield from _gates(operation.definition, places, numbers)
    else:
        raise ConfigError(
            f"gate {name}: not supported, and not defined by gates that are "
            f"({', '.join(KINDS)}, u, {UNITARY}, and these with controls)"
        )


def _angle(value: Any, numbers: Mapping[Any, int], name: str) -> Angle:
    """A number, or scale · parameter + offset."""
    free = list(getattr(value, "parameters", ()))
    if not free:
        return Angle(float(value))
    if len(free) == 1:
        slope = value.gradient(free[0])
        if not getattr(slope, "parameters", ()):
            offset = float(value.bind({free[0]: 0.0}))
            return Angle(offset, numbers[free[0]], float(slope))
    raise ConfigError(f"gate {name}: angle {value} is not linear in one parameter")
