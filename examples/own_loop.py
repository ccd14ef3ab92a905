"""A loop of one's own: two spirals, whose training the script itself follows step by step."""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls


class SpiralsConfig(ls.TrainConfig):
    width: int = 64
    goal: float = 0.99
    """The accuracy on the validation split at which the run is complete."""

    batch_size: int = 64
    epochs: int = 40
    lr: float = 0.01
    watch: str = "loss"


def spirals(num_points: int, seed: int) -> TensorDataset:
    """Points [N, 2] of two spirals, with noise, and the spiral of each [N]."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_points) % 2
    radius = torch.rand(num_points, generator=random)
    angle = 3 * math.pi * radius + math.pi * labels
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return TensorDataset(points + 0.02 * torch.randn(points.shape, generator=random), labels)


class Spirals(ls.Task):
    Config = SpiralsConfig
    config: SpiralsConfig

    def build_model(self) -> nn.Module:
        width = self.config.width
        return nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    def dataset(self, split: str) -> TensorDataset | None:
        sizes = {"train": (1600, 1), "val": (400, 2)}
        return spirals(*sizes[split]) if split in sizes else None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        points, labels = batch
        logits = model(points)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum()
        return ls.Loss(loss, len(labels), {"accuracy": (correct, len(labels))})


def chart(model: nn.Module, size: int = 25) -> str:
    """What the model says of points in the plane, one sign for each."""
    ticks = torch.linspace(-1, 1, size)
    plane = torch.cartesian_prod(-ticks, ticks)[:, [1, 0]]
    with torch.no_grad():
        rows = model(plane).argmax(1).view(size, size).tolist()
    return "\n".join("".join(".#"[label] * 2 for label in row) for row in rows)


if __name__ == "__main__":
    task = Spirals()
    for step in ls.steps(task):
        if step.number % 25 == 0:
            ls.log("weights", sum(p.detach().norm() for p in step.model.parameters()))
        if not step.evaluated:
            continue
        accuracy = step.evaluated["val/accuracy"]
        if step.is_first and step.epoch % 5 == 0:  # every rank runs this loop: one of them prints
            print(f"{step.number}: {accuracy:.1%} of new points\n{chart(step.model)}", flush=True)
        if accuracy >= task.config.goal:
            step.stop(f"accuracy {accuracy:.1%}")
