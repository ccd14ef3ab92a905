"""Circuits from and to Qiskit, OpenQASM 2 and 3, and their drawings; through Qiskit, an extra."""

from lockstep.systems.quantum.interop.dynamic import (
    dynamic_from_qasm,
    dynamic_from_qiskit,
    dynamic_to_qasm,
    dynamic_to_qiskit,
)
from lockstep.systems.quantum.interop.qasm_reader import from_qasm
from lockstep.systems.quantum.interop.qasm_writer import bound, drawing, to_qasm, to_qiskit
from lockstep.systems.quantum.interop.qiskit_reader import from_qiskit

__all__ = [
    "bound",
    "drawing",
    "dynamic_from_qasm",
    "dynamic_from_qiskit",
    "dynamic_to_qasm",
    "dynamic_to_qiskit",
    "from_qasm",
    "from_qiskit",
    "to_qasm",
    "to_qiskit",
]
