"""Circuits from and to Qiskit, OpenQASM 2 and 3, and their drawings; through Qiskit, an extra."""

from lockstep.quantum.qasm_reader import from_qasm
from lockstep.quantum.qasm_writer import to_qasm
from lockstep.quantum.qiskit_reader import from_qiskit
from lockstep.quantum.qiskit_writer import bound, drawing, to_qiskit

__all__ = ["bound", "drawing", "from_qasm", "from_qiskit", "to_qasm", "to_qiskit"]
