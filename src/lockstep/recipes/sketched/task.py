"""Handwritten digits, learnt with dense, sketched or mixed layers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.engine.task import Loss, Task
from lockstep.errors import DataError
from lockstep.recipes.images import (
    Labelled,
    embedded_digits,
    hold_out,
    idx_digits,
    mean_and_deviation,
)
from lockstep.recipes.sketched.config import SketchedConfig
from lockstep.recipes.sketched.models import mlp, transformer


class Sketched(Task):
    """Handwritten digits with sketched layers: a perceptron or a transformer."""

    Config = SketchedConfig
    config: SketchedConfig

    def build_model(self) -> nn.Module:
        """The network `config.model` names: images [N, 1, S, S] to logits [N, classes].

        Raises:
            ConfigError: `low_rank` is larger than a layer.
        """
        classes = 1 + max(int(labels.max()) for _, labels in self._splits.values())
        if self.config.model == "mlp":
            return mlp(self.config, self.config.image_size**2, classes)
        return transformer(self.config, classes)

    def dataset(self, split: str) -> TensorDataset | None:
        """Images [N, 1, S, S] as float32 with mean 0 and deviation 1, labels [N] as int64.

        Raises:
            ConfigError: scikit-learn, which has the built-in images, is not installed.
            DataError: a file in `config.data_dir` is missing, damaged or does not fit the others.
        """
        if split not in self._splits:
            return None
        images, labels = self._splits[split]
        mean, deviation = mean_and_deviation(self._splits["train"][0])
        if deviation == 0:
            raise DataError(f"data_dir={self.config.data_dir}: all training pixels are {mean:g}")
        normal = ((images.float() - mean) / deviation).unsqueeze(1)
        size = (self.config.image_size,) * 2
        return TensorDataset(F.interpolate(normal, size, mode="bilinear"), labels)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Cross entropy and accuracy of a batch (images, labels)."""
        images, labels = batch
        logits = model(images)
        correct = (logits.argmax(dim=1) == labels).sum()
        return Loss(
            sum=F.cross_entropy(logits, labels, reduction="sum"),
            weight=len(labels),
            metrics={"accuracy": (correct, len(labels))},
        )

    @cached_property
    def _splits(self) -> dict[str, Labelled]:
        if self.config.data_dir is None:
            given = {"train": embedded_digits()}
        else:
            given = idx_digits(self.config.data_dir.expanduser())
        return hold_out(given, self.config.val_fraction, self.config.test_fraction)
