"""Contrastive learning as in SimCLR: each digit is told from all others of the batch."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls


class SimclrConfig(ls.TrainConfig):
    width: int = 64
    temperature: float = 0.2

    batch_size: int = 256
    num_microbatches: int = 8
    epochs: int = 30
    lr: float = 3e-3
    eval_every: int = 50
    eval_batch_size: int = 200


class Encoder(nn.Module):
    """Images [B, 1, 8, 8] to what they are compared by [B, 32], of length 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width // 2, 3, padding=1), nn.BatchNorm2d(width // 2), nn.ReLU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * width, width),
        )  # fmt: skip
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(width, 32))

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.head(self.features(images)), dim=1)


def view(images: Tensor) -> Tensor:
    """Each image moved by up to a pixel, turned and stretched a little, with noise [B, 1, 8, 8]."""
    count = len(images)
    turn = torch.eye(2) + 0.15 * torch.randn(count, 2, 2)
    move = torch.empty(count, 2, 1).uniform_(-0.25, 0.25)
    grid = F.affine_grid(torch.cat([turn, move], 2), list(images.shape), align_corners=False)
    seen = F.grid_sample(images, grid, align_corners=False)
    return seen + 0.1 * torch.randn_like(seen)


class Simclr(ls.Task):
    Config = SimclrConfig
    config: SimclrConfig

    def build_model(self) -> Encoder:
        return Encoder(self.config.width)

    def dataset(self, split: str) -> TensorDataset:
        images, labels = load_digits(return_X_y=True)
        rows = {"train": slice(0, 1400), "val": slice(1400, 1600), "test": slice(1600, None)}[split]
        pixels = torch.tensor(images[rows] / 16, dtype=torch.float32)
        return TensorDataset(pixels.view(-1, 1, 8, 8), torch.tensor(labels[rows]))

    def outputs(self, model: Encoder, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Two views of each image of a microbatch."""
        images, _ = batch
        return model(view(images)), model(view(images))

    def batch_loss(self, outputs: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> ls.Loss:
        """Tell the other view of each image from all other views of the whole batch."""
        views = torch.cat(outputs)
        count = len(views) // 2
        scores = views @ views.T / self.config.temperature
        scores.fill_diagonal_(float("-inf"))
        partner = torch.arange(2 * count, device=views.device).roll(count)
        first = (scores.argmax(1) == partner).sum()
        loss = F.cross_entropy(scores, partner)
        return ls.Loss.mean(loss, count, {"found": (first, 2 * count)})

    def evaluate(self, model: Encoder, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        """How often the image that is most like another one shows the same digit."""
        images, labels = batch
        loss = self.loss(model, batch)
        features = F.normalize(model.features(images), dim=1)
        alike = (features @ features.T).fill_diagonal_(-1).argmax(1)
        same = (labels[alike] == labels).sum()
        return ls.Loss(loss.sum, loss.weight, {**loss.metrics, "same_digit": (same, len(labels))})


if __name__ == "__main__":
    ls.main(Simclr())
