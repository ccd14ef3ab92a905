"""Phases of spin chains, told apart by a variational circuit that is given their ground states.

H = -Σ J_i Z_i Z_{i+1} - Σ h_i X_i on a ring, with random couplings and fields. It is ordered if
Σ ln J > Σ ln h (Pfeuty, Phys. Lett. A 72, 245 (1979): exact for long chains). The circuit has the
same angles on each site, and the mean of Z behind it decides.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.quantum import Circuit, Simulator, gate, parameter


class PhasesConfig(ls.TrainConfig):
    num_qubits: int = 6
    """Length of the ring."""
    num_layers: int = 3
    """Layers of the circuit, of four angles each."""
    disorder: float = 0.8
    """Deviation of ln J and ln h from site to site."""
    num_train: int = 40
    """Training states; 100 others are for validation and 400 for the test."""
    shots: int = 0
    """Measurements of each state; 0 for exact expectation values."""

    batch_size: int = 20
    epochs: int = 100
    lr: float = 0.05
    optimizer: ls.OptimizerConfig = ls.OptimizerConfig(name="adam")
    eval_every: int = 50
    watch: str = "accuracy"
    watch_mode: Literal["min", "max"] = "max"


def chains(count: int, num_qubits: int, disorder: float, seed: int) -> tuple[Tensor, Tensor]:
    """Ground states [count, 2^n], complex, and whether they are ordered, [count], 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    size = 1 << num_qubits
    basis = torch.arange(size)
    spins = 1.0 - 2 * ((basis[:, None] >> torch.arange(num_qubits)) & 1).double()
    pairs = spins * spins.roll(-1, 1)
    flips = basis[:, None] ^ (1 << torch.arange(num_qubits))
    states, labels = [], []
    for _ in range(count):
        logs = disorder * torch.randn(2, num_qubits, generator=generator, dtype=torch.float64)
        logs[0] += 1.5 * (2 * torch.rand(1, generator=generator, dtype=torch.float64) - 1)
        couplings, fields = logs.exp()
        energy = torch.diag(-pairs @ couplings)
        energy[basis[:, None], flips] -= fields
        # Of the two lowest states of an ordered chain, the one that is even under the flip of all.
        energy[basis, size - 1 - basis] -= 100
        states.append(torch.linalg.eigh(energy).eigenvectors[:, 0])
        labels.append(float(logs[0].sum() > logs[1].sum()))
    return torch.stack(states).to(torch.complex64), torch.tensor(labels)


def circuit(num_qubits: int, num_layers: int) -> Circuit:
    """Layers with the same angles on each site, and a last turn."""
    gates, sites = [], range(num_qubits)
    for layer in range(num_layers):
        turns, bond = [parameter(4 * layer + n) for n in range(3)], parameter(4 * layer + 3)
        for name, angle in zip(("rx", "rz", "rx"), turns, strict=True):
            gates += [gate(name, site, angle=angle) for site in sites]
        gates += [gate("rzz", site, (site + 1) % num_qubits, angle=bond) for site in sites]
    last = parameter(4 * num_layers)
    return Circuit(num_qubits, [*gates, *(gate("ry", site, angle=last) for site in sites)])


class Classifier(nn.Module):
    def __init__(self, num_angles: int) -> None:
        super().__init__()
        self.angles = nn.Parameter(0.3 * torch.randn(num_angles))
        self.line = nn.Parameter(torch.tensor([10.0, 0.0]))


class Phases(ls.Task):
    Config = PhasesConfig
    config: PhasesConfig
    scratch = ("task.simulator",)  # its work memory grows with the batch

    def __init__(self, config: PhasesConfig | None = None) -> None:
        super().__init__(config)
        size = self.config.num_qubits
        self.simulator = Simulator(circuit(size, self.config.num_layers), dtype=torch.complex64)
        bits = (torch.arange(1 << size)[:, None] >> torch.arange(size)) & 1
        self.outcomes = (1 - 2 * bits.float()).mean(1)

    def build_model(self) -> Classifier:
        return Classifier(self.simulator.circuit.num_parameters)

    def dataset(self, split: str) -> TensorDataset | None:
        counts = {"train": self.config.num_train, "val": 100, "test": 400}
        if split not in counts:
            return None
        seed = 3 * self.config.seed + [*counts].index(split)
        return TensorDataset(
            *chains(counts[split], self.config.num_qubits, self.config.disorder, seed)
        )

    def logits(self, model: Classifier, states: Tensor) -> Tensor:
        probabilities = self.simulator.state(model.angles, states).abs().square()
        values = probabilities @ self.outcomes
        if self.config.shots:
            drawn = torch.multinomial(probabilities.detach(), self.config.shots, replacement=True)
            # The value is measured; the gradient is exact.
            values = values + (self.outcomes[drawn].mean(1) - values).detach()
        return model.line[0] * values + model.line[1]

    def loss(self, model: Classifier, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        states, labels = batch
        logits = self.logits(model, states)
        total = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        correct = ((logits > 0) == (labels > 0)).sum()
        return ls.Loss(total, len(labels), {"accuracy": (correct, len(labels))})


if __name__ == "__main__":
    ls.main(Phases())
