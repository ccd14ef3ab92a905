"""The samples of each step and microbatch, and their order: pure functions of the seed.

They do not depend on ranks. So any number of ranks can go on in the middle of an epoch where any
other number has stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.config.parsing import shown
from lockstep.data.random import Stream, kept_generators, random_key, seed_all
from lockstep.errors import ConfigError, DataError, TaskError
from lockstep.parallel.layout import Range, split

Indices: TypeAlias = npt.NDArray[np.int64]
Order = Callable[[int, np.random.Generator], Indices]
"""Function of an epoch (from 0) and its generator that returns indices of samples, int64 [N]."""


def order_generator(seed: int, epoch: int) -> np.random.Generator:
    """The generator that the order of an epoch is drawn from.

    It is counter-based, so that the order of an epoch does not depend on the epochs before it.
    """
    return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))


def shuffled(num_samples: int) -> Order:
    """All samples, in a new random order for each epoch."""
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
    # A product that is rounded up to the whole sum would give an index past the last sample.
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
        """Get the order of epoch 0 twice, with that of another epoch in between.

        Args:
            make: the task's function; must not return None.
            num_samples: number of samples of the dataset.
            seed: seed of the run.

        Raises:
            TaskError: the two orders differ, or are no indices.
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
            TaskError: they are no indices of samples, or differ in number from those of epoch 0.
        """
        with kept_generators():
            # So its draws from the global generators depend on the epoch only.
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


class BatchLayout:
    """Which positions of an epoch make up each step and microbatch.

    Without a number of samples, there is one endless epoch.

    Attributes:
        num_samples: number of positions of an epoch; None if it is not known.
        steps_per_epoch: number of steps in an epoch, the last of which may be smaller; None if it
            is not known.
    """

    def __init__(
        self,
        num_samples: int | None,
        batch_size: int,
        num_microbatches: int,
        drop_last: bool = False,
    ) -> None:
        """Lay out an epoch.

        Args:
            num_samples: number of samples of an epoch, at least 1; None if it is not known.
            batch_size: number of samples of a global batch.
            num_microbatches: number of parts of a global batch.
            drop_last: whether the samples that do not fill an epoch's last batch are left out.

        Raises:
            DataError: there are no samples.
            ConfigError: there are fewer than `batch_size`, and `drop_last` leaves out all of them.
        """
        self.num_samples = num_samples
        self.steps_per_epoch: int | None = None
        self._batch_size = batch_size
        self._num_microbatches = num_microbatches
        self._splits: dict[int, list[Range]] = {}
        if num_samples is None:
            return
        if num_samples < 1:
            raise DataError("dataset('train'): is empty; training needs at least one sample")
        if drop_last and num_samples < batch_size:
            raise ConfigError(
                "data.drop_last=True: leaves nothing to train on, since an epoch has "
                f"{num_samples} samples and batch_size={batch_size}; lower batch_size, or set "
                "data.drop_last=False"
            )
        full = num_samples // batch_size
        self.steps_per_epoch = full if drop_last else -(-num_samples // batch_size)

    def epoch(self, step: int) -> int:
        """The epoch (from 0) that step (from 0) belongs to."""
        return step // self.steps_per_epoch if self.steps_per_epoch else 0

    def is_due(self, num_steps: int, every: int) -> bool:
        """Whether something is due after so many steps: every so many, or, for 0, each epoch."""
        return num_steps % every == 0 if every else self.is_epoch_end(num_steps)

    def due_among(self, counts: range, every: int) -> range:
        """Those of some counts, in steps of 1, for which `is_due` is true."""
        period = every or self.steps_per_epoch
        if period is None:
            return range(0)
        return range(-(-counts.start // period) * period, counts.stop, period)

    def is_epoch_end(self, num_steps: int) -> bool:
        """Whether an epoch ends after the first `num_steps` steps of a run."""
        return self.steps_per_epoch is not None and num_steps % self.steps_per_epoch == 0

    def step_size(self, step: int) -> int:
        """The number of samples in the global batch of a step."""
        return self._size_from(self.start(step))

    def start(self, step: int) -> int:
        """The position in its epoch at which the global batch of a step begins."""
        if self.steps_per_epoch is not None:
            step %= self.steps_per_epoch
        return step * self._batch_size

    def positions(self, step: int, microbatch: int) -> Range:
        """The positions in its epoch of a microbatch; none if the batch has too few samples."""
        start = self.start(step)
        first, last = self._ranges(self._size_from(start))[microbatch]
        return Range(start + first, start + last)

    def microbatch_size(self, step: int, microbatch: int) -> int:
        """The number of samples in a microbatch, which may be 0."""
        return len(self._ranges(self.step_size(step))[microbatch])

    def order_digest(self, step: int) -> int:
        """A digest, 52 bits, of the order that the task gives for the epoch of a step.

        It is 0 where the task gives none, or this process has not used it.
        """
        return 0

    def _size_from(self, start: int) -> int:
        """The number of samples in a global batch that begins at a position of its epoch."""
        if self.num_samples is None:
            return self._batch_size
        return min(self._batch_size, self.num_samples - start)

    def _ranges(self, size: int) -> list[Range]:
        # At most two sizes occur: that of full batches and that of an epoch's last.
        if size not in self._splits:
            self._splits[size] = split(size, self._num_microbatches)
        return self._splits[size]


class PartsLayout(BatchLayout):
    """Which samples of its own parts of a stream make up each microbatch.

    Positions are those in the parts of the microbatch. An epoch ends when the parts of all
    microbatches have ended; those that end earlier leave their microbatches empty until then.
    """

    def __init__(
        self,
        lengths: Sequence[int] | None,
        batch_size: int,
        num_microbatches: int,
        drop_last: bool = False,
    ) -> None:
        """Lay out an epoch.

        Args:
            lengths: number of samples of each microbatch; None if they are not known.
            batch_size: number of samples of a global batch.
            num_microbatches: number of parts of a global batch.
            drop_last: whether an epoch ends with the last batch in which no sample is missing.

        Raises:
            ConfigError: `drop_last` leaves out all samples.
        """
        num_samples = None if lengths is None else sum(lengths)
        super().__init__(num_samples, batch_size, num_microbatches)
        self._sizes = [len(part) for part in split(batch_size, num_microbatches)]
        self._lengths = lengths
        if lengths is None:
            return
        pairs = [*zip(lengths, self._sizes, strict=True)]
        full = min(length // size for length, size in pairs)
        self.steps_per_epoch = full if drop_last else max(-(-n // size) for n, size in pairs)
        if not self.steps_per_epoch:
            shortest = min(range(num_microbatches), key=lengths.__getitem__)
            raise ConfigError(
                f"data.drop_last=True: leaves nothing to train on, since microbatch {shortest} has "
                f"{self._sizes[shortest]} samples in each step, and its parts have "
                f"{lengths[shortest]}; set data.drop_last=False, lower batch_size, or give "
                "all parts as many samples"
            )

    def step_size(self, step: int) -> int:
        """See `BatchLayout.step_size`."""
        return sum(self.microbatch_size(step, m) for m in range(len(self._sizes)))

    def positions(self, step: int, microbatch: int) -> Range:
        """The positions of a microbatch among the samples of its parts; none if they have ended."""
        size = self._sizes[microbatch]
        if self._lengths is None or self.steps_per_epoch is None:
            return Range(step * size, (step + 1) * size)
        length, start = self._lengths[microbatch], step % self.steps_per_epoch * size
        return Range(min(start, length), min(start + size, length))

    def microbatch_size(self, step: int, microbatch: int) -> int:
        """See `BatchLayout.microbatch_size`."""
        return len(self.positions(step, microbatch))


class ElasticSampler(BatchLayout):
    """Assigns samples of a map-style dataset to steps, in a new random order for each epoch.

    Attributes:
        is_given: whether the order is the task's.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        num_microbatches: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        order: Order | None = None,
    ) -> None:
        """Make a sampler.

        Args:
            num_samples: number of samples of an epoch, at least 1.
            batch_size: number of samples of a global batch.
            num_microbatches: number of parts of a global batch.
            seed: seed of the orders of all epochs.
            shuffle: whether to draw the orders; else samples come in the dataset's order.
            drop_last: whether the samples that do not fill an epoch's last batch are left out.
            order: function that returns the samples of an epoch, instead of `shuffle`.

        Raises:
            DataError: there are no samples.
            ConfigError: there are fewer than `batch_size`, and `drop_last` leaves out all of them.
        """
        super().__init__(num_samples, batch_size, num_microbatches, drop_last)
        self._seed = seed
        self._draw = order or (shuffled if shuffle else in_order)(num_samples)
        self._epoch = -1
        self.is_given = order is not None
        self._digests: dict[int, int] = {}
        self._order = np.empty(0, dtype=np.int64)

    def indices(self, step: int, microbatch: int) -> Tensor:
        """The samples of a microbatch, int64 [N]; N is 0 if the batch has too few samples."""
        epoch = self.epoch(step)
        if epoch != self._epoch:
            drawn = self._draw(epoch, order_generator(self._seed, epoch))
            self._order = drawn.astype(np.int64, copy=False)
            self._epoch = epoch
            if self.is_given:
                # Samples are fetched ahead: steps of the epoch before may still be computed.
                newest = {epoch - 1: self._digests.get(epoch - 1, 0)}
                self._digests = newest | {epoch: _digest(self._order)}
        first, last = self.positions(step, microbatch)
        # Slicing an array takes half the time of slicing a tensor.
        return torch.from_numpy(self._order[first:last])

    def is_drawn(self, step: int) -> bool:
        """Whether no code of the task is called for the samples of a step."""
        return not self.is_given or self.epoch(step) == self._epoch

    def order_digest(self, step: int) -> int:
        """See `BatchLayout.order_digest`."""
        return self._digests.get(self.epoch(step), 0)


def _digest(order: np.ndarray[Any, Any]) -> int:
    data = np.ascontiguousarray(order).tobytes()
    # 52 bits are exact as a float64, and 0 stands for no order.
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 12 | 1
