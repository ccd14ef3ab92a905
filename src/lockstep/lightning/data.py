"""The loaders of a LightningModule or a LightningDataModule, as datasets of a task."""

from __future__ import annotations

import fcntl
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from lockstep.config import TrainConfig
from lockstep.config.parsing import shown
from lockstep.data.loader import set_epoch
from lockstep.data.passes import is_stream
from lockstep.data.random import Stream, kept_generators, random_key, seed_all
from lockstep.errors import TaskError

STEPS = {"train": "training", "val": "validation", "test": "test"}
"""The step that each split is for."""

_OWN = ("lightning.pytorch.core.", "pytorch_lightning.core.")


def overrides(owner: Any, name: str) -> bool:
    """Whether an object has a method of its own where Lightning's classes have one that is empty.

    Args:
        owner: LightningModule or LightningDataModule, or its class.
        name: name of the method.
    """
    if not isinstance(owner, type) and name in vars(owner):
        return True
    method = getattr(owner if isinstance(owner, type) else type(owner), name, None)
    return method is not None and not str(method.__module__).startswith(_OWN)


class Source(ABC):
    """Where a task has its LightningModule and its data from.

    Attributes:
        kind: class of the module.
        loaders: loaders that were given, by split.
    """

    kind: type
    loaders: Mapping[str, Any] = {}

    @abstractmethod
    def module(self, config: TrainConfig) -> Any:
        """A new LightningModule."""

    @abstractmethod
    def datamodule(self, config: TrainConfig) -> Any:
        """A LightningDataModule; None if there is none."""


class Batch(NamedTuple):
    """A batch with its place, which Lightning passes to steps.

    Attributes:
        loader: number of its loader, among those of its split.
        split: `train`, `val` or `test`.
        number: its number in an evaluation; 0 in training.
        data: what the collate function has made.
    """

    loader: int
    split: str
    number: int
    data: Any


@dataclass(frozen=True)
class Order:
    """The order of samples that a loader's sampler asks for.

    Attributes:
        shuffle: whether samples come in a new order in each epoch.
        weights: weights with which samples are drawn with replacement; None for all once.
        subset: indices of the samples that take part; None for all.
    """

    shuffle: bool
    weights: Any = None
    subset: Sequence[int] | None = None


class Split(Dataset[Any]):
    """The dataset of a loader, whose `__getitems__` makes whole batches as the loader does."""

    def __init__(self, loader: Any, name: str, number: int, batch_size: int) -> None:
        """Take over a loader's dataset and collate function.

        Args:
            loader: the `DataLoader`.
            name: `train`, `val` or `test`.
            number: number of the loader, among those of its split.
            batch_size: number of samples of a batch, by which those of evaluations are numbered.
        """
        order = order_of(loader, name)
        dataset = loader.dataset
        if order.subset is not None:
            dataset = Subset(dataset, list(order.subset))
        if name != "train" and loader.drop_last:
            count = len(dataset)
            dataset = Subset(dataset, range(count - count % loader.batch_size))
        self.dataset = dataset
        self.collate: Callable[[list[Any]], Any] = loader.collate_fn
        self._name, self._number, self._batch_size = name, number, batch_size
        self._is_plain = type(dataset) is TensorDataset and self.collate is default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """The batch of some samples, as the only item of a list."""
        first = 0 if self._name == "train" else indices[0] // self._batch_size
        return [Batch(self._number, self._name, first, self._batch(indices))]

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset and its collate function the epoch, if they want to know it."""
        set_epoch(epoch, self.dataset, self.collate)

    def _batch(self, indices: list[int]) -> Any:
        if self._is_plain:  # by one operation for each tensor
            rows = torch.tensor(indices)
            return [t.index_select(0, rows) for t in self.dataset.tensors]
        many = getattr(self.dataset, "__getitems__", None)
        return self.collate(many(indices) if many else [self.dataset[i] for i in indices])


class Loaders:
    """The loaders of all splits.

    Attributes:
        train: the loader of `train`.
        evaluated: those of `val` and `test`, by the names of splits: `val`, `val_1`, ….
    """

    def __init__(
        self, given: Mapping[str, Any], where: Mapping[str, str], unused: Sequence[str] = ()
    ) -> None:
        """Check loaders.

        Args:
            given: what there is for `train`, `val` and `test`; None for no such split.
            where: the method that each comes from, for messages.
            unused: remarks about loaders that are not used.

        Raises:
            TaskError: there is none for `train`, or one of them cannot be used.
        """
        if given.get("train") is None:
            raise TaskError(
                "train_dataloader: is missing; write it in the LightningModule or in a "
                "LightningDataModule, or give train_dataloaders to lockstep.from_lightning"
            )
        self.train = _checked(given["train"], where["train"], "train")
        self.evaluated: dict[str, Any] = {}
        self._unused = list(unused)
        for split in ("val", "test"):
            found = given.get(split)
            several = [*found] if isinstance(found, (list, tuple)) else [found]
            for number, loader in enumerate(several):
                if loader is not None:
                    name = f"{split}_{number}" if number else split
                    self.evaluated[name] = _checked(loader, where[split], split)

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of the config that the loaders bring, where a user sets no others."""
        order = order_of(self.train, "train")
        data = {"num_workers": 0 if is_stream(self.train.dataset) else self.train.num_workers}
        data |= {"shuffle": order.shuffle, "drop_last": bool(self.train.drop_last)}
        values: dict[str, Any] = {"batch_size": self.train.batch_size, "data": data}
        if self.evaluated:
            values["eval_batch_size"] = next(iter(self.evaluated.values())).batch_size
        return values

    def dataset(self, split: str, batch_size: int) -> Any:
        """The dataset of a split; None if there is no such split."""
        if split == "train":
            if is_stream(self.train.dataset):
                return self.train.dataset
            return Split(self.train, split, 0, batch_size)
        loader = self.evaluated.get(split)
        if loader is None:
            return None
        name, _, number = split.partition("_")
        return Split(loader, name, int(number or 0), batch_size)

    def remarks(self, batch_size: int, shuffle: bool) -> list[str]:
        """What users should know about their loaders."""
        kind = type(getattr(self.train, "sampler", None)).__name__
        remarks = [
            f"train_dataloader: its {kind} is replaced by Lockstep's own order of samples "
            f"(data.shuffle={shuffle}), which is the same on any number of ranks"
        ]
        if batch_size != self.train.batch_size:
            remarks.append(
                f"train_dataloader: batch_size={self.train.batch_size} is replaced by the config's "
                f"batch_size={batch_size}"
            )
        return [*remarks, *self._unused]


def order_of(loader: Any, split: str) -> Order:
    """The order that a loader's sampler asks for.

    Raises:
        TaskError: Lockstep's sampler cannot give that order.
    """
    if is_stream(loader.dataset):
        return Order(False)
    where = f"{split}_dataloader"
    if type(loader.batch_sampler) is not BatchSampler:
        raise TaskError(
            f"{where}: batch_sampler={shown(type(loader.batch_sampler).__name__)}: Lockstep "
            "says which samples a step has; set batch_size, and shuffle=True or a sampler of "
            "torch, or write a Task with epoch_indices"
        )
    sampler, count = loader.sampler, len(loader.dataset)
    if isinstance(sampler, SequentialSampler):
        return Order(False)
    if isinstance(sampler, DistributedSampler):
        return Order(bool(sampler.shuffle))
    if isinstance(sampler, SubsetRandomSampler):
        return Order(True, subset=[*sampler.indices])
    if isinstance(sampler, RandomSampler) and sampler.num_samples == count:
        return Order(True, torch.ones(count) if sampler.replacement else None)
    is_weighted = isinstance(sampler, WeightedRandomSampler) and split == "train"
    if is_weighted and sampler.replacement and sampler.num_samples == len(sampler.weights) == count:
        return Order(True, sampler.weights)
    raise TaskError(
        f"{where}: sampler={shown(type(sampler).__name__)}: Lockstep has no such order; "
        "leave it out (shuffle=True), draw as many samples as there are with replacement "
        "(WeightedRandomSampler), or write a Task with epoch_indices"
    )


def _checked(loader: Any, where: str, split: str) -> Any:
    """A loader that can be used.

    Raises:
        TaskError: it is none of torch's, or has what Lockstep cannot honour.
    """
    if not isinstance(loader, DataLoader):
        raise TaskError(
            f"{where}: returned a {type(loader).__name__}; must be a torch.utils.data.DataLoader"
            f"{' (or a list of them)' if split != 'train' else ''}: several at once are a dataset "
            "that has a sample of each"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise TaskError(
            f"{where}: batch_size=None: the dataset makes batches itself, and Lockstep cuts them "
            "into microbatches; let it give samples, and set batch_size"
        )
    if loader.worker_init_fn is not None:
        raise TaskError(
            f"{where}: worker_init_fn: Lockstep seeds each microbatch itself, in any process; "
            "leave it out"
        )
    if is_stream(loader.dataset) and split != "train":
        raise TaskError(
            f"{where}: dataset is a {type(loader.dataset).__name__}, a stream; give evaluations a "
            "dataset with __len__ and __getitem__"
        )
    order_of(loader, split)
    return loader


def sizes(batch: Any) -> Iterator[int]:
    """The first sizes of all tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch.shape[0] if batch.dim() else 1
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from sizes(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from sizes(value)
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        for value in vars(batch).values():
            yield from sizes(value)


def moved(batch: Batch, module: Any, datamodule: Any) -> Any:
    """The data of a batch, as Lightning would move it to the module's device."""
    data, device = batch.data, module.device
    for name, more in (
        ("on_before_batch_transfer", ()),
        ("transfer_batch_to_device", (device,)),
        ("on_after_batch_transfer", ()),
    ):
        owner = next(
            (o for o in (datamodule, module) if o is not None and overrides(o, name)),
            module if more and device.type != "cpu" else None,
        )
        if owner is not None:
            data = getattr(owner, name)(data, *more, batch.loader)
    return data


def prepare(owner: Any, seed: int) -> None:
    """Call `prepare_data` and `setup("fit")`, with random numbers that depend on the seed only.

    Args:
        owner: LightningModule or LightningDataModule.
        seed: seed of the run.
    """
    seed_all(random_key(seed, Stream.ORDER))
    if overrides(owner, "prepare_data"):
        with _one_at_a_time(type(owner)):
            owner.prepare_data()
    if overrides(owner, "setup"):
        owner.setup("fit")


def loaders_of(module: Any, owners: Iterable[Any], given: Mapping[str, Any], seed: int) -> Loaders:
    """The loaders of those splits that a module has a step for.

    Args:
        module: the LightningModule.
        owners: what may have methods that make loaders, the first first; None for none.
        given: loaders that were given, by split.
        seed: seed of the run.

    Raises:
        TaskError: there is none for `train`, or one of them cannot be used.
    """
    found, where = dict(given), {split: f"{split}_dataloaders" for split in given}
    unused: list[str] = []
    with kept_generators():
        for split, step in STEPS.items():
            name = f"{split}_dataloader"
            owner = next((o for o in owners if o is not None and overrides(o, name)), None)
            if not overrides(module, f"{step}_step"):
                if owner is not None or found.get(split) is not None:
                    unused.append(f"{name}: is not used, since the module has no {step}_step")
                found[split] = None
            if split in found:
                continue
            if owner is None:
                continue
            seed_all(random_key(seed, Stream.ORDER))
            if split == "test" and overrides(owner, "setup"):
                owner.setup("test")
            found[split] = getattr(owner, name)()
            where[split] = f"{type(owner).__name__}.{name}"
    return Loaders(found, where, unused)


@contextmanager
def _one_at_a_time(kind: type) -> Iterator[None]:
    """Hold a lock of this host within it: `prepare_data` of several ranks may load the same."""
    name = f"lockstep-{os.getuid()}-{kind.__module__}.{kind.__qualname__}.lock".replace("/", "_")
    file = os.open(
        Path(tempfile.gettempdir()) / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600
    )
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
