"""The binary files of CIFAR-10 and CIFAR-100: records of label bytes and 3 x 32 x 32 pixels.

A record of CIFAR-10 is a label and the pixels, plane by plane: red, green, blue. One of CIFAR-100
has a coarse and a fine label before them (https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.files import open_to_read

SIZE = 32
"""Pixels of an image from side to side."""
_PIXELS = 3 * SIZE * SIZE


@dataclass(frozen=True)
class _Kind:
    """A dataset.

    Attributes:
        name: what it is called.
        classes: number of labels.
        label_bytes: bytes before the pixels, the last of which is the label.
        train: names of the files to train with.
        test: name of the file to test with.
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
    """Whether a folder holds a file to train with of CIFAR-10 or CIFAR-100."""
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
        DataError: it is missing, cannot be read, or is no such file.
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
        place = int(wrong[0])
        raise DataError(
            f"{path}: record {place}: label {int(labels[place])}; {kind.name} has labels from 0 to "
            f"{kind.classes - 1}"
        )
    return rows[:, kind.label_bytes :].reshape(-1, 3, SIZE, SIZE).clone(), labels
