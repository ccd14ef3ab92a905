"""Images of handwritten digits: MNIST's IDX file format, or those that scikit-learn carries.

All numbers are big-endian. Files may be gzipped; that is seen by their first bytes, not by their
name, because browsers and mirrors change names and unpack files on the way.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import struct
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from lockstep.config.files import open_to_read
from lockstep.errors import ConfigError, DataError

TYPES: Mapping[int, tuple[torch.dtype, str]] = MappingProxyType(
    {
        0x08: (torch.uint8, ">u1"),
        0x09: (torch.int8, ">i1"),
        0x0B: (torch.int16, ">i2"),
        0x0C: (torch.int32, ">i4"),
        0x0D: (torch.float32, ">f4"),
        0x0E: (torch.float64, ">f8"),
    }
)
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20
_MOST_NAMES_LISTED = 12
_SCIKIT_LEARN = 'scikit-learn: pip install "lockstep-train[recipes]"'
_LINEAR_STEPS = 1000


def read_idx(path: Path | str) -> Tensor:
    """The tensor in an IDX file, gzipped or not.

    Memory is bounded by what the file really holds, whatever its header claims.

    Args:
        path: path of the file.

    Returns:
        A tensor of the file's shape and type: uint8, int8, int16, int32, float32 or float64.

    Raises:
        DataError: the file is missing, unreadable or damaged, is not IDX, or holds fewer or more
            bytes than its header says.
    """
    path = Path(path)
    try:
        with open_to_read(path, follow_links=True) as raw:
            gzipped = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            # GzipFile checks length and checksum when it meets the end, which _read_tensor does.
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if gzipped else raw
            return _read_tensor(path, stream)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: gzip data is damaged: {error}; get the file again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def find_idx(folder: Path | str, stem: str) -> Path:
    """The IDX file called `stem` in a folder, under any of the names in use.

    Args:
        folder: folder to look in; folders below it are not searched.
        stem: the name with a dash, such as `train-images-idx3-ubyte`. The spelling with a dot
            (`train-images.idx3-ubyte`) and `.gz` at the end are found too, plain files first.

    Raises:
        DataError: there is no such folder or no such file in it.
    """
    folder = Path(folder)
    dotted = stem.replace("-idx", ".idx")
    names = [stem, dotted, f"{stem}.gz", f"{dotted}.gz"]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: none of {', '.join(names)}: {_contents(folder)}")


def read_labelled(folder: Path | str, prefix: str) -> tuple[Tensor, Tensor]:
    """The images and labels of `<prefix>-images-idx3-ubyte` and `<prefix>-labels-idx1-ubyte`.

    Args:
        folder: folder with the two files.
        prefix: prefix of the names: `train` or `t10k` in MNIST and the datasets made after it.

    Returns:
        Images [N, H, W] as uint8 and labels [N] as int64, none of the sizes 0.

    Raises:
        DataError: a file is missing or damaged, does not hold uint8, has the wrong number of dims
            or a dim of size 0, or there is not one label for each image.
    """
    images_path = find_idx(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = find_idx(folder, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(images_path), read_idx(labels_path)
    _check(images_path, images, "[N, H, W]")
    _check(labels_path, labels, "[N]")
    if len(labels) != len(images):
        raise DataError(f"{labels_path}: {len(labels)} labels, {images_path}: {len(images)} images")
    return images, labels.long()


def _read_tensor(path: Path, stream: BinaryIO) -> Tensor:
    dtype, shape = _read_header(path, stream)
    # The header is not to be trusted: 4 dims of 2^32 - 1 must not become an allocation.
    if math.prod(max(1, size) for size in shape) > sys.maxsize // 8:
        raise DataError(f"{path}: dims={shape}: more than any file can hold")
    expected = math.prod(shape) * dtype.itemsize
    try:
        data = _read_up_to(stream, expected)
    except MemoryError:
        raise DataError(
            f"{path}: dims={shape}: {expected:,} bytes do not fit into memory"
        ) from None
    claim = f"dims={shape} of {dtype.name} make {expected:,} bytes after the header"
    if len(data) < expected:
        raise DataError(f"{path}: truncated: {claim}, found {len(data):,}")
    if stream.read(1):
        raise DataError(f"{path}: trailing bytes: {claim}, found more")
    array = np.frombuffer(data, dtype)
    if not array.dtype.isnative:
        array = array.byteswap(inplace=True).view(array.dtype.newbyteorder())
    return torch.from_numpy(array).reshape(shape)


def _read_header(path: Path, stream: BinaryIO) -> tuple[np.dtype[np.generic], list[int]]:
    magic = bytes(_read_up_to(stream, 4))
    if len(magic) < 4:
        raise DataError(f"{path}: truncated: the magic number is 4 bytes, found {len(magic)}")
    if magic[:2] != b"\0\0" or magic[2] not in TYPES:
        codes = ", ".join(f"{code:02x}" for code in TYPES)
        raise DataError(
            f"{path}: magic={magic.hex()}: not an IDX file (0000, one of {codes}, number of dims)"
        )
    num_dims = magic[3]
    dims = _read_up_to(stream, 4 * num_dims)
    if len(dims) < 4 * num_dims:
        raise DataError(
            f"{path}: truncated: {num_dims} dims make {4 * num_dims} bytes, found {len(dims)}"
        )
    return np.dtype(TYPES[magic[2]][1]), list(struct.unpack(f">{num_dims}I", dims))


def _read_up_to(stream: BinaryIO, count: int) -> bytearray:
    """The next `count` bytes, or all there are; memory grows with what is found."""
    data = bytearray()
    while chunk := stream.read(min(_CHUNK_BYTES, count - len(data))):
        data += chunk
    return data


def _check(path: Path, tensor: Tensor, form: str) -> None:
    """Shape and type are as in MNIST."""
    shape = list(tensor.shape)
    if len(shape) != len(form.split(",")) or 0 in shape:
        raise DataError(f"{path}: dims={shape}: must be {form}, none of them 0")
    if tensor.dtype != torch.uint8:
        raise DataError(f"{path}: type={_short(tensor.dtype)}: must be uint8, as the name says")


def _contents(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "it is not a folder"
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return f"the folder cannot be read: {error.strerror or error}"
    more = f" and {len(names) - _MOST_NAMES_LISTED} more" if len(names) > _MOST_NAMES_LISTED else ""
    return f"the folder holds {', '.join(names[:_MOST_NAMES_LISTED]) or 'nothing'}{more}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        raise ConfigError(f"data_dir is not set, and the built-in digits need {_SCIKIT_LEARN}")
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


def standardized(images: Tensor, train: Tensor, folder: Path | None) -> Tensor:
    """Images of one channel, by the mean and deviation of those of training.

    Args:
        images: as uint8, [N, H, W].
        train: images of training, [M, H, W].
        folder: where the images are from.

    Returns:
        Float32, [N, 1, H, W].

    Raises:
        DataError: all pixels of training are the same.
    """
    mean, deviation = mean_and_deviation(train)
    if deviation == 0:
        raise DataError(f"data_dir={folder}: all training pixels are {mean:g}")
    return ((images.float() - mean) / deviation).unsqueeze(1)


def hold_out(given: dict[str, Labelled], val: float, test: float) -> dict[str, Labelled]:
    """The splits of `given`, with val (and test, if missing) taken out of train.

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


def num_classes(splits: Mapping[str, Labelled]) -> int:
    """The number of classes of all splits: one more than the greatest label."""
    return 1 + max(int(labels.max()) for _, labels in splits.values())


def simple_classifiers(train: Labelled, held_out: Labelled) -> dict[str, dict[str, float]]:
    """What simple classifiers of pixels reach: metrics by their names.

    The commonest class, logistic regression, and the five nearest neighbours; of these neighbours
    there is no loss, for a class that none has would have no probability.

    Args:
        train: images [N, ...] and labels [N] to learn.
        held_out: those to classify.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(f"simple classifiers need {_SCIKIT_LEARN}")
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler

    (x, y), (unseen, labels) = (
        (images.flatten(1).double().numpy(), classes.numpy())
        for images, classes in (train, held_out)
    )
    counts = np.bincount(y, minlength=int(max(y.max(), labels.max())) + 1)
    with np.errstate(divide="ignore"):
        losses = -np.log(counts / counts.sum())[labels]
    hits = (labels == counts.argmax()).mean()
    linear = make_pipeline(MaxAbsScaler(), LogisticRegression(max_iter=_LINEAR_STEPS)).fit(x, y)
    neighbours = KNeighborsClassifier(n_neighbors=5).fit(x, y)
    likely = linear.predict_proba(unseen)
    return {
        "the commonest class": {"loss": float(losses.mean()), "accuracy": float(hits)},
        "logistic regression": {
            "loss": float(log_loss(labels, likely, labels=linear.classes_)),
            "accuracy": float(linear.score(unseen, labels)),
        },
        "5 nearest neighbours": {"accuracy": float(neighbours.score(unseen, labels))},
    }
