"""Circuits from and to Qiskit, OpenQASM 2 and 3, and their drawings; needs Qiskit, an extra."""
