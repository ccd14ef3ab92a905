"""Which samples belong to which step and microbatch: a pure function of the seed.

Ranks do not appear here: they come and go, the samples of (step, microbatch) stay the same. So any
number of ranks can go on in the middle of an epoch where any other number left off.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import DataError
from lockstep.parallel.layout import Range, split


class ElasticSampler:
    """Assigns every sample to one step of an epoch, in an order drawn anew for each epoch.

    Attributes:
        steps_per_epoch: number of steps in an epoch; the last one may be smaller, no sample is
            dropped.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        num_microbatches: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        """Make a sampler.

        Args:
            num_samples: number of samples of the dataset, at least 1.
            batch_size: number of samples of a global batch.
            num_microbatches: number of parts of a global batch.
            seed: seed of the orders of all epochs.
            shuffle: whether to draw the orders; else samples come in the dataset's order.

        Raises:
            DataError: there are no samples.
        """
        if num_samples < 1:
            raise DataError("dataset('train'): is empty; training needs at least one sample")
        self.num_samples = num_samples
        self.steps_per_epoch = -(-num_samples // batch_size)
        self._batch_size = batch_size
        self._num_microbatches = num_microbatches
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)
        self._splits: dict[int, list[Range]] = {}

    def epoch(self, step: int) -> int:
        """The epoch (from 0) that step (from 0) belongs to."""
        return step // self.steps_per_epoch

    def step_size(self, step: int) -> int:
        """The number of samples in the global batch of a step."""
        start = step % self.steps_per_epoch * self._batch_size
        return min(self._batch_size, self.num_samples - start)

    def indices(self, step: int, microbatch: int) -> Tensor:
        """The samples of a microbatch, int64 [N]; N is 0 if the batch has too few samples."""
        self._draw(self.epoch(step))
        start = step % self.steps_per_epoch * self._batch_size
        first, last = self._ranges(self.step_size(step))[microbatch]
        return self._order[start + first : start + last]

    def microbatch_size(self, step: int, microbatch: int) -> int:
        """The number of samples in a microbatch, which may be 0."""
        return len(self._ranges(self.step_size(step))[microbatch])

    def _ranges(self, size: int) -> list[Range]:
        # At most two sizes occur: that of full batches and that of an epoch's last.
        if size not in self._splits:
            self._splits[size] = split(size, self._num_microbatches)
        return self._splits[size]

    def _draw(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if self._shuffle:
            # Counter-based: the order of an epoch does not depend on the epochs before it.
            bits = np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64))
            order = np.random.Generator(bits).permutation(self.num_samples)
            self._order = torch.from_numpy(order.astype(np.int64, copy=False))
        elif not self._order.numel():
            self._order = torch.arange(self.num_samples)
