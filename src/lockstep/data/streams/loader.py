"""Microbatches of a stream, which is read in the training process."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from lockstep.data.batch_source import Batch, BatchSource, Collate, set_epoch, to_device
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.data.sampler import BatchLayout
from lockstep.data.streams.reader import StreamReader
from lockstep.parallel.layout import Dealt

_NUM_LANDMARKS = 8


class StreamLoader(BatchSource):
    """Microbatches of a stream in the order in which a rank computes them.

    It goes on reading where the last microbatch ended, if it can.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collate: Collate | None,
        layout: BatchLayout,
        seed: int,
        device: torch.device,
        shuffle_buffer: int = 0,
    ) -> None:
        """Read a stream.

        Args:
            dataset: the stream.
            collate: function from samples to a batch; None takes torch's.
            layout: positions of the stream of each step and microbatch.
            seed: seed of the run.
            device: device that batches are moved to.
            shuffle_buffer: number of samples that are shuffled together; 0 leaves their order.
        """
        self._layout = layout
        self._collate: Collate = collate or default_collate
        self._shuffle_buffer = shuffle_buffer
        super().__init__(dataset, seed, device)
        self._reader = self._new_reader()
        self.pass_starts = self._reader.starts

    def know_passes(self, starts: Sequence[int]) -> None:
        """Learn where passes begin that this process has not read, from one that has."""
        if len(starts) > len(self.pass_starts):
            self.pass_starts[:] = starts

    def check_skipping(self) -> None:
        """Make sure that passing over samples leads to where reading them does.

        Raises:
            DataError: it does not.
        """
        reader = self._new_reader()
        try:
            reader.check_skipping(self._layout.step_size(0))
        finally:
            reader.close()

    def microbatch(self, step: int, microbatch: int) -> Batch | None:
        """One microbatch, from a pass of its own; None if it has no samples."""
        reader = self._new_reader()
        try:
            return self._fetch(reader, step, microbatch)
        finally:
            reader.close()

    def halved(self, step: int, microbatch: int) -> Iterator[Batch]:
        """A microbatch and its two halves, fetched now; nothing if it cannot be halved."""
        reader = self._new_reader()
        epoch, samples = self._samples(reader, step, microbatch)
        reader.close()
        middle = (len(samples) + 1) // 2
        if len(samples) > 1:
            for part in (samples, samples[:middle], samples[middle:]):
                yield self._batch(epoch, step, microbatch, part)

    def stream(
        self, microbatches: Dealt, first_step: int, last_step: int
    ) -> Generator[tuple[int, int, Batch], None, None]:
        """The microbatches of `microbatches` of steps first_step <= step < last_step, in order.

        Each comes with its step and number; those without samples as None.

        Raises:
            LockstepError: the stream raised it, is empty, or has another length than it says.
        """
        for step in range(first_step, last_step):
            for m in range(*microbatches):
                yield step, m, self._fetch(self._reader, step, m)

    def landmarks(self) -> dict[str, str]:
        """Digests of some samples of the newest batch, by place."""
        return self._reader.landmarks(max(1, self._layout.step_size(0) // _NUM_LANDMARKS))

    def close(self) -> None:
        """No more batches will be fetched."""
        self._reader.close()

    def _new_reader(self) -> StreamReader:
        num_samples = self._layout.num_samples
        return StreamReader(self.dataset, num_samples, self._seed, self._shuffle_buffer)

    def _fetch(self, reader: StreamReader, step: int, microbatch: int) -> Batch | None:
        if not self._layout.microbatch_size(step, microbatch):
            return None
        epoch, samples = self._samples(reader, step, microbatch)
        return self._batch(epoch, step, microbatch, samples)

    def _samples(self, reader: StreamReader, step: int, microbatch: int) -> tuple[int, list[Any]]:
        """The samples of a microbatch, and the number of the pass that they begin in."""
        wanted, epoch = self._layout.positions(step, microbatch), self._layout.epoch(step)
        samples = reader.read(epoch, wanted, self._layout.start(step))
        return reader.epoch_of(epoch, wanted.first), samples

    def _batch(self, epoch: int, step: int, microbatch: int, samples: list[Any]) -> Batch:
        set_epoch(epoch, self._collate)
        seed_all(random_key(self._seed, Stream.DATA, step, microbatch))
        batch = self._collate(samples)
        self.watched.check()
        return to_device(batch, self._device)
