"""Fetching the samples of microbatches, in this process or ahead of time in others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from lockstep.data.attributes import AttributeGuard
from lockstep.data.random import (
    IdleGenerators,
    Stream,
    data_digest,
    kept_generators,
    random_key,
    seed_all,
)
from lockstep.data.sampler import ElasticSampler
from lockstep.data.workers import fetched, release
from lockstep.errors import LockstepError, TaskError
from lockstep.parallel.layout import Assigned

Batch = Any
Collate = Callable[[list[Any]], Batch]


class BatchSource(ABC):
    """Microbatches in the order in which a rank computes them.

    Attributes:
        dataset: dataset that the samples come from.
        num_workers: number of processes that fetch; 0 fetches in this one.
        copies: copies batches to the device of the rank.
        pass_starts: known positions at which the passes over a stream of unknown length begin.
        has_places: whether a stream is read in parts, of which this rank reads its own only.
        remarks: what a user should know of the dataset.
    """

    has_places = False

    def __init__(self, dataset: Any, seed: int, device: torch.device) -> None:
        self.dataset = dataset
        self.num_workers = 0
        self.pass_starts: list[int] = []
        self.remarks: list[str] = []
        self._seed = seed
        self._device = device
        self.copies = BatchCopies(device)
        self._guard = AttributeGuard()
        self.watched = IdleGenerators({})

    @property
    def watched(self) -> IdleGenerators:
        """Generators that the dataset must not draw from; drawing raises a `TaskError`."""
        return self._watched

    @watched.setter
    def watched(self, generators: IdleGenerators) -> None:
        self._watched = generators
        self._watch(generators, self._guard)

    @property
    def guard(self) -> AttributeGuard:
        """The guard that notices attributes which one pass sets and another one reads."""
        return self._guard

    @guard.setter
    def guard(self, guard: AttributeGuard) -> None:
        self._guard = guard
        self._watch(self._watched, guard)

    def _watch(self, generators: IdleGenerators, guard: AttributeGuard) -> None:  # noqa: B027
        """Let the code that fetches watch these generators and attributes."""

    @abstractmethod
    def microbatch(self, step: int, microbatch: int) -> Batch | None:
        """One microbatch, fetched now by itself; None if it has no samples."""

    @abstractmethod
    def halved(self, step: int, microbatch: int) -> Iterator[Batch]:
        """A microbatch and its two halves, fetched now; nothing if it cannot be halved."""

    @abstractmethod
    def stream(
        self, microbatches: Assigned, first_step: int, last_step: int
    ) -> Generator[tuple[int, int, Batch], None, None]:
        """The microbatches of `microbatches` of steps first_step <= step < last_step, in order.

        Each comes with its step and number, in host memory; those without samples as None.

        Raises:
            LockstepError: the dataset raised it.
        """

    def is_settled(self, step: int, may_change: bool) -> bool:
        """Whether the first batch of a step is known before the end of the step before.

        Args:
            step: number of the step.
            may_change: whether code of the user's runs between steps, which may change samples.
        """
        return False

    def know_passes(self, starts: Sequence[int]) -> None:  # noqa: B027
        """Take over `pass_starts` from a process that knows more of them."""

    def places(self, step: int, all_known: bool = False) -> list[dict[str, Any]]:
        """Where reading goes on at a step, in the parts of this rank's microbatches or of all."""
        return []

    def add_places(self, places: Iterable[dict[str, Any]]) -> None:  # noqa: B027
        """Take over `places` of another rank."""

    def problem(self, place: object) -> str:
        """Why a place in a checkpoint cannot be one of this stream; empty if it can."""
        return f"{place}: the dataset is not read in parts"

    def set_places(self, places: Iterable[dict[str, Any]]) -> None:  # noqa: B027
        """Go on from the `places` in a checkpoint."""

    def landmarks(self) -> dict[str, str]:
        """Digests of some samples of a stream, by location; they must be equal on all ranks."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End fetching: no more batches are needed."""


def set_epoch(epoch: int, *objects: object) -> None:
    """Call `set_epoch` of datasets and collate functions that have it.

    This is repeated before each microbatch: other epochs and evaluations may come in between.
    """
    for one in objects:
        setter = getattr(one, "set_epoch", None)
        if callable(setter):
            setter(epoch)


SMALL_BYTES = 1 << 16
"""CUDA's driver takes over as many at once, also from memory that is not pinned."""


class BatchCopies:
    """Copies batches to a device while it computes others: pinned, on `stream`, if it has such."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.stream = device, None
        try:
            self.stream = None if device.type == "cpu" else torch.Stream(device)
            self(torch.empty(SMALL_BYTES + 1, dtype=torch.uint8))
        except (RuntimeError, AttributeError):  # it has no such memory or streams
            self.stream = None

    def __call__(self, batch: Batch) -> Batch:
        """See `to_device`; what is computed from now on finds the batch there."""
        return batch if self._device.type == "cpu" else self.begin(batch)()

    def begin(self, batch: Batch) -> Callable[[], Batch]:
        """Start to copy a batch; returns what gives it to all that is computed from then on."""
        copies: list[Tensor] = []
        there = with_tensors(batch, partial(self._copied, copies))
        copied = self.stream.record_event() if self.stream is not None and copies else None
        return partial(self._given, there, copies, copied)

    def _copied(self, copies: list[Tensor], tensor: Tensor) -> Tensor:
        if self.stream is None or not tensor.is_cpu or tensor.nbytes <= SMALL_BYTES:
            return tensor.to(self._device, non_blocking=True)
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        with self.stream:
            copies.append(pinned.to(self._device, non_blocking=True))
        return copies[-1]

    def _given(self, there: Batch, copies: list[Tensor], copied: torch.Event | None) -> Batch:
        if copied is not None:
            computing = torch.accelerator.current_stream(self._device)
            computing.wait_event(copied)
            for copy in copies:
                # Else the next batch would come here when Python forgets it, not the device.
                copy.record_stream(computing)
        return there


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move all tensors in nested lists, tuples and dicts; other values stay as they are."""
    if device.type == "cpu":
        return batch
    return with_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def with_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """A batch with other tensors in nested lists, tuples and dicts; other values stay."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {k: with_tensors(v, change) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(with_tensors(v, change) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(with_tensors(v, change) for v in batch)
    return batch


class Request(NamedTuple):
    """The samples of one microbatch and the random state they are fetched with.

    Attributes:
        key: seed of the global generators, 63 bits.
        indices: indices of the samples in the dataset, int64 [N].
        epoch: number of the epoch they are fetched for, from 0.
        of: pass that they are fetched for: step and microbatch, or split and batch.
    """

    key: int
    indices: Tensor
    epoch: int = 0
    of: tuple[int | str, int] | None = None


class Fetcher(Dataset[Batch]):
    """A dataset whose items are whole microbatches, indexed by `Request`.

    Random draws of the dataset (augmentation) depend on the request only, not on the process that
    fetches or on when it does.

    Attributes:
        watched: generators that the dataset must not draw from; drawing raises a `TaskError`.
        guard: notices attributes that one pass sets and another one reads.
        tensors: tensors of a dataset that has nothing else: a batch is `rows` of them; else None.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        """Fetch from `dataset`; `collate` makes a batch of samples, by default as torch does."""
        self._dataset = dataset
        self._collate: Collate = collate or default_collate
        self.watched = IdleGenerators({})
        self.guard = AttributeGuard()
        self.tensors: tuple[Tensor, ...] | None = None
        if isinstance(dataset, TensorDataset) and collate is None:
            plain = type(dataset).__getitem__ is TensorDataset.__getitem__
            others = ("__getitems__", "set_epoch")
            if plain and not any(hasattr(dataset, name) for name in others):
                self.tensors = dataset.tensors

    def __getitem__(self, request: Request) -> Batch:
        """The batch of one microbatch; in a worker process, an error that is to be raised."""
        try:
            return self._batch(request)
        except LockstepError as error:
            if get_worker_info() is None:
                raise
            return error  # raised here, torch would wrap it in an error with a traceback as message

    def _batch(self, request: Request) -> Batch:
        if self.tensors is not None:
            return self.rows(self.tensors, request.indices)
        self.guard.enter(request.of)
        set_epoch(request.epoch, self._dataset, self._collate)
        seed_all(request.key)
        indices = request.indices.tolist()
        many = getattr(self._dataset, "__getitems__", None)
        samples = many(indices) if many else [self._dataset[i] for i in indices]
        batch = self._collate(samples)
        self.watched.check()
        return batch

    @staticmethod
    def rows(tensors: Sequence[Tensor], indices: Tensor) -> list[Tensor]:
        """The batch that `default_collate` makes of some samples, by one operation a tensor."""
        return [tensor.index_select(0, indices) for tensor in tensors]


class Loader(BatchSource):
    """Microbatches of a map-style dataset, fetched in this process or ahead of time in others."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Collate | None,
        sampler: ElasticSampler,
        seed: int,
        device: torch.device,
        num_workers: int = 0,
        prefetch: int = 2,
    ) -> None:
        self._fetcher = Fetcher(dataset, collate)
        super().__init__(dataset, seed, device)
        self._sampler = sampler
        self.num_workers = num_workers
        self._prefetch = prefetch

    def _watch(self, generators: IdleGenerators, guard: AttributeGuard) -> None:
        self._fetcher.watched, self._fetcher.guard = generators, guard

    def microbatch(self, step: int, microbatch: int) -> Batch | None:
        """One microbatch, fetched now; None if it has no samples."""
        return self.copies(self._fetch(step, microbatch))

    def _fetch(self, step: int, microbatch: int) -> Batch | None:
        fetcher = self._fetcher
        if fetcher.tensors is not None:  # nothing is drawn, so no key is needed
            indices = self._sampler.indices(step, microbatch)
            return fetcher.rows(fetcher.tensors, indices) if indices.numel() else None
        request = self._request(step, microbatch)
        return None if request is None else fetcher[request]

    def halved(self, step: int, microbatch: int) -> Iterator[Batch]:
        """A microbatch and its two halves, fetched now; nothing if it cannot be halved."""
        request = self._request(step, microbatch)
        if request is None or len(request.indices) < 2:
            return
        for indices in (request.indices, *request.indices.tensor_split(2)):
            batch = self._fetcher[request._replace(indices=indices)]
            yield to_device(batch, self._device)

    def stream(
        self, microbatches: Assigned, first_step: int, last_step: int
    ) -> Generator[tuple[int, int, Batch], None, None]:
        """See `BatchSource.stream`.

        Raises:
            LockstepError: the dataset raised it.
            RuntimeError: a worker process has died.
        """
        if not self.num_workers:
            for step in range(first_step, last_step):
                for m in range(*microbatches):
                    yield step, m, self._fetch(step, m)
            return
        steps = range(first_step, last_step)
        requests = (self._request(step, m) for step in steps for m in range(*microbatches))
        batches = fetched(
            DataLoader(
                self._fetcher,
                sampler=filter(None, requests),  # drawn from as batches are fetched ahead
                batch_size=None,
                num_workers=self.num_workers,
                prefetch_factor=self._prefetch,
                generator=torch.Generator(),  # else it draws from, and so changes, the global one
                pin_memory=self.copies.stream is not None,
            ),
            self,
        )
        with closing(batches):
            for step in range(first_step, last_step):
                for m in range(*microbatches):
                    batch = next(batches) if self._sampler.microbatch_size(step, m) else None
                    if isinstance(batch, LockstepError):
                        raise batch
                    if (step + 1) & step == 0 and m == microbatches.first:
                        self._check_fetched(step, m, batch)
                    yield step, m, batch

    def is_settled(self, step: int, may_change: bool) -> bool:
        """See `BatchSource.is_settled`; none of the user's code is called for such a batch."""
        if self.num_workers:  # of which `_check_fetched` compares some batches
            return (step + 1) & step != 0 and not self._sampler.is_given
        is_plain = self._fetcher.tensors is not None and self._sampler.is_drawn(step)
        return is_plain and not may_change

    def _check_fetched(self, step: int, microbatch: int, batch: Batch | None) -> None:
        """Refuse a dataset that returns another batch in a worker process than in this one.

        State that a dataset keeps between samples differs from worker to worker.

        Raises:
            TaskError: it does.
        """
        request = self._request(step, microbatch)
        if request is None:
            return
        with kept_generators():
            # As DataLoader does in the worker.
            own = default_convert(self._fetcher[request])  # type: ignore[no-untyped-call]
        if data_digest(own) != data_digest(batch):
            raise TaskError(
                f"dataset('train'): gave another batch in a worker process than in the rank itself "
                f"(step {step}, microbatch {microbatch}), with the same random state; something "
                "keeps state between samples, or looks at the process it is in"
            )

    def close(self) -> None:
        """No more batches will be fetched by worker processes."""
        release(self)

    def _request(self, step: int, microbatch: int) -> Request | None:
        indices = self._sampler.indices(step, microbatch)
        if not indices.numel():
            return None
        key = random_key(self._seed, Stream.DATA, step, microbatch)
        return Request(key, indices, self._sampler.epoch(step), (step, microbatch))
