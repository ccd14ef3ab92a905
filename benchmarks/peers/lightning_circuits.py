"""Circuits in PennyLane's lightning.qubit, with adjoint differentiation.

Prints nothing: `quantum.py` imports it, for both are measured in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pennylane as qml
import torch
from pennylane import numpy as pnp

from lockstep.systems.quantum.circuits.circuit import Circuit, Gate
from lockstep.systems.quantum.simulation.statevector import statevector


def gradient(circuit: Circuit, parameters: torch.Tensor) -> Callable[[], Any]:
    """A function that computes the gradient of <Z_0>.

    What comes before the first rotation is given as a prepared state, and controlled unitaries as
    matrices on controls and targets: lightning.qubit has no adjoint of them otherwise.

    Args:
        circuit: of gates that PennyLane has too.
        parameters: [num_parameters].
    """
    device = qml.device("lightning.qubit", wires=circuit.num_qubits)
    trained = [number for number, g in enumerate(circuit.gates) if g.angle is not None]
    before = circuit.gates[: trained[0]]
    # Its lowest wire is the high bit.
    prepared = statevector(Circuit(circuit.num_qubits, before))
    wires = list(reversed(range(circuit.num_qubits)))

    @qml.qnode(device, diff_method="adjoint")
    def node(values: Any) -> Any:
        if before:
            qml.StatePrep(prepared.numpy(), wires=wires)
        applied(circuit.gates[trained[0] :], values)
        return qml.expval(qml.Z(0))

    values = pnp.array(parameters.detach().numpy(), requires_grad=True)
    derivative = qml.grad(node)
    return lambda: derivative(values)


def applied(gates: Sequence[Gate], values: Any) -> None:
    """Apply gates in a quantum function; `values` are those of all parameters."""
    rotations = {"rx": qml.RX, "ry": qml.RY, "rz": qml.RZ}
    for gate in gates:
        if gate.angle is not None:
            assert gate.angle.index is not None
            rotations[gate.name](values[gate.angle.index], wires=gate.qubits)
        elif gate.name == "x" and len(gate.controls) == 1:
            qml.CNOT(wires=[*gate.controls, *gate.qubits])
        else:
            # PennyLane's first wire is the high bit.
            qml.QubitUnitary(dense(gate), wires=[*gate.controls, *reversed(gate.qubits)])


def dense(gate: Gate) -> Any:
    """A gate's matrix with its controls, which are the high bits, the first one highest."""
    matrix = gate.kind.constant.numpy()
    size = len(matrix)
    whole = np.eye(size << len(gate.controls), dtype=np.complex128)
    value = sum(bit << i for i, bit in enumerate(reversed(gate.control_state)))
    whole[value * size : (value + 1) * size, value * size : (value + 1) * size] = matrix
    return whole
