"""The ground state of an Ising ring, its gradient by shifted angles, as quantum hardware finds it.

A step takes two evaluations of the circuit for each angle. They are dealt out in parts: a sample of
the dataset is a part of the angles.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.quantum import Circuit, PauliSum, Simulator, gate, parameter, share, shifted


class IsingConfig(ls.TrainConfig):
    num_qubits: int = 6
    num_layers: int = 3
    field: float = 1.0
    """Strength of the transverse field; the coupling is 1."""
    parts: int = 8


class Ansatz(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.angles = nn.Parameter(0.3 * torch.randn(count, dtype=torch.float64))


class Ising(ls.Task):
    Config = IsingConfig

    def __init__(self, config=None):
        super().__init__(config)
        size = self.config.num_qubits
        gates, angles = [], 0
        for _ in range(self.config.num_layers):
            for qubit in range(size):
                for name in ("rx", "ry", "rz"):
                    gates.append(gate(name, qubit, angle=parameter(angles)))
                    angles += 1
            gates += [gate("cx", qubit, (qubit + 1) % size) for qubit in range(size)]
        self.simulator = Simulator(Circuit(size, gates))
        letters = {"Z": (-1.0, 2), "X": (-self.config.field, 1)}
        terms = {}
        for letter, (strength, width) in letters.items():
            word = letter * width + "I" * (size - width)
            terms |= {word[i:] + word[:i]: strength for i in range(size) if strength}
        self.hamiltonian = PauliSum(terms)

    def build_model(self):
        return Ansatz(self.simulator.circuit.num_parameters)

    def dataset(self, split):
        return TensorDataset(torch.arange(self.config.parts)) if split == "train" else None

    def loss(self, model, batch):
        parts, count = self.config.parts, len(model.angles)
        total = torch.zeros((), dtype=torch.float64)
        for part in batch[0].tolist():
            only = share(count, part, parts)
            energy = shifted(self.simulator, model.angles, self.measure, only).sum()
            # Each part finds the whole energy, and its part of the gradient.
            total = total + energy.detach() / parts + (energy - energy.detach())
        return ls.Loss(total, len(batch[0]) / parts)

    def measure(self, states):
        return self.hamiltonian.expectation(states)[:, None]


if __name__ == "__main__":
    config = IsingConfig(
        batch_size=8, epochs=200, lr=0.05, optimizer={"name": "adam"}, checkpoint={"every": 50}
    )
    ls.train(Ising(config), config)
