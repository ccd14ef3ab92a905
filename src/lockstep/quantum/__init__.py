"""Quantum circuits: their simulation, measurement and gradients, and the quantum transformer.

    from lockstep.quantum import Circuit, PauliSum, Simulator, gate, parameter

The names are loaded from their modules when they are first asked for: importing this package alone
loads none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.quantum.analysis.entanglement import entangling_capability, meyer_wallach
    from lockstep.quantum.analysis.expressibility import expressibility, fidelities
    from lockstep.quantum.analysis.plateau import gradient_samples, gradient_variance
    from lockstep.quantum.circuits.angles import Angle, Expression, parameter
    from lockstep.quantum.circuits.circuit import Circuit, Gate, gate, unitary
    from lockstep.quantum.circuits.frequencies import frequencies
    from lockstep.quantum.hamiltonians.estimate import Estimate, GroupedMeasurement, bit_strings
    from lockstep.quantum.hamiltonians.ground import lowest_energies
    from lockstep.quantum.hamiltonians.grouping import Group, commuting_groups
    from lockstep.quantum.hamiltonians.operator import PauliOperator
    from lockstep.quantum.hamiltonians.rotation import pauli_rotation
    from lockstep.quantum.interop.dynamic_reader import dynamic_from_qasm, dynamic_from_qiskit
    from lockstep.quantum.interop.dynamic_writer import dynamic_to_qasm, dynamic_to_qiskit
    from lockstep.quantum.interop.qasm_reader import from_qasm
    from lockstep.quantum.interop.qasm_writer import to_qasm
    from lockstep.quantum.interop.qiskit_reader import from_qiskit
    from lockstep.quantum.interop.qiskit_writer import bound, drawing, to_qiskit
    from lockstep.quantum.layers.layer import Layer
    from lockstep.quantum.noise.channels import Channel, channel, pauli_error, qubit_channel
    from lockstep.quantum.noise.circuit import DynamicCircuit, If, Measure, Reset
    from lockstep.quantum.noise.density import DensitySimulator, DensityState
    from lockstep.quantum.noise.readout import misread
    from lockstep.quantum.noise.trajectories import Trajectories, TrajectorySimulator
    from lockstep.quantum.simulation.distributed import expectation, retried
    from lockstep.quantum.simulation.measure import PauliSum, probabilities, sample_frequencies
    from lockstep.quantum.simulation.metric import metric_tensor
    from lockstep.quantum.simulation.shift import share, shifted
    from lockstep.quantum.simulation.statevector import Simulator, statevector
    from lockstep.quantum.transformer.metric import context_root, fubini_study
    from lockstep.quantum.transformer.model import QuantumTransformer, Sentences
    from lockstep.quantum.transformer.superposition import superposition

__all__ = [
    "Angle",
    "Channel",
    "Circuit",
    "DensitySimulator",
    "DensityState",
    "DynamicCircuit",
    "Estimate",
    "Expression",
    "Gate",
    "Group",
    "GroupedMeasurement",
    "If",
    "Layer",
    "Measure",
    "PauliOperator",
    "PauliSum",
    "QuantumTransformer",
    "Reset",
    "Sentences",
    "Simulator",
    "Trajectories",
    "TrajectorySimulator",
    "bit_strings",
    "bound",
    "channel",
    "commuting_groups",
    "context_root",
    "drawing",
    "dynamic_from_qasm",
    "dynamic_from_qiskit",
    "dynamic_to_qasm",
    "dynamic_to_qiskit",
    "entangling_capability",
    "expectation",
    "expressibility",
    "fidelities",
    "frequencies",
    "from_qasm",
    "from_qiskit",
    "fubini_study",
    "gate",
    "gradient_samples",
    "gradient_variance",
    "lowest_energies",
    "metric_tensor",
    "meyer_wallach",
    "misread",
    "parameter",
    "pauli_error",
    "pauli_rotation",
    "probabilities",
    "qubit_channel",
    "retried",
    "sample_frequencies",
    "share",
    "shifted",
    "statevector",
    "superposition",
    "to_qasm",
    "to_qiskit",
    "unitary",
]

_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "analysis.entanglement": ("entangling_capability", "meyer_wallach"),
        "analysis.expressibility": ("expressibility", "fidelities"),
        "analysis.plateau": ("gradient_samples", "gradient_variance"),
        "circuits.angles": ("Angle", "Expression", "parameter"),
        "circuits.circuit": ("Circuit", "Gate", "gate", "unitary"),
        "circuits.frequencies": ("frequencies",),
        "hamiltonians.estimate": ("Estimate", "GroupedMeasurement", "bit_strings"),
        "hamiltonians.ground": ("lowest_energies",),
        "hamiltonians.grouping": ("Group", "commuting_groups"),
        "hamiltonians.operator": ("PauliOperator",),
        "hamiltonians.rotation": ("pauli_rotation",),
        "interop.dynamic_reader": ("dynamic_from_qasm", "dynamic_from_qiskit"),
        "interop.dynamic_writer": ("dynamic_to_qasm", "dynamic_to_qiskit"),
        "interop.qasm_reader": ("from_qasm",),
        "interop.qasm_writer": ("to_qasm",),
        "interop.qiskit_reader": ("from_qiskit",),
        "interop.qiskit_writer": ("bound", "drawing", "to_qiskit"),
        "layers.layer": ("Layer",),
        "noise.channels": ("Channel", "channel", "pauli_error", "qubit_channel"),
        "noise.circuit": ("DynamicCircuit", "If", "Measure", "Reset"),
        "noise.density": ("DensitySimulator", "DensityState"),
        "noise.readout": ("misread",),
        "noise.trajectories": ("Trajectories", "TrajectorySimulator"),
        "simulation.distributed": ("expectation", "retried"),
        "simulation.measure": ("PauliSum", "probabilities", "sample_frequencies"),
        "simulation.metric": ("metric_tensor",),
        "simulation.shift": ("share", "shifted"),
        "simulation.statevector": ("Simulator", "statevector"),
        "transformer.metric": ("context_root", "fubini_study"),
        "transformer.model": ("QuantumTransformer", "Sentences"),
        "transformer.superposition": ("superposition",),
    }
)
"""The public names of each module, for `__getattr__`; the imports above are for type checkers."""

_MODULES = MappingProxyType({name: module for module, names in _NAMES.items() for name in names})


if not TYPE_CHECKING:  # for type checkers, a module with this function has every name

    def __getattr__(name: str) -> Any:
        """A public name, from its module (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
