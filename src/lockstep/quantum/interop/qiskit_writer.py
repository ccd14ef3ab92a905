"""Circuits to Qiskit, and their drawings."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.quantum.circuits.circuit import Angle, Circuit, Gate
from lockstep.quantum.interop.qiskit_angles import written_angle
from lockstep.quantum.interop.qiskit_reader import import_qiskit


def to_qiskit(circuit: Circuit) -> Any:
    """The circuit as `qiskit.QuantumCircuit`, its parameters a ParameterVector θ.

    Controlled unitaries become `AnnotatedOperation`s, which Qiskit decomposes when it transpiles.

    Raises:
        ConfigError: Qiskit is not installed, or has no expression for an angle.
    """
    qiskit = import_qiskit()
    from qiskit.circuit.library import UnitaryGate, get_standard_gate_name_mapping

    known = get_standard_gate_name_mapping()
    vector = qiskit.circuit.ParameterVector("θ", circuit.num_parameters)
    made = qiskit.QuantumCircuit(circuit.num_qubits)
    for gate in circuit.gates:
        if gate.matrix is not None:
            # Our own check has found it to be unitary; Qiskit's costs more than all the rest.
            operation = UnitaryGate(gate.matrix.numpy(), check_input=False)
        elif gate.angle is None:
            operation = known[gate.name].base_class()
        else:
            operation = known[gate.name].base_class(written_angle(gate.angle, vector))
        if gate.controls:
            # Qiskit has the first control as the low bit of the state.
            state = sum(bit << i for i, bit in enumerate(gate.control_state))
            # A unitary with controls would be taken apart at once, which takes seconds.
            annotated = True if gate.matrix is not None else None
            operation = operation.control(len(gate.controls), ctrl_state=state, annotated=annotated)
        made.append(operation, [*gate.controls, *gate.qubits])
    return made


def bound(circuit: Circuit, parameters: torch.Tensor) -> Circuit:
    """The circuit with numbers in place of its parameters.

    Args:
        circuit: circuit to bind.
        parameters: value of each parameter, real, [num_parameters].

    Raises:
        ConfigError: the values are no such tensor.
    """
    circuit.check_parameters(parameters)
    values = iter(circuit.angles(parameters.double()).tolist())
    gates = []
    for g in circuit.gates:
        number = None if g.angle is None else Angle(next(values))
        gates.append(Gate(g.name, g.qubits, number, g.controls, g.control_state, g.matrix))
    return Circuit(circuit.num_qubits, gates)


def drawing(circuit: Circuit, **options: Any) -> str:
    """The circuit in text, as Qiskit draws it; `options` are those of `QuantumCircuit.draw`."""
    return str(to_qiskit(circuit).draw("text", **options))
