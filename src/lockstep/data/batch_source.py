"""Where microbatches come from, and what is done with them before a task gets them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data.attributes import AttributeGuard
from lockstep.data.generators import IdleGenerators
from lockstep.parallel.layout import Dealt

Batch = Any
Collate = Callable[[list[Any]], Batch]


class BatchSource(ABC):
    """Microbatches in the order in which a rank computes them.

    Attributes:
        dataset: dataset that the samples come from.
        num_workers: number of processes that fetch; 0 fetches in this one.
        pass_starts: of a stream of unknown length, the positions at which passes over it begin, as
            far as they are known.
    """

    def __init__(self, dataset: Any, seed: int, device: torch.device) -> None:
        self.dataset = dataset
        self.num_workers = 0
        self.pass_starts: list[int] = []
        self._seed = seed
        self._device = device
        self._guard = AttributeGuard()
        self.watched = IdleGenerators({})

    @property
    def watched(self) -> IdleGenerators:
        """Generators that the dataset must not draw from; a `TaskError` if it does."""
        return self._watched

    @watched.setter
    def watched(self, generators: IdleGenerators) -> None:
        self._watched = generators
        self._watch(generators, self._guard)

    @property
    def guard(self) -> AttributeGuard:
        """What notices attributes that one pass sets and another one reads."""
        return self._guard

    @guard.setter
    def guard(self, guard: AttributeGuard) -> None:
        self._guard = guard
        self._watch(self._watched, guard)

    def _watch(self, generators: IdleGenerators, guard: AttributeGuard) -> None:  # noqa: B027
        """Have whatever fetches look after these generators and attributes."""

    @abstractmethod
    def microbatch(self, step: int, microbatch: int) -> Batch | None:
        """One microbatch, fetched now and apart from others; None if it has no samples."""

    @abstractmethod
    def halved(self, step: int, microbatch: int) -> Iterator[Batch]:
        """A microbatch and its two halves, fetched now; nothing if it cannot be halved."""

    @abstractmethod
    def stream(
        self, microbatches: Dealt, first_step: int, last_step: int
    ) -> Generator[tuple[int, int, Batch], None, None]:
        """The microbatches of `microbatches` of steps first_step <= step < last_step, in order.

        Each comes with its step and number; those without samples as None.

        Raises:
            LockstepError: the dataset raised it.
        """

    def know_passes(self, starts: Sequence[int]) -> None:  # noqa: B027
        """Learn `pass_starts` from a process that knows more of them."""

    def landmarks(self) -> dict[str, str]:
        """Digests of some samples of a stream, by place: other ranks must have the same."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """No more batches will be fetched."""


def set_epoch(epoch: int, *objects: object) -> None:
    """Tell datasets and collate functions the number of the epoch, if they have a `set_epoch`.

    It is told before each microbatch: other epochs, and evaluations, may have come between.
    """
    for one in objects:
        setter = getattr(one, "set_epoch", None)
        if callable(setter):
            setter(epoch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move all tensors in nested lists, tuples and dicts; other values stay as they are."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(v, device) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(v, device) for v in batch)
    return batch
