"""CIFAR-10, CIFAR-100, or images in IDX files, with a small residual network."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config import (
    NO_OUTCOME,
    NonNegativeFloat,
    OptimizerConfig,
    Positive,
    ScheduleConfig,
    TrainConfig,
)
from lockstep.data.cifar import has_cifar, read_cifar
from lockstep.data.random import generator
from lockstep.engine.task import Loss, Task
from lockstep.errors import ConfigError, DataError
from lockstep.recipes.cifar.augmentation import augmented
from lockstep.recipes.cifar.network import ResidualNetwork
from lockstep.recipes.images import Labelled, hold_out, idx_digits, mean_and_deviation

Fraction = Annotated[float, Field(ge=0, lt=0.5)]


class CifarConfig(TrainConfig):
    """The keys of the network and its data, and defaults that suit them."""

    data_dir: Path | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """A folder with the binary files of CIFAR-10 or CIFAR-100, or with IDX files such as those of
    Fashion-MNIST; needed. Other data in the same run is found out by the number of samples and the
    first microbatch."""
    depth: Literal[8, 14, 20, 32, 44, 56] = 20
    """Layers of the residual network."""
    width: Positive = 16
    """Channels of its first stage; the second and third have twice and four times as many."""
    augment: bool = True
    """Mirror training images and move them by up to `shift` pixels, at random."""
    shift: Annotated[int, Field(ge=0, le=16)] = 4
    """Pixels."""
    val_fraction: Fraction = 0.1
    """Part of the training images held out for validation; 0 for none."""
    test_fraction: Fraction = 0.1
    """Part held out for testing, where the data has no test set of its own; 0 for none."""

    batch_size: Positive = 128
    epochs: Positive = 60
    lr: NonNegativeFloat = 0.1
    optimizer: OptimizerConfig = OptimizerConfig(name="sgd", momentum=0.9, weight_decay=5e-4)
    schedule: ScheduleConfig = ScheduleConfig(name="cosine", warmup_steps=200)
    watch: str = "accuracy"
    watch_mode: Literal["min", "max"] = "max"


class Cifar(Task):
    """CIFAR-10 and images of its kind, with a small residual network and augmentation."""

    Config = CifarConfig
    config: CifarConfig

    def build_model(self) -> nn.Module:
        """A residual network: images [N, C, H, W] to logits [N, classes]."""
        classes = 1 + max(int(labels.max()) for _, labels in self._splits.values())
        channels = self._splits["train"][0].shape[1]
        return ResidualNetwork(channels, self.config.width, self.config.depth, classes)

    def dataset(self, split: str) -> TensorDataset | None:
        """Images [N, C, H, W] as uint8, labels [N] as int64.

        Raises:
            ConfigError: `config.data_dir` is not set.
            DataError: a file in it is missing, damaged or does not fit the others.
        """
        return TensorDataset(*self._splits[split]) if split in self._splits else None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Cross entropy and accuracy of a batch (images, labels); augmented in training."""
        images, labels = batch
        mean, deviation = (part.to(images.device) for part in self._moments)
        images = (images.float() - mean) / deviation
        if model.training and self.config.augment:
            images = augmented(images, self.config.shift, generator())
        logits = model(images)
        correct = (logits.argmax(dim=1) == labels).sum()
        return Loss(
            sum=F.cross_entropy(logits, labels, reduction="sum"),
            weight=len(labels),
            metrics={"accuracy": (correct, len(labels))},
        )

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel of the training images, [C, 1, 1]."""
        pixels = self._splits["train"][0]
        of_each = [mean_and_deviation(pixels[:, n]) for n in range(pixels.shape[1])]
        mean, deviation = torch.tensor(of_each).T[..., None, None]
        if not bool((deviation > 0).all()):
            raise DataError(f"data_dir={self.config.data_dir}: a channel of all images is constant")
        return mean, deviation

    @cached_property
    def _splits(self) -> dict[str, Labelled]:
        folder = self.config.data_dir
        if folder is None:
            raise ConfigError(
                "data_dir: is needed: a folder with the binary version of CIFAR-10 "
                "(data_batch_1.bin to data_batch_5.bin, test_batch.bin), or with IDX files such as "
                "Fashion-MNIST's (Debian's package dataset-fashion-mnist)"
            )
        folder = folder.expanduser()
        if has_cifar(folder):
            given = read_cifar(folder)
        else:
            grey = idx_digits(folder)
            given = {name: (images[:, None], labels) for name, (images, labels) in grey.items()}
        return hold_out(given, self.config.val_fraction, self.config.test_fraction)
