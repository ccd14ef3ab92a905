"""Wines told apart by a quantum circuit between two linear layers."""

import torch
from sklearn.datasets import load_wine
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.quantum import Circuit, Layer, gate, parameter


class WineConfig(ls.TrainConfig):
    num_qubits: int = 4
    """Qubits, and inputs of the circuit."""
    num_layers: int = 3
    """Layers of the circuit; each takes in all inputs once more."""

    batch_size: int = 32
    num_microbatches: int = 4
    epochs: int = 30
    lr: float = 0.02
    optimizer: ls.OptimizerConfig = ls.OptimizerConfig(name="adam")


def uploads(num_qubits: int, num_layers: int) -> Circuit:
    """Parameters are first the inputs, then the weights: four for each qubit and layer."""
    gates, weight = [], num_qubits
    for _ in range(num_layers):
        for qubit in range(num_qubits):
            scaled = parameter(qubit) * parameter(weight)
            gates.append(gate("ry", qubit, angle=scaled + parameter(weight + 1)))
            gates.append(gate("rz", qubit, angle=parameter(weight + 2)))
            gates.append(gate("ry", qubit, angle=parameter(weight + 3)))
            weight += 4
        gates += [gate("cx", qubit, (qubit + 1) % num_qubits) for qubit in range(num_qubits)]
    return Circuit(num_qubits, gates)


class Wine(ls.Task):
    Config = WineConfig
    config: WineConfig

    def build_model(self) -> nn.Module:
        size = self.config.num_qubits
        circuit = uploads(size, self.config.num_layers)
        each = ["I" * (size - 1 - qubit) + "Z" + "I" * qubit for qubit in range(size)]
        layer = Layer(circuit, each, inputs=range(size))
        return nn.Sequential(nn.Linear(13, size), nn.Tanh(), layer, nn.Linear(size, 3))

    def dataset(self, split: str) -> TensorDataset | None:
        numbers, kinds = load_wine(return_X_y=True)
        order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(numbers, dtype=torch.float32)[order], torch.tensor(kinds)[order]
        x = (x - x[:128].mean(0)) / x[:128].std(0)
        rows = {"train": slice(0, 128), "test": slice(128, None)}.get(split)
        return None if rows is None else TensorDataset(x[rows], y[rows])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        x, y = batch
        logits = model(x)
        correct = (logits.argmax(1) == y).sum()
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
        return ls.Loss(loss, len(y), {"accuracy": (correct, len(y))})


if __name__ == "__main__":
    ls.main(Wine())
