"""Two towers as in CLIP: which left half of a digit belongs to which right half.

Each pair of a batch is told from all other pairs of the batch, by a temperature that is learned.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

Halves = tuple[Tensor, Tensor]
"""Left and right halves of images, each [B, 32]."""


class Towers(nn.Module):
    """Halves to what they are compared by, each [B, width], of length 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, width))
        self.right = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, width))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(left), dim=1), F.normalize(self.right(right), dim=1)


class ClipConfig(ls.TrainConfig):
    width: int = 32

    batch_size: int = 200
    num_microbatches: int = 8
    epochs: int = 10
    lr: float = 3e-3
    eval_every: int = 35
    eval_batch_size: int = 200


class Clip(ls.Task):
    Config = ClipConfig
    config: ClipConfig

    def build_model(self) -> Towers:
        return Towers(self.config.width)

    def dataset(self, split: str) -> TensorDataset:
        images, _ = load_digits(return_X_y=True)
        rows = {"train": slice(0, 1400), "val": slice(1400, 1600), "test": slice(1600, None)}[split]
        halves = torch.tensor(images[rows] / 16, dtype=torch.float32).view(-1, 8, 2, 4)
        return TensorDataset(halves[:, :, 0].flatten(1), halves[:, :, 1].flatten(1))

    def outputs(self, model: Towers, batch: Halves) -> dict[str, Tensor]:
        left, right = model(*batch)
        # One value for the whole batch: a row for each sample, of which the loss reads the first.
        return {"left": left, "right": right, "log_scale": model.log_scale.expand(len(left))}

    def batch_loss(self, outputs: dict[str, Tensor], batch: Halves) -> ls.Loss:
        left, right = outputs["left"], outputs["right"]
        scores = left @ right.T * outputs["log_scale"][0].exp()
        own = torch.arange(len(left), device=left.device)
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        matched = (scores.argmax(1) == own).sum()
        return ls.Loss.mean(loss, len(left), {"matched": (matched, len(left))})


if __name__ == "__main__":
    ls.main(Clip())
