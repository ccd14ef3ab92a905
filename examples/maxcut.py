"""The greatest cut of a ring by QAOA, whose answers are known; each edge is a sample.

With p layers on a ring of more than 2p + 1 nodes the best expected share of cut edges is
(2p + 1) / (2p + 2) (Farhi, Goldstone and Gutmann, arXiv:1411.4028, section IV).
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.quantum import Circuit, Gate, PauliSum, Simulator, gate, parameter, probabilities


class MaxCutConfig(ls.TrainConfig):
    num_nodes: int = 10
    """Length of the ring."""
    num_layers: int = 3
    """Layers p of the circuit, each of two angles."""
    draws: int = 64
    """Bit strings that are measured in an evaluation, of which the best one counts."""

    batch_size: int = 10
    num_microbatches: int = 2
    epochs: int = 150
    lr: float = 0.05
    optimizer: ls.OptimizerConfig = ls.OptimizerConfig(name="adam")
    eval_every: int = 50
    eval_batch_size: int = 10
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=50)


def edges(num_nodes: int) -> list[tuple[int, int]]:
    return [(node, (node + 1) % num_nodes) for node in range(num_nodes)]


def alternating(num_nodes: int, num_layers: int) -> Circuit:
    """exp(-i γ C) and exp(-i β B) in turn, from equal amplitudes on; θ = [γ, β, γ, β, …]."""
    gates: list[Gate] = [gate("h", node) for node in range(num_nodes)]
    for layer in range(num_layers):
        gates += [gate("rzz", *edge, angle=parameter(2 * layer)) for edge in edges(num_nodes)]
        gates += [gate("rx", q, angle=parameter(2 * layer + 1, 2.0)) for q in range(num_nodes)]
    return Circuit(num_nodes, gates)


class Angles(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        ramp = (torch.arange(num_layers, dtype=torch.float64) + 0.5) / num_layers
        start = torch.stack([-0.7 * ramp, 0.7 * (1 - ramp)], 1)  # as a slow change from B to C
        self.angles = nn.Parameter(start.flatten() + 0.01 * torch.randn(2 * num_layers))


class MaxCut(ls.Task):
    Config = MaxCutConfig
    config: MaxCutConfig

    def __init__(self, config: MaxCutConfig | None = None) -> None:
        super().__init__(config)
        self.edges = edges(self.config.num_nodes)
        self.simulator = Simulator(alternating(self.config.num_nodes, self.config.num_layers))

    def build_model(self) -> Angles:
        return Angles(self.config.num_layers)

    def dataset(self, split: str) -> TensorDataset | None:
        return TensorDataset(torch.tensor(self.edges)) if split in ("train", "val") else None

    def loss(self, model: Angles, batch: tuple[Tensor]) -> ls.Loss:
        """Expected number of the batch's edges that are not cut."""
        (own,) = batch
        state = self.simulator.state(model.angles)
        cost = PauliSum({self.string(a, b): 0.5 for a, b in own.tolist()})  # (1 + Z Z) / 2
        return ls.Loss(cost.expectation(state) + len(own) / 2, len(own))

    def evaluate(self, model: Angles, batch: tuple[Tensor]) -> ls.Loss:
        """Beside the loss, `best`: the share of edges that the best of some bit strings cuts."""
        state = self.simulator.state(model.angles)
        drawn = torch.multinomial(probabilities(state), self.config.draws, replacement=True)
        cut = torch.stack([(drawn >> a & 1) ^ (drawn >> b & 1) for a, b in self.edges]).sum(0)
        loss = self.loss(model, batch)
        best = cut.max().double() / len(self.edges) * loss.weight
        return ls.Loss(loss.sum, loss.weight, {"best": (best, loss.weight)})

    def string(self, *nodes: int) -> str:
        return "".join("Z" if q in nodes else "I" for q in reversed(range(self.config.num_nodes)))


if __name__ == "__main__":
    ls.main(MaxCut())
