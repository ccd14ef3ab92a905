"""Orders in which an epoch goes through samples: pure functions of the epoch and a generator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lockstep.data.random import Stream, kept_generators, random_key, seed_all
from lockstep.errors import TaskError
from lockstep.parsing import shown

Indices: TypeAlias = npt.NDArray[np.int64]
Order = Callable[[int, np.random.Generator], Indices]
"""Takes an epoch (from 0) and a generator of its own; gives indices of samples, int64 [N]."""


def order_generator(seed: int, epoch: int) -> np.random.Generator:
    """The generator that the order of an epoch is drawn from.

    It is counter-based, so that the order of an epoch does not depend on the epochs before it.
    """
    return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))


def shuffled(num_samples: int) -> Order:
    """All samples in an order that is drawn anew for each epoch."""
    return lambda epoch, generator: generator.permutation(num_samples).astype(np.int64, copy=False)


def in_order(num_samples: int) -> Order:
    """All samples in the dataset's order."""
    everything = np.arange(num_samples, dtype=np.int64)
    return lambda epoch, generator: everything


def weighted(weights: Any, num_samples: int) -> Order:
    """As many samples as there are, drawn with replacement.

    Args:
        weights: a number for each sample, in proportion to which it is drawn: [num_samples].
        num_samples: number of samples of the dataset.

    Raises:
        TaskError: the weights are no such numbers.
    """
    heights = np.cumsum(_checked_weights(weights, num_samples))
    # A product that is rounded up to the whole sum would lie behind the last sample.
    last = int(np.searchsorted(heights, heights[-1]))

    def draw(epoch: int, generator: np.random.Generator) -> Indices:
        # Looked up in ascending order, then shuffled: lookups at random miss the cache each time,
        # which took 14 s for 10^7 samples.
        points = np.sort(generator.random(num_samples)) * heights[-1]
        indices = np.minimum(np.searchsorted(heights, points, side="right"), last)
        return generator.permutation(indices).astype(np.int64, copy=False)

    return draw


def _checked_weights(weights: Any, num_samples: int) -> npt.NDArray[np.float64]:
    name = "Task.sample_weights"
    try:
        plain = weights.detach().cpu().numpy() if isinstance(weights, Tensor) else weights
        values = np.asarray(plain, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TaskError(f"{name}: must return numbers, one for each sample: {error}") from None
    if values.shape != (num_samples,):
        raise TaskError(
            f"{name}: must return one number for each of the {num_samples} samples of "
            f"dataset('train'), returned an array of shape {values.shape}"
        )
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise TaskError(
            f"{name}: the weight of sample {wrong[0]} is {values[wrong[0]]}{more}; weights must "
            "be finite and at least 0"
        )
    total = values.sum()
    if not 0 < total < np.inf:
        raise TaskError(
            f"{name}: the weights add up to {total}; at least one must be above 0, and their sum "
            "must be finite"
        )
    return values


class GivenOrder:
    """The order of a task's own `epoch_indices`, checked.

    Attributes:
        length: number of indices in each epoch.
        digest: SHA-256 of the orders of the first two epochs.
    """

    def __init__(
        self, make: Callable[[int, np.random.Generator], Any], num_samples: int, seed: int
    ) -> None:
        """Ask for the order of epoch 0 twice, with another epoch's between them.

        Args:
            make: the task's function; must not return None.
            num_samples: number of samples of the dataset.
            seed: seed of the run.

        Raises:
            TaskError: what it gives is not the same both times, or is no indices.
        """
        self._make = make
        self._num_samples = num_samples
        self._seed = seed
        self.length = -1
        first, second, again = (self(epoch, order_generator(seed, epoch)) for epoch in (0, 1, 0))
        if not np.array_equal(first, again):
            raise TaskError(
                "Task.epoch_indices: gave another order when that of epoch 0 was asked for again; "
                "it must depend on the epoch and the generator it is given alone"
            )
        self.digest = hashlib.sha256(first.tobytes() + second.tobytes()).hexdigest()

    def __call__(self, epoch: int, generator: np.random.Generator) -> Indices:
        """The order of an epoch.

        Raises:
            TaskError: it is no indices of samples, or has another length than that of epoch 0.
        """
        with kept_generators():
            # What it draws from the global generators is the same whoever asks, and when.
            seed_all(random_key(self._seed, Stream.ORDER, epoch))
            given = self._make(epoch, generator)
        where = f"Task.epoch_indices: epoch {epoch}"
        values = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
        if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
            raise TaskError(
                f"{where}: must be a sequence of whole numbers, is {values.dtype} of shape "
                f"{values.shape}: {shown(given)}"
            )
        wrong = np.flatnonzero((values < 0) | (values >= self._num_samples))
        if len(wrong):
            raise TaskError(
                f"{where}: index {values[wrong[0]]} at position {wrong[0]} is no sample of "
                f"dataset('train'), which has {self._num_samples}"
            )
        if self.length < 0:
            self.length = len(values)
        if len(values) != self.length:
            raise TaskError(
                f"{where}: has {len(values)} indices, epoch 0 has {self.length}; all epochs must "
                "have the same number, for the number of steps is fixed at the start"
            )
        return values.astype(np.int64)
