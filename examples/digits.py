"""Handwritten digits in thirty lines: run it with python, mpirun, torchrun or srun."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls


class Digits(ls.Task):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))

    def dataset(self, split: str) -> TensorDataset:
        images, labels = load_digits(return_X_y=True)
        rows = {"train": slice(0, 1400), "val": slice(1400, 1600), "test": slice(1600, None)}[split]
        return TensorDataset(
            torch.tensor(images[rows] / 16, dtype=torch.float32), torch.tensor(labels[rows])
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        images, labels = batch
        logits = model(images)
        correct = (logits.argmax(1) == labels).sum()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return ls.Loss(loss, len(labels), {"accuracy": (correct, len(labels))})


if __name__ == "__main__":
    ls.main(Digits(), ls.TrainConfig(batch_size=256, num_microbatches=8, epochs=20, lr=0.01))
