"""Tasks that train layers, in every way that has a promise to keep."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.optim import LBFGS, SPSA, NaturalGradient, Perturbation, Rotosolve, Sweep
from lockstep.quantum import Circuit, Layer, gate, parameter

X = [parameter(0), parameter(1)]


def uploads() -> Circuit:
    """Both inputs in every layer, scaled by weights, and in a product."""
    gates, number = [], 2
    for _ in range(2):
        for qubit in range(2):
            gates.append(gate("ry", qubit, angle=X[qubit] * parameter(number) + 0.1))
            gates.append(gate("rz", qubit, angle=parameter(number + 1)))
            number += 2
        gates.append(gate("rzz", 0, 1, angle=(math.pi - X[0]) * (math.pi - X[1])))
        gates.append(gate("cx", 0, 1))
    return Circuit(2, gates)


def plain() -> Circuit:
    """The inputs once, then each weight in a gate of its own."""
    gates = [gate("ry", qubit, angle=X[qubit]) for qubit in range(2)]
    for number in range(2, 8, 2):
        gates += [gate("ry", q, angle=parameter(number + q, 0.5 + q)) for q in range(2)]
        gates.append(gate("cx", 0, 1))
    return Circuit(2, gates)


class LayersConfig(ls.TrainConfig):
    how: Literal["adam", "lbfgs", "natural", "spsa", "rotosolve"] = "adam"
    num_microbatches: int = 4
    batch_size: int = 24
    steps: int | None = 7
    lr: float = 0.1


class Model(nn.Module):
    """A linear layer, a circuit and a linear layer; or a circuit alone, with the same inputs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        if how == "adam":
            self.before, self.after = nn.Linear(3, 2), nn.Linear(3, 2)
            self.layer = Layer(uploads(), ["ZI", "XX", "IZ"], inputs=[0, 1])
        else:
            circuit = plain() if how == "rotosolve" else uploads()
            self.layer = Layer(circuit, ["ZZ"], inputs=[0, 1], dtype=torch.float64)
        if how == "spsa":
            self.perturbation = Perturbation(0.1)
        if how == "rotosolve":
            self.sweep = Sweep("layer.weights", self.layer.frequencies())


class Layers(ls.Task):
    Config = LayersConfig
    config: LayersConfig

    def build_model(self) -> Model:
        return Model(self.config.how)

    def dataset(self, split: str) -> TensorDataset | None:
        if split != "train":
            return None
        x = torch.randn(24, 3, generator=torch.Generator().manual_seed(5))
        return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())

    def loss(self, model: Model, batch: Any) -> ls.Loss:
        x, y = batch
        return ls.Loss(self.total(model, x, y), len(x))

    def total(self, model: Model, x: Tensor, y: Tensor) -> Tensor:
        if self.config.how == "adam":
            logits = model.after(model.layer(model.before(x)))
            return nn.functional.cross_entropy(logits, y, reduction="sum")

        def mismatch(own: Model) -> Tensor:
            return (own.layer(x[:, :2])[:, 0] * (1 - 2 * y)).sum()

        if self.config.how == "spsa":
            return model.perturbation(model, mismatch)
        if self.config.how == "rotosolve":
            return model.sweep(model, mismatch)
        return mismatch(model)

    def build_optimizer(self, model: Model) -> torch.optim.Optimizer:
        how, lr = self.config.how, self.config.lr
        if how == "lbfgs":
            return LBFGS(model.parameters(), lr=1.0, max_step=0.3)
        if how == "natural":
            x = self.dataset("train").tensors[0][:, :2]
            metric = partial(model.layer.metric, x, "block-diagonal")
            return NaturalGradient(model.layer.weights, metric, lr, damping=0.01)
        if how == "spsa":
            return SPSA(model.parameters(), model.perturbation, lr, stability=1)
        if how == "rotosolve":
            return Rotosolve(model.layer.weights, model.sweep)
        return torch.optim.Adam(model.parameters(), lr)


if __name__ == "__main__":
    ls.main(Layers())
