"""Two spirals, told apart by a small network; the same bits on any number of ranks.

`python task.py`, `lockstep train task.py -n 2` or `mpirun -n 2 python task.py` trains it.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls


class SpiralsConfig(ls.TrainConfig):
    """Keys: `lockstep config task.py` lists all, `lockstep train task.py width=32` sets one."""

    width: int = 64
    """Units of the hidden layer."""
    batch_size: int = 100  # in 8 microbatches, which the ranks share
    epochs: int = 50
    eval_every: int = 100
    lr: float = 0.02


class Spirals(ls.Task):
    """What is trained. Nothing in it mentions ranks."""

    Config = SpiralsConfig
    config: SpiralsConfig

    def build_model(self) -> nn.Module:
        """The network: points [N, 2] to logits [N, 2]."""
        width = self.config.width
        return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def dataset(self, split: str) -> TensorDataset:
        """The samples of `train`, `val` or `test`; it may be None for the last two."""
        random = torch.Generator().manual_seed(["train", "val", "test"].index(split))
        labels = torch.arange(1000) % 2
        radius = torch.rand(1000, generator=random)
        angle = 5 * radius + torch.pi * labels
        return TensorDataset(radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1), labels)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        """A sum over the batch and what it is to be divided by; metrics likewise."""
        points, labels = batch
        logits = model(points)
        correct = (logits.argmax(1) == labels).sum()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return ls.Loss(loss, len(labels), {"accuracy": (correct, len(labels))})


if __name__ == "__main__":
    ls.main(Spirals())
