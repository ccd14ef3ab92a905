"""A small CNN that reads digits is fine-tuned to say which of them have a closed loop.

Its body starts from the weights of another run: the first convolution stays as it is, the second
one learns slowly, and a new classifier learns at the full rate. Few labelled images will do.
"""

from pathlib import Path
from typing import Any, Literal, cast

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls

SPLIT_SEED = 1797
"""Not `config.seed`: runs with other seeds must be tested on the same images."""


class FinetuneConfig(ls.TrainConfig):
    label: Literal["digit", "loop"] = "digit"
    """What is learned: the digit, or whether it has a closed loop, as 0, 6, 8 and 9 have."""
    start_from: Path | None = None
    """The directory of a run whose best weights the body starts from; random ones without it."""
    num_train: int = 1000
    """Images to learn from, at most 1000."""
    body_lr_ratio: float = 0.3
    """Learning rate of a body that has started from given weights, as a part of `lr`."""

    batch_size: int = 64
    epochs: int = 30
    lr: float = 0.01
    schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="cosine", warmup_steps=10)
    watch: str = "accuracy"
    watch_mode: Literal["min", "max"] = "max"


class Net(nn.Module):
    """Images [N, 1, 8, 8] to logits [N, num_classes]."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2))
        self.classifier = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.second(self.first(images)).flatten(1)))


class Finetune(ls.Task):
    Config = FinetuneConfig
    config: FinetuneConfig

    def build_model(self) -> Net:
        model = Net(10 if self.config.label == "digit" else 2)
        if self.config.start_from:
            given = ls.load(self.config.start_from, "best").model.state_dict()
            body = {name: w for name, w in given.items() if not name.startswith("classifier.")}
            model.load_state_dict(body, strict=False)
            model.first.requires_grad_(False)
        return model

    def build_optimizer(self, model: Net) -> torch.optim.Optimizer:
        ratio = self.config.body_lr_ratio if self.config.start_from else 1.0
        body = [*model.first.parameters(), *model.second.parameters()]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in body if p.requires_grad], "lr": ratio * self.config.lr},
            {"params": model.classifier.parameters(), "lr": self.config.lr},
        ]
        return torch.optim.AdamW(groups)

    def dataset(self, split: str) -> TensorDataset:
        images, digits = map(torch.tensor, load_digits(return_X_y=True))
        labels = digits
        if self.config.label == "loop":
            labels = torch.isin(digits, torch.tensor([0, 6, 8, 9])).long()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
        end = self.config.num_train
        part = {"train": slice(0, end), "val": slice(1000, 1300), "test": slice(1300, None)}[split]
        images = images[order[part]].float().view(-1, 1, 8, 8) / 16
        return TensorDataset(images, labels[order[part]])

    def loss(self, model: Net, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        images, labels = batch
        logits = model(images)
        correct = (logits.argmax(1) == labels).sum()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return ls.Loss(loss, len(labels), {"accuracy": (correct, len(labels))})


if __name__ == "__main__":
    ls.main(Finetune())
