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
    from lockstep.quantum.circuits.circuit import Angle, Circuit, Gate, gate, parameter, unitary
    from lockstep.quantum.interop.qasm_reader import from_qasm
    from lockstep.quantum.interop.qasm_writer import to_qasm
    from lockstep.quantum.interop.qiskit_reader import from_qiskit
    from lockstep.quantum.interop.qiskit_writer import bound, drawing, to_qiskit
    from lockstep.quantum.simulation.distributed import expectation
    from lockstep.quantum.simulation.measure import PauliSum, probabilities, sample_frequencies
    from lockstep.quantum.simulation.shift import share, shifted
    from lockstep.quantum.simulation.statevector import Simulator, statevector
    from lockstep.quantum.transformer.metric import context_root, fubini_study
    from lockstep.quantum.transformer.model import QuantumTransformer, Sentences
    from lockstep.quantum.transformer.superposition import superposition

__all__ = [
    "Angle",
    "Circuit",
    "Gate",
    "PauliSum",
    "QuantumTransformer",
    "Sentences",
    "Simulator",
    "bound",
    "context_root",
    "drawing",
    "entangling_capability",
    "expectation",
    "expressibility",
    "fidelities",
    "from_qasm",
    "from_qiskit",
    "fubini_study",
    "gate",
    "gradient_samples",
    "gradient_variance",
    "meyer_wallach",
    "parameter",
    "probabilities",
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
        "circuits.circuit": ("Angle", "Circuit", "Gate", "gate", "parameter", "unitary"),
        "interop.qasm_reader": ("from_qasm",),
        "interop.qasm_writer": ("to_qasm",),
        "interop.qiskit_reader": ("from_qiskit",),
        "interop.qiskit_writer": ("bound", "drawing", "to_qiskit"),
        "simulation.distributed": ("expectation",),
        "simulation.measure": ("PauliSum", "probabilities", "sample_frequencies"),
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
