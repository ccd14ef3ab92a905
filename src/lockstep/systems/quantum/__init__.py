"""Quantum circuits: their simulation, measurement and gradients, and the quantum transformer.

    from lockstep.quantum import Circuit, PauliSum, Simulator, gate, parameter

The names are loaded from their modules when they are first used: importing this package alone loads
none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config import lazy_names
from lockstep.launching.systems import CommandGroup, System

if TYPE_CHECKING:
    from lockstep.systems.quantum.analysis import (
        entangling_capability,
        expressibility,
        fidelities,
        gradient_samples,
        gradient_variance,
        meyer_wallach,
    )
    from lockstep.systems.quantum.circuits.angles import Angle, Expression, parameter
    from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate, unitary
    from lockstep.systems.quantum.estimate import (
        Estimate,
        GroupedMeasurement,
        bit_strings,
        lowest_energies,
    )
    from lockstep.systems.quantum.grouping import Group, commuting_groups, pauli_rotation
    from lockstep.systems.quantum.hamiltonian import PauliOperator
    from lockstep.systems.quantum.interop.dynamic import (
        dynamic_from_qasm,
        dynamic_from_qiskit,
        dynamic_to_qasm,
        dynamic_to_qiskit,
    )
    from lockstep.systems.quantum.interop.qasm import bound, drawing, from_qasm, to_qasm, to_qiskit
    from lockstep.systems.quantum.interop.qiskit_reader import from_qiskit
    from lockstep.systems.quantum.layer import Layer
    from lockstep.systems.quantum.noise.channels import Channel, channel, pauli_error, qubit_channel
    from lockstep.systems.quantum.noise.circuit import DynamicCircuit, If, Measure, Reset, misread
    from lockstep.systems.quantum.noise.density import DensitySimulator, DensityState
    from lockstep.systems.quantum.noise.trajectories import Trajectories, TrajectorySimulator
    from lockstep.systems.quantum.simulation.gradients import (
        frequencies,
        metric_tensor,
        share,
        shifted,
    )
    from lockstep.systems.quantum.simulation.measure import (
        PauliSum,
        probabilities,
        sample_frequencies,
    )
    from lockstep.systems.quantum.simulation.statevector import (
        Simulator,
        expectation,
        retried,
        statevector,
    )
    from lockstep.systems.quantum.transformer.amplitudes import (
        context_root,
        fubini_study,
        superposition,
    )
    from lockstep.systems.quantum.transformer.model import QuantumTransformer, Sentences

SYSTEM = System(
    "lockstep.systems.quantum.task:Quantum",
    "A quantum transformer that learns sentences word by word.",
    CommandGroup(
        "quantum",
        "Quantum transformer: predict, draw, export, study.",
        "lockstep.systems.quantum.cli",
    ),
    originals="lockstep.systems.quantum.commands",
)

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

if not TYPE_CHECKING:  # else type checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(__name__)
