"""CIFAR-10, CIFAR-100, or images in IDX files, with a small residual network.

A record of CIFAR-10 is a label and the pixels, plane by plane: red, green, blue. One of CIFAR-100
has a coarse and a fine label before them (https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config import (
    NO_OUTCOME,
    Fraction,
    NonNegativeFloat,
    OptimizerConfig,
    Positive,
    ScheduleConfig,
    TrainConfig,
)
from lockstep.config.files import open_to_read
from lockstep.data.images import (
    Labelled,
    hold_out,
    idx_digits,
    mean_and_deviation,
    num_classes,
    simple_classifiers,
)
from lockstep.data.random import generator
from lockstep.engine.task import Loss, Task
from lockstep.errors import ConfigError, DataError

SIZE = 32
"""Pixels of an image from side to side."""
_PIXELS = 3 * SIZE * SIZE


class _Kind(NamedTuple):
    """A dataset.

    Attributes:
        name: its name.
        classes: number of labels.
        label_bytes: bytes before the pixels, the last of which is the label.
        train: names of the training files.
        test: name of the test file.
    """

    name: str
    classes: int
    label_bytes: int
    train: tuple[str, ...]
    test: str


_KINDS = (
    _Kind("CIFAR-10", 10, 1, tuple(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"),
    _Kind("CIFAR-100", 100, 2, ("train.bin",), "test.bin"),
)


def has_cifar(folder: Path) -> bool:
    """Whether a folder has a training file of CIFAR-10 or CIFAR-100."""
    return any((folder / name).exists() for kind in _KINDS for name in kind.train)


def read_cifar(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The images and labels of `train` and `test`.

    Args:
        folder: folder with the unpacked files of CIFAR-10 or CIFAR-100, binary version.

    Returns:
        Images [N, 3, 32, 32] as uint8 and labels [N] as int64, by split.

    Raises:
        DataError: a file is missing or damaged.
    """
    kind = next(k for k in _KINDS if any((folder / name).exists() for name in k.train))
    parts = [_read(folder / name, kind) for name in kind.train]
    images, labels = (torch.cat(list(part)) for part in zip(*parts, strict=True))
    return {"train": (images, labels), "test": _read(folder / kind.test, kind)}


def _read(path: Path, kind: _Kind) -> tuple[Tensor, Tensor]:
    """The images and labels of one file.

    Raises:
        DataError: it is missing, unreadable, or not such a file.
    """
    record = kind.label_bytes + _PIXELS
    try:
        with open_to_read(path, follow_links=True) as file:
            content = bytearray(file.read())
    except FileNotFoundError:
        raise DataError(
            f"{path}: is missing; {kind.name} (binary version) has {', '.join(kind.train)} and "
            f"{kind.test}"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not content or len(content) % record:
        raise DataError(
            f"{path}: has {len(content):,} bytes; a file of {kind.name} has a multiple of "
            f"{record:,}"
        )
    rows = torch.from_numpy(np.frombuffer(content, np.uint8)).view(-1, record)
    labels = rows[:, kind.label_bytes - 1].long()
    wrong = (labels >= kind.classes).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise DataError(
            f"{path}: record {index}: label {int(labels[index])}; {kind.name} has labels from 0 to "
            f"{kind.classes - 1}"
        )
    return rows[:, kind.label_bytes :].reshape(-1, 3, SIZE, SIZE).clone(), labels


def augmented(images: Tensor, shift: int, generator: torch.Generator) -> Tensor:
    """Images mirrored at random, and shifted by up to `shift` pixels in both directions.

    Args:
        images: [N, C, H, W]; pixels from outside an image are 0.
        shift: largest shift in pixels.
        generator: generator of the microbatch, on the CPU, so that all devices draw the same.

    Returns:
        Images of the same shape and dtype.
    """
    count, _, height, width = images.shape
    mirrored = torch.rand(count, generator=generator) < 0.5
    offsets = torch.randint(0, 2 * shift + 1, (2, count, 1), generator=generator)
    rows = offsets[0] + torch.arange(height)
    columns = offsets[1] + torch.arange(width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = F.pad(images, (shift,) * 4)
    index = torch.arange(count)[:, None, None].to(images.device)
    rows, columns = rows[:, :, None].to(images.device), columns[:, None, :].to(images.device)
    return padded.permute(0, 2, 3, 1)[index, rows, columns].permute(0, 3, 1, 2).contiguous()


_STAGES = 3


class ResidualNetwork(nn.Module):
    """Three stages of residual blocks, the second and third at half the size and twice the width.

    The mean over an image has a deterministic gradient on GPUs, unlike adaptive pooling.
    """

    def __init__(self, channels: int, width: int, depth: int, classes: int) -> None:
        """Create the layers.

        Args:
            channels: channels of an image.
            width: channels of the first stage.
            depth: number of layers with weights along the longest path: 6n + 2.
            classes: number of labels.
        """
        super().__init__()
        num_blocks = (depth - 2) // (2 * _STAGES)
        layers: list[nn.Module] = [*_convolution(channels, width, 1), nn.ReLU()]
        before = width
        for stage in range(_STAGES):
            for block in range(num_blocks):
                stride = 2 if stage and not block else 1
                layers.append(_Block(before, width << stage, stride))
                before = width << stage
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, channels, H, W], float32."""
        features: Tensor = self.features(images)
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *_convolution(inputs, outputs, stride), nn.ReLU(), *_convolution(outputs, outputs, 1)
        )
        self.around: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.around = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.relu(self.inner(images) + self.around(images))
        return result


def _convolution(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class CifarConfig(TrainConfig):
    """The keys of the network and its data, and defaults that suit them."""

    data_dir: Path | None = Field(default=None, json_schema_extra=NO_OUTCOME)
    """A folder with the binary files of CIFAR-10 or CIFAR-100, or with IDX files such as those of
    Fashion-MNIST; needed."""
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
        classes = num_classes(self._splits)
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

    def baselines(self, model: nn.Module, split: str) -> dict[str, dict[str, float]]:
        """What simple classifiers of the same pixels reach."""
        return simple_classifiers(self._splits["train"], self._splits[split])

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
            by_split = read_cifar(folder)
        else:
            grey = idx_digits(folder)
            by_split = {name: (images[:, None], labels) for name, (images, labels) in grey.items()}
        return hold_out(by_split, self.config.val_fraction, self.config.test_fraction)
