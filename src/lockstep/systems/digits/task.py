"""Handwritten digits: two small networks and real data. A good file to copy and change."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config import (
    NO_OUTCOME,
    Fraction,
    NonNegativeFloat,
    Positive,
    ScheduleConfig,
    TrainConfig,
)
from lockstep.data.images import (
    Labelled,
    embedded_digits,
    hold_out,
    idx_digits,
    num_classes,
    simple_classifiers,
    standardized,
)
from lockstep.engine.task import Loss, Task
from lockstep.nn import Pipeline, shard


class DigitsConfig(TrainConfig):
    """The keys of the model and its data, and defaults that suit them."""

    model: Literal["mlp", "cnn"] = "mlp"
    """A perceptron with one hidden layer, or a small convolutional network."""
    hidden: Positive = 512
    """Width of the mlp's hidden layer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Part of the activations that are dropped in training."""
    data_dir: Path | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """A folder with MNIST's IDX files; without it, scikit-learn's 1,797 images of 8x8 pixels."""
    val_fraction: Fraction = 0.1
    """Part of the images held out for validation; 0 for none."""
    test_fraction: Fraction = 0.1
    """Part held out for testing, where the data has no test set of its own; 0 for none."""

    batch_size: Positive = 128
    epochs: Positive = 30
    lr: NonNegativeFloat = 1e-2
    schedule: ScheduleConfig = ScheduleConfig(name="cosine", warmup_steps=20)
    watch: str = "accuracy"
    watch_mode: Literal["min", "max"] = "max"

    @model_validator(mode="after")
    def _axes_fit(self) -> DigitsConfig:
        if self.model == "mlp" and self.mesh.pp > 1 and self.num_shards > 1:
            raise ValueError(
                f"mesh.pp={self.mesh.pp}: model=mlp is in stages or in shards "
                f"(num_shards={self.num_shards}), not in both; set num_shards=1 or model=cnn"
            )
        return self


class Digits(Task):
    """Handwritten digits (scikit-learn's or MNIST), with a perceptron or a small CNN."""

    Config = DigitsConfig
    config: DigitsConfig

    def build_model(self) -> nn.Module:
        """The network `config.model` names: images [N, 1, H, W] to logits [N, classes]."""
        config, (height, width) = self.config, self._splits["train"][0].shape[1:]
        classes = num_classes(self._splits)
        is_cut = config.model == "mlp" and config.num_shards > 1
        # Workers of local steps, and features that are cut, pass a model as a whole.
        row: Row = nn.Sequential if is_cut or config.local.steps > 1 else Pipeline
        if config.model == "cnn":
            return shard(cnn(height, width, classes, config.dropout, row), {"10": "vocabulary"})
        model = mlp(height * width, config.hidden, classes, config.dropout, row)
        return shard(model, {"1": "column", "4": "row"}) if is_cut else model

    def dataset(self, split: str) -> TensorDataset | None:
        """Images [N, 1, H, W] as float32 with mean 0 and deviation 1, labels [N] as int64.

        Raises:
            ConfigError: scikit-learn, which has the built-in images, is not installed.
            DataError: a file in `config.data_dir` is missing, damaged or does not fit the others.
        """
        if split not in self._splits:
            return None
        images, labels = self._splits[split]
        pixels = standardized(images, self._splits["train"][0], self.config.data_dir)
        return TensorDataset(pixels, labels)

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

    def baselines(self, model: nn.Module, split: str) -> dict[str, dict[str, float]]:
        """What simple classifiers of the same pixels reach."""
        return simple_classifiers(self._splits["train"], self._splits[split])

    @cached_property
    def _splits(self) -> dict[str, Labelled]:
        if self.config.data_dir is None:
            by_split = {"train": embedded_digits()}
        else:
            by_split = idx_digits(self.config.data_dir.expanduser())
        return hold_out(by_split, self.config.val_fraction, self.config.test_fraction)


Row = Callable[..., nn.Module]
"""Makes a model of layers in a row."""


def mlp(
    pixels: int, hidden: int, classes: int, dropout: float, row: Row = nn.Sequential
) -> nn.Module:
    """A perceptron with one hidden layer.

    Args:
        pixels: number of pixels of an image.
        hidden: width of the hidden layer.
        classes: number of classes.
        dropout: probability of dropout after the hidden layer, in [0, 1).
        row: makes the model of its layers.

    Returns:
        A module from images [N, 1, H, W] to logits [N, classes], float32.
    """
    return row(
        nn.Flatten(),
        nn.Linear(pixels, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )


def cnn(
    height: int, width: int, classes: int, dropout: float, row: Row = nn.Sequential
) -> nn.Module:
    """Two blocks of convolution, batch norm and pooling, and a linear classifier.

    Pooling has a fixed window: the adaptive kind has no deterministic gradient on GPUs.

    Args:
        height: height of an image in pixels.
        width: width of an image in pixels.
        classes: number of classes.
        dropout: probability of dropout before the classifier, in [0, 1).
        row: makes the model of its layers.

    Returns:
        A module from images [N, 1, H, W] to logits [N, classes], float32.
    """

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.AvgPool2d(2, ceil_mode=True),
        ]

    features = 64 * -(-height // 4) * -(-width // 4)
    return row(
        *block(1, 32),
        *block(32, 64),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(features, classes),
    )
