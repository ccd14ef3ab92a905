"""The splits that a task evaluates, their batches, and which rank computes which of them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import Dataset, default_collate

from lockstep.data.attributes import AttributeGuard
from lockstep.data.loader import Fetcher, Request, dataset_size, set_epoch, to_device
from lockstep.data.passes import Pass, is_stream, stream_length
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.engine.task import Task, own_collate
from lockstep.errors import DataError, TaskError, shared
from lockstep.parallel.layout import split

T = TypeVar("T")


class Scores(NamedTuple):
    """What the evaluation of a split has found.

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
        TaskError: they are no such names.
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
    """What `watch` and rules of convergence go by: metrics of `val` by their own names.

    Args:
        metrics: by split and name.

    Returns:
        By name, those of other splits as "split/name".
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
        num_samples: of the split; None for a stream that does not say its length.
    """

    num_samples: int | None

    def watch(self, guard: AttributeGuard) -> None:  # noqa: B027
        """Have attributes noticed that fetching one batch sets and another one reads."""

    @abstractmethod
    def of_rank(self, rank: int, size: int) -> Iterator[tuple[int, Any]]:
        """The number and the batch of each batch that a rank computes, in order."""

    @abstractmethod
    def first(self) -> Any:
        """The first batch."""

    @abstractmethod
    def second(self) -> Any:
        """The second batch; None if there is only one."""

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


def evaluation_batches(
    task: Task, split_name: str, dataset: Any, batch_size: int, device: torch.device, seed: int
) -> EvaluationBatches:
    """The batches of a split.

    Raises:
        DataError: it is empty, or no dataset.
    """
    if is_stream(dataset):
        return _StreamBatches(task, split_name, dataset, batch_size, device, seed)
    return _IndexedBatches(task, split_name, dataset, batch_size, device, seed)


class _IndexedBatches(EvaluationBatches):
    """Of a map-style dataset: each rank has a range of batches of its own."""

    def __init__(
        self,
        task: Task,
        split_name: str,
        dataset: Dataset[Any],
        batch_size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._length = dataset_size(dataset, split_name)
        if self._length < 1:
            raise DataError(f"dataset({split_name!r}): is empty; return None if there is none")
        self.num_samples = self._length
        self._fetcher = Fetcher(dataset, own_collate(task))
        self._split_name = split_name
        self._batch_size = batch_size
        self._device = device
        self._seed = seed

    def watch(self, guard: AttributeGuard) -> None:
        self._fetcher.guard = guard

    def of_rank(self, rank: int, size: int) -> Iterator[tuple[int, Any]]:
        num_batches = -(-self._length // self._batch_size)
        for number in range(*split(num_batches, size)[rank]):
            yield number, self._batch(number)

    def first(self) -> Any:
        return self._batch(0)

    def second(self) -> Any:
        return self._batch(1) if self._length > self._batch_size else None

    def numbers(self, rank: int, size: int, counts: list[int]) -> list[int]:
        return list(range(*split(sum(counts), size)[rank]))

    def _batch(self, number: int) -> Any:
        first = number * self._batch_size
        indices = torch.arange(first, min(first + self._batch_size, self._length))
        key = random_key(self._seed, Stream.EVALUATION, number)
        request = Request(key, indices, of=(self._split_name, number))
        return to_device(self._fetcher[request], self._device)


class _StreamBatches(EvaluationBatches):
    """Of a stream: each rank goes through all of it, and computes every n-th batch."""

    def __init__(
        self,
        task: Task,
        split_name: str,
        dataset: Any,
        batch_size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.num_samples = stream_length(dataset, split_name)
        self._where = f"dataset({split_name!r})"
        self._dataset = dataset
        self._collate = own_collate(task) or default_collate
        self._batch_size = batch_size
        self._device = device
        self._seed = seed

    def of_rank(self, rank: int, size: int) -> Iterator[tuple[int, Any]]:
        for number, samples in enumerate(self._read()):
            if number % size == rank:
                yield number, self._batch(number, samples)

    def first(self) -> Any:
        return self._batch(0, next(self._read()))

    def second(self) -> Any:
        batches = self._read()
        next(batches)
        samples = next(batches, None)
        return None if samples is None else self._batch(1, samples)

    def numbers(self, rank: int, size: int, counts: list[int]) -> list[int]:
        numbers = list(range(rank, sum(counts), size))
        if len(numbers) != counts[rank]:
            raise shared(
                DataError(
                    f"{self._where}: ranks have read streams of other lengths; every rank must get "
                    "the same samples"
                )
            )
        return numbers

    def _read(self) -> Iterator[list[Any]]:
        """The samples of each batch.

        Raises:
            DataError: there are none, or another number than the stream says.
        """
        samples = Pass(self._dataset, 0, self._key)
        while batch := [s for _, s in zip(range(self._batch_size), samples, strict=False)]:
            yield batch
        if not samples.position:
            raise DataError(f"{self._where}: is empty; return None if there is none")
        if self.num_samples not in (None, samples.position):
            raise DataError(
                f"{self._where}: has {samples.position} samples, its __len__ says "
                f"{self.num_samples}"
            )

    def _key(self, position: int) -> int:
        return random_key(self._seed, Stream.EVALUATION, position, 1)

    def _batch(self, number: int, samples: list[Any]) -> Any:
        set_epoch(0, self._collate)
        seed_all(random_key(self._seed, Stream.EVALUATION, number))
        return to_device(self._collate(samples), self._device)
