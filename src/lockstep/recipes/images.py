"""Images of handwritten digits, for the recipes that learn them: scikit-learn's, or IDX files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.data.idx import read_labelled
from lockstep.errors import ConfigError, DataError

SPLIT_SEED = 1797
"""Not `config.seed`: runs with different seeds must be tested on the same images."""

Labelled = tuple[Tensor, Tensor]
"""Images [N, H, W] as uint8 and labels [N] as int64."""


def embedded_digits() -> Labelled:
    """The 1,797 images of 8x8 pixels that come with scikit-learn.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "data_dir is not set, and the built-in digits need scikit-learn: "
            'pip install "lockstep-train[recipes]"'
        )
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():  # to import scikit-learn takes 30 times as long as to read its file
        rows = torch.from_numpy(np.loadtxt(file, delimiter=","))
        return rows[:, :-1].view(-1, 8, 8).to(torch.uint8), rows[:, -1].long()
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.from_numpy(digits.images).to(torch.uint8), torch.from_numpy(digits.target).long()


def idx_digits(folder: Path) -> dict[str, Labelled]:
    """MNIST's files: `train` and `test`, or all as `train` where only `t10k-*` is there.

    Raises:
        DataError: a file is missing or damaged, or train and test images differ in size.
    """
    t10k = read_labelled(folder, "t10k")
    if not any(folder.glob("train-*")):
        return {"train": t10k}
    train = read_labelled(folder, "train")
    if train[0].shape[1:] != t10k[0].shape[1:]:
        sizes = " and ".join("x".join(map(str, images.shape[1:])) for images in (train[0], t10k[0]))
        raise DataError(f"{folder}: train and t10k images differ in size: {sizes} pixels")
    return {"train": train, "test": t10k}


def mean_and_deviation(pixels: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of uint8 values, the same to the bit with any threads."""
    # Counting is exact in any order; a sum of millions of floats is not.
    counts = torch.bincount(pixels.flatten()).double()
    values = torch.arange(len(counts))
    mean = (counts * values).sum() / pixels.numel()
    variance = (counts * (values - mean).square()).sum() / pixels.numel()
    return float(mean), float(variance.sqrt())


def hold_out(given: dict[str, Labelled], val: float, test: float) -> dict[str, Labelled]:
    """`given` with val, and test where there is none, taken out of train.

    Every class is held out in proportion. The rows depend on the labels and the fractions only.

    Args:
        given: images and labels of `train`, and perhaps of `test`.
        val: part of the images for validation, 0 for none.
        test: part of the images for testing, 0 for none.

    Raises:
        DataError: no training image is left.
    """
    images, labels = given["train"]
    fractions = {"val": val, "test": test}
    counts = {
        name: max(1, round(fraction * len(labels))) if fraction else 0
        for name, fraction in fractions.items()
        if name not in given
    }
    if sum(counts.values()) >= len(labels):
        wanted = " and ".join(f"{count} for {name}" for name, count in counts.items())
        raise DataError(f"{len(labels)} labelled images are too few to hold out {wanted}")
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    rows = shuffled[labels[shuffled].argsort(stable=True)]
    splits = dict(given)
    for name, count in counts.items():
        # Evenly spaced rows of an order sorted by class: the same part of each class.
        held = (2 * torch.arange(count) + 1) * len(rows) // max(1, 2 * count)
        splits[name] = (images[rows[held]], labels[rows[held]])
        kept = torch.ones(len(rows), dtype=torch.bool)
        kept[held] = False
        rows = rows[kept]
    splits["train"] = (images[rows], labels[rows])
    return {name: split for name, split in splits.items() if len(split[1])}
