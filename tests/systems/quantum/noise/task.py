"""A task whose loss is found by trajectories: each sample is an input of the circuit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.quantum import (
    DynamicCircuit,
    If,
    Measure,
    PauliSum,
    Reset,
    TrajectorySimulator,
    channel,
    gate,
    parameter,
)


class NoisyConfig(ls.TrainConfig):
    shots: int = 5
    batch_size: int = 8
    num_microbatches: int = 4
    steps: int | None = 5
    lr: float = 0.1


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, dtype=torch.float64))


class Noisy(ls.Task):
    Config = NoisyConfig
    config: NoisyConfig

    def __init__(self, config: NoisyConfig | None = None) -> None:
        super().__init__(config)
        operations = [
            gate("ry", 0, angle=parameter(0)), gate("rx", 1, angle=parameter(1)),
            gate("cx", 0, 1), channel("AmplitudeDamping", 1, gamma=0.2),
            Measure(0, 0, ((0.9, 0.1), (0.1, 0.9))),
            If((0,), 1, (gate("ry", 1, angle=parameter(2)),), (Reset(0),)),
            gate("rxx", 0, 1, angle=parameter(3)), channel("DepolarizingChannel", 0, p=0.1),
        ]  # fmt: skip
        self.simulator = TrajectorySimulator(DynamicCircuit(2, operations))
        self.energy = PauliSum({"ZZ": 1.0, "XI": 0.5})

    def build_model(self) -> Weights:
        return Weights()

    def dataset(self, split: str) -> TensorDataset | None:
        inputs = torch.linspace(0, 3, 32, dtype=torch.float64)[:, None]
        return TensorDataset(inputs) if split == "train" else None

    def loss(self, model: Weights, batch: tuple[Tensor]) -> ls.Loss:
        (inputs,) = batch
        weights = model.weights.expand(len(inputs), -1)
        shots = self.simulator.run(torch.cat([inputs, weights], 1), self.config.shots)
        return ls.Loss(shots.expectation(self.energy).mean(-1).sum(), len(inputs))


if __name__ == "__main__":
    ls.main(Noisy())
