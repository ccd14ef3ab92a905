"""A circuit as `TorchLayer` of PennyLane, on the device that is asked for.

Prints nothing: `circuit_layers.py` imports it, for both are measured in one process.
"""

from __future__ import annotations

from typing import Any

import pennylane as qml
import torch
from torch import nn

ROTATIONS = (qml.RX, qml.RY, qml.RZ)


def layer(num_qubits: int, num_layers: int, device: str, weights: torch.Tensor) -> nn.Module:
    """Inputs as RY on each qubit, RX, RY, RZ with weights, and a ring of CNOTs, in each layer.

    Args:
        num_qubits: number of qubits, of inputs, and of expectation values <Z>.
        num_layers: number of layers.
        device: `default.qubit`, which simulates batches, with backpropagation; or
            `lightning.qubit`, one sample after the other, with adjoint differentiation.
        weights: weights [num_layers * num_qubits * 3].
    """
    method = "backprop" if device == "default.qubit" else "adjoint"

    @qml.qnode(qml.device(device, wires=num_qubits), interface="torch", diff_method=method)
    def node(inputs: Any, weights: Any) -> Any:
        for layer in range(num_layers):
            for qubit in range(num_qubits):
                qml.RY(inputs[..., qubit], wires=qubit)
            for qubit in range(num_qubits):
                for number, rotation in enumerate(ROTATIONS):
                    rotation(weights[layer, qubit, number], wires=qubit)
            for qubit in range(num_qubits):
                qml.CNOT([qubit, (qubit + 1) % num_qubits])
        return [qml.expval(qml.Z(qubit)) for qubit in range(num_qubits)]

    made = qml.qnn.TorchLayer(node, {"weights": (num_layers, num_qubits, 3)})
    with torch.no_grad():
        made.weights.copy_(weights.view(num_layers, num_qubits, 3))
    module: nn.Module = made
    return module
