"""Tabular data: is a tumour malignant? 569 patients, 30 measurements of cell nuclei each.

The data come with scikit-learn (Breast Cancer Wisconsin, Street, Wolberg and Mangasarian, 1993).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
import torchmetrics
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls

SPLIT_SEED = 569
"""Not `config.seed`: runs with other seeds must be tested on the same patients."""


class TabularConfig(ls.TrainConfig):
    width: int = 32
    """Units of the hidden layer."""
    dropout: float = 0.2
    malignant_weight: float = 2.0
    """What a malignant tumour counts for in the loss, since to miss one is worse."""

    batch_size: int = 64
    epochs: int = 30
    lr: float = 0.005
    optimizer: ls.OptimizerConfig = ls.OptimizerConfig(weight_decay=0.01)
    watch: str = "accuracy"
    watch_mode: Literal["min", "max"] = "max"
    early_stopping: ls.EarlyStoppingConfig = ls.EarlyStoppingConfig(patience=10)


class Tabular(ls.Task):
    Config = TabularConfig
    config: TabularConfig

    def build_model(self) -> nn.Module:
        """Measurements [N, 30] to a logit [N, 1] of malignancy."""
        width = self.config.width
        return nn.Sequential(
            nn.Linear(30, width), nn.ReLU(), nn.Dropout(self.config.dropout), nn.Linear(width, 1)
        )

    @cached_property
    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Measurements [N, 30], scaled by mean and deviation of the training rows, and labels."""
        values, labels = load_breast_cancer(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
        table = torch.tensor(values)[order]
        malignant = torch.tensor(labels)[order] == 0
        deviation, mean = torch.std_mean(table[:400], 0)
        table = ((table - mean) / deviation).float()
        rows = {"train": slice(0, 400), "val": slice(400, 480), "test": slice(480, None)}
        return {split: (table[part], malignant[part]) for split, part in rows.items()}

    def dataset(self, split: str) -> TensorDataset:
        return TensorDataset(*self.parts[split])

    def metrics(self) -> Mapping[str, torchmetrics.Metric]:
        return {
            "f1": torchmetrics.F1Score(task="binary"),
            "auroc": torchmetrics.AUROC(task="binary"),
            "confusion": torchmetrics.ConfusionMatrix(task="binary"),
        }

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        values, malignant = batch
        return self.loss_of(model(values).squeeze(1), malignant)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        values, malignant = batch
        logits = model(values).squeeze(1)
        judged = logits.sigmoid(), malignant.long()
        updates = {"f1": judged, "auroc": judged, "confusion": judged}
        return replace(self.loss_of(logits, malignant), updates=updates)

    def loss_of(self, logits: Tensor, malignant: Tensor) -> ls.Loss:
        """The weighted loss and the metrics that are ratios, of logits [N] and labels [N]."""
        each = nn.functional.binary_cross_entropy_with_logits(
            logits, malignant.float(), reduction="none"
        )
        weights = torch.where(malignant, self.config.malignant_weight, 1.0)
        correct = (logits > 0) == malignant
        return ls.Loss(
            (weights * each).sum(),
            weights.sum(),
            {
                "accuracy": (correct.sum(), len(correct)),
                "sensitivity": (correct[malignant].sum(), malignant.sum()),
                "specificity": (correct[~malignant].sum(), (~malignant).sum()),
            },
        )


if __name__ == "__main__":
    ls.main(Tabular())
