"""Quantum circuits, their simulation and gradients, and a quantum transformer."""
