"""The ground state of an Ising ring, its gradient by shifted angles, as quantum hardware finds it.

A step takes two evaluations of the circuit for each angle. They are distributed in parts: a sample
of the dataset is a part of the angles.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.quantum import Circuit, PauliSum, Simulator, gate, parameter, share, shifted


class IsingConfig(ls.TrainConfig):
    num_qubits: int = 6
    """Length of the ring."""
    num_layers: int = 3
    """Layers of rotations on every qubit, each followed by a ring of CNOTs."""
    field: float = 1.0
    """Strength of the transverse field; the coupling is 1."""
    parts: int = 8
    """Parts of the angles, each of which is a sample."""

    batch_size: int = 8
    epochs: int = 200
    lr: float = 0.05
    optimizer: ls.OptimizerConfig = ls.OptimizerConfig(name="adam")
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=50)


class Ansatz(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.angles = nn.Parameter(0.3 * torch.randn(count, dtype=torch.float64))


class Ising(ls.Task):
    Config = IsingConfig
    config: IsingConfig

    def __init__(self, config: IsingConfig | None = None) -> None:
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
        terms: dict[str, float] = {}
        for letter, (strength, width) in letters.items():
            word = letter * width + "I" * (size - width)
            terms |= {word[i:] + word[:i]: strength for i in range(size) if strength}
        self.hamiltonian = PauliSum(terms)

    def build_model(self) -> Ansatz:
        return Ansatz(self.simulator.circuit.num_parameters)

    def dataset(self, split: str) -> TensorDataset | None:
        return TensorDataset(torch.arange(self.config.parts)) if split == "train" else None

    def loss(self, model: Ansatz, batch: tuple[Tensor]) -> ls.Loss:
        parts, count = self.config.parts, len(model.angles)
        total = torch.zeros((), dtype=torch.float64)
        for part in batch[0].tolist():
            only = share(count, part, parts)
            energy = shifted(self.simulator, model.angles, self.measure, only).sum()
            # Each part finds the whole energy, and its part of the gradient.
            total = total + energy.detach() / parts + (energy - energy.detach())
        return ls.Loss(total, len(batch[0]) / parts)

    def measure(self, states: Tensor) -> Tensor:
        return self.hamiltonian.expectation(states)[:, None]


if __name__ == "__main__":
    ls.main(Ising())
