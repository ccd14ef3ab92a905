"""Circuits from and to Qiskit, OpenQASM 2 and 3, and their drawings; through Qiskit, an extra."""

from lockstep.quantum.interop.dynamic_reader import dynamic_from_qasm, dynamic_from_qiskit
from lockstep.quantum.interop.dynamic_writer import dynamic_to_qasm, dynamic_to_qiskit
from lockstep.quantum.interop.qasm_reader import from_qasm
from lockstep.quantum.interop.qasm_writer import to_qasm
from lockstep.quantum.interop.qiskit_reader import from_qiskit
from lockstep.quantum.interop.qiskit_writer import bound, drawing, to_qiskit

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
