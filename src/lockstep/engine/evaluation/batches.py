"""The splits that a task evaluates, their batches, and the rank that computes each batch."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import default_collate

from lockstep.config import TrainConfig
from lockstep.data.attributes import AttributeGuard
from lockstep.data.loader import Fetcher, Request, set_epoch, to_device
from lockstep.data.passes import Draws, Pass, is_stream, stream_length
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.engine.task import Task
from lockstep.engine.task_config import own_collate
from lockstep.engine.training_data import dataset_size
from lockstep.errors import ConfigError, DataError, TaskError, shared
from lockstep.parallel.layout import split

T = TypeVar("T")


class Scores(NamedTuple):
    """The result of evaluating a split.

    Attributes:
        metrics: numbers by name, `loss` among them.
        arrays: nested lists by name: metrics of more than one number.
    """

    metrics: dict[str, float]
    arrays: dict[str, Any]


_NAME = re.compile(r"(val|test)[A-Za-z0-9_.-]*")


def evaluated_splits(task: Task) -> tuple[str, ...]:
    """The names in `Task.splits`.

    Raises:
        TaskError: they are not names of splits.
    """
    names: object = task.splits
    where = f"{type(task).__name__}.splits"
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        hint = (names,) if isinstance(names, str) else ("val", "val_ood", "test")
        raise TaskError(f"{where}: must be a tuple of names, is {names!r}; write `splits = {hint}`")
    for name in names:
        if not _NAME.fullmatch(name):
            raise TaskError(
                f"{where}: {name!r}: a name must begin with `val` (evaluated while training) or "
                "`test` (evaluated at the end), and go on with letters, digits, `_`, `-` and `.`; "
                "such as `val_ood`"
            )
        if names.count(name) > 1:
            raise TaskError(f"{where}: {name!r}: comes twice")
    return names


def is_validation(split: str) -> bool:
    """Whether a split is evaluated while training goes on, rather than at the end."""
    return split.startswith("val")


def judged(metrics: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Metrics by the names that `watch` and rules of convergence use.

    Args:
        metrics: by split and name.

    Returns:
        Those of `val` by their own names, those of other splits by "split/name".
    """
    return {
        name if split == "val" else f"{split}/{name}": value
        for split, values in metrics.items()
        for name, value in values.items()
    }


def by_split(metrics: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Metrics of validation splits that are called "split/name", by split and name."""
    found: dict[str, dict[str, T]] = {}
    for key, value in metrics.items():
        split, _, name = key.partition("/")
        if is_validation(split):
            found.setdefault(split, {})[name] = value
    return found


class EvaluationBatches(ABC):
    """A split cut into batches, numbered from 0.

    Attributes:
        split_name: name of the split.
        dataset: the split.
        device: device that the batches are on.
        num_samples: of the split; None for a stream without a length.
    """

    num_samples: int | None

    def __init__(
        self,
        task: Task,
        split_name: str,
        dataset: Any,
        batch_size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        """Count the samples.

        Raises:
            DataError: the split is empty, or not a dataset.
        """
        self._collate = own_collate(task)
        self.split_name = split_name
        self.dataset = dataset
        self._batch_size = batch_size
        self.device = device
        self._seed = seed
        self.num_samples = self._count_samples()

    def watch(self, guard: AttributeGuard) -> None:  # noqa: B027
        """Notice attributes that fetching one batch sets and another one reads."""

    @abstractmethod
    def of_rank(self, rank: int, size: int) -> Iterator[tuple[int, Any]]:
        """The number and the batch of each batch that a rank computes, in order."""

    @abstractmethod
    def get(self, number: int) -> Any:
        """A batch by its number; None after the last one."""

    @abstractmethod
    def numbers(self, rank: int, size: int, counts: list[int]) -> list[int]:
        """The numbers of the batches that a rank has computed.

        Args:
            rank: the rank.
            size: number of ranks.
            counts: how many batches each rank has computed.

        Raises:
            DataError: ranks have not read the same; on all ranks.
        """

    @abstractmethod
    def _count_samples(self) -> int | None:
        """The value of `num_samples`."""


def evaluation_batches(
    task: Task, split_name: str, dataset: Any, batch_size: int, device: torch.device, seed: int
) -> EvaluationBatches:
    """The batches of a split.

    Raises:
        DataError: it is empty, or not a dataset.
    """
    kind = _StreamBatches if is_stream(dataset) else _IndexedBatches
    return kind(task, split_name, dataset, batch_size, device, seed)


class _IndexedBatches(EvaluationBatches):
    """Batches of a map-style dataset: each rank has a range of them."""

    num_samples: int

    @cached_property
    def _fetcher(self) -> Fetcher:
        return Fetcher(self.dataset, self._collate)

    def watch(self, guard: AttributeGuard) -> None:
        self._fetcher.guard = guard

    def of_rank(self, rank: int, size: int) -> Iterator[tuple[int, Any]]:
        num_batches = -(-self.num_samples // self._batch_size)
        for number in range(*split(num_batches, size)[rank]):
            yield number, self.get(number)

    def get(self, number: int) -> Any:
        first = number * self._batch_size
        if first >= self.num_samples:
            return None
        indices = torch.arange(first, min(first + self._batch_size, self.num_samples))
        key = random_key(self._seed, Stream.EVALUATION, number)
        request = Request(key, indices, of=(self.split_name, number))
        return to_device(self._fetcher[request], self.device)

    def numbers(self, rank: int, size: int, counts: list[int]) -> list[int]:
        return list(range(*split(sum(counts), size)[rank]))

    def _count_samples(self) -> int:
        count = dataset_size(self.dataset, self.split_name)
        if count < 1:
            raise _empty(self.split_name)
        return count


class _StreamBatches(EvaluationBatches):
    """Batches of a stream: each rank reads all of it, and computes every n-th batch."""

    @cached_property
    def _draws(self) -> Draws:
        return Draws()

    def of_rank(self, rank: int, size: int) -> Iterator[tuple[int, Any]]:
        for number, samples in enumerate(self._read()):
            if number % size == rank:
                yield number, self._batch(number, samples)

    def get(self, number: int) -> Any:
        samples = next(islice(self._read(), number, None), None)
        return None if samples is None else self._batch(number, samples)

    def numbers(self, rank: int, size: int, counts: list[int]) -> list[int]:
        numbers = list(range(rank, sum(counts), size))
        if len(numbers) != counts[rank]:
            raise shared(
                DataError(
                    f"dataset({self.split_name!r}): ranks have read streams of different lengths; "
                    "every rank must get the same samples"
                )
            )
        return numbers

    def _count_samples(self) -> int | None:
        return stream_length(self.dataset, self.split_name)

    def _read(self) -> Iterator[list[Any]]:
        """The samples of each batch.

        Raises:
            DataError: there are none, or another number than the stream's length.
        """
        samples = Pass(lambda: self.dataset, 0, self._key, self._draws)
        while batch := samples.take(self._batch_size):
            yield batch
        if not samples.position:
            raise _empty(self.split_name)
        if self.num_samples not in (None, samples.position):
            raise DataError(
                f"dataset({self.split_name!r}): has {samples.position} samples, its __len__ says "
                f"{self.num_samples}"
            )

    def _key(self, position: int) -> int:
        return random_key(self._seed, Stream.EVALUATION, position, 1)

    def _batch(self, number: int, samples: list[Any]) -> Any:
        collate = self._collate or default_collate
        set_epoch(0, collate)
        seed_all(random_key(self._seed, Stream.EVALUATION, number))
        return to_device(collate(samples), self.device)


def _empty(split_name: str) -> DataError:
    return DataError(f"dataset({split_name!r}): is empty; return None if there is none")


def check_judged(config: TrainConfig, splits: Collection[str]) -> None:
    """Refuse a config that needs evaluations if the task has no validation split.

    Raises:
        ConfigError: naming the key.
    """
    waiting = {
        "early_stopping.patience": config.early_stopping.patience > 0,
        "convergence": bool(config.convergence),
        "schedule.name='plateau'": config.schedule.name == "plateau",
    }
    for key, is_set in waiting.items():
        if is_set and not any(map(is_validation, splits)):
            raise ConfigError(
                f"{key}: goes by evaluations, but the task's dataset('val') is None; give it a "
                "validation split or leave this key out"
            )
