"""Files of CIFAR, as its page describes them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.systems.cifar.task import has_cifar, read_cifar

BATCHES = [f"data_batch_{n}.bin" for n in range(1, 6)]


def record(number: int, label_bytes: int = 1, classes: int = 10) -> bytes:
    """A label and an image of which each pixel tells its place."""
    labels = [number % 20, number % classes][-label_bytes:]
    rows = product(range(3), range(32), range(32))
    pixels = [(number + 7 * c + 3 * y + x) % 251 for c, y, x in rows]
    return bytes([*labels, *pixels])


def cifar(folder: Path, count: int = 2) -> Path:
    for place, name in enumerate([*BATCHES, "test_batch.bin"]):
        (folder / name).write_bytes(b"".join(record(count * place + n) for n in range(count)))
    return folder


def test_all_batches_are_read_in_their_order(tmp_path: Path) -> None:
    assert not has_cifar(tmp_path)
    splits = read_cifar(cifar(tmp_path))
    assert has_cifar(tmp_path)
    images, labels = splits["train"]
    assert (images.shape, images.dtype) == ((10, 3, 32, 32), torch.uint8)
    assert labels.tolist() == [*range(10)]
    assert int(images[4, 2, 5, 9]) == (4 + 14 + 15 + 9) % 251
    assert splits["test"][1].tolist() == [0, 1]
    assert int(splits["test"][0][1, 0, 0, 0]) == 11


def test_of_a_hundred_classes_the_fine_label_counts(tmp_path: Path) -> None:
    for name, first in (("train.bin", 0), ("test.bin", 90)):
        rows = [record(first + n, 2, 100) for n in range(3)]
        (tmp_path / name).write_bytes(b"".join(rows))
    splits = read_cifar(tmp_path)
    assert splits["train"][1].tolist() == [0, 1, 2]
    assert splits["test"][1].tolist() == [90, 91, 92]
    assert int(splits["test"][0][0, 0, 0, 0]) == 90


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.unlink(), "is missing; CIFAR-10"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (lambda path: path.write_bytes(record(1)[:-1]), "has 3,072 bytes"),
        (lambda path: path.write_bytes(record(1) + b"\0"), "has 3,074 bytes"),
        (lambda path: path.write_bytes(record(1) + b"\x0a" + record(1)[1:]), "record 1: label 10"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    ],
)
@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, change, reason: str) -> None:
    change(cifar(tmp_path) / name)
    with pytest.raises(DataError, match=reason) as caught:
        read_cifar(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


@settings(max_examples=30)
@given(st.binary(max_size=200), st.integers(0, 3))
def test_no_file_is_an_error_of_another_kind(tmp_path_factory, junk: bytes, count: int) -> None:
    folder = cifar(tmp_path_factory.mktemp("junk"), 1)
    rows = np.frombuffer(junk * 100, np.uint8)[: 3073 * count].tobytes()
    (folder / BATCHES[1]).write_bytes(rows + junk)
    try:
        images, labels = read_cifar(folder)["train"]
    except DataError:
        return
    assert len(images) == len(labels)
    assert int(labels.max()) < 10
