"""Learning to rank: patients by how far their disease will go, compared pair by pair."""

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

Patients = tuple[Tensor, Tensor]
"""Measurements [B, 10], and how far the disease was a year later [B]."""


class Ranking(ls.Task):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def dataset(self, split: str) -> TensorDataset:
        measured, progress = map(torch.tensor, load_diabetes(return_X_y=True))
        rows = {"train": slice(0, 300), "val": slice(300, 370), "test": slice(370, None)}[split]
        columns = measured[rows] / measured[:300].std(0)
        return TensorDataset(columns.float(), progress[rows].float())

    def outputs(self, model: nn.Module, batch: Patients) -> Tensor:
        scores: Tensor = model(batch[0]).squeeze(1)
        return scores

    def batch_loss(self, outputs: Tensor, batch: Patients) -> ls.Loss:
        """The loss of RankNet, over all pairs of the batch whose order is known."""
        _, progress = batch
        apart = outputs[:, None] - outputs
        further = progress[:, None] > progress
        loss = F.softplus(-apart[further]).sum()
        right = (apart[further] > 0).sum()
        num_pairs = further.sum()
        return ls.Loss(loss, num_pairs, {"in_order": (right, num_pairs)})


if __name__ == "__main__":
    config = ls.TrainConfig(
        batch_size=100, num_microbatches=4, epochs=40, lr=3e-3, eval_every=30, watch="in_order",
        watch_mode="max",
    )  # fmt: skip
    ls.main(Ranking(), config)
