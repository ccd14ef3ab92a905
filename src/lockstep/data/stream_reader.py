"""Reading a stream from any position, and loading its microbatches."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from lockstep.data.loader import Batch, BatchSource, Collate, set_epoch
from lockstep.data.passes import Draws, Pass, ShuffledPass, note_draws
from lockstep.data.random import PLAIN, Stream, data_digest, random_key, sample_digest, seed_all
from lockstep.data.sampler import BatchLayout
from lockstep.errors import DataError
from lockstep.parallel.layout import Assigned, Range


class StreamReader:
    """Reads samples at any positions of a stream; quickly if they come after the present one.

    A stream of unknown length is read again from its beginning when it ends; positions then go on
    counting.

    Attributes:
        starts: known positions at which the passes over a stream of unknown length begin.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        length: int | None,
        seed: int,
        shuffle_buffer: int = 0,
        draws: Draws | None = None,
    ) -> None:
        """Read a stream.

        Args:
            dataset: the stream, of the split `train`.
            length: number of samples of a pass, if it is known.
            seed: seed of the run.
            shuffle_buffer: number of samples that are shuffled together; 0 leaves their order.
            draws: what is known of the stream's draws of random numbers; None if nothing is.
        """
        self._dataset = dataset
        self._length = length
        self._seed = seed
        self._block_size = shuffle_buffer
        self._draws = draws or Draws()
        self.starts = [0]
        self._pass: Pass | ShuffledPass | None = None
        self._epoch = 0
        self._position = 0
        self._kept: dict[int, Any] = {}
        self._batch_start = 0

    def read(self, epoch: int, wanted: Range, batch_start: int) -> list[Any]:
        """The samples at some positions.

        Samples of the same batch are kept, in case they are needed again after a loss of ranks.

        Args:
            epoch: number of the pass; 0 for streams of unknown length, whose positions count on.
            wanted: positions in the epoch.
            batch_start: position in the epoch of the global batch they are of.

        Raises:
            DataError: the stream is empty, or has another length than it says.
        """
        try:
            return self._read(epoch, wanted, batch_start)
        except BaseException:
            self.close()  # a generator that has raised would look as if it had ended
            raise

    def check_skipping(self, count: int) -> None:
        """Check that the stream's own `skip` ends at the same sample as reading does.

        Args:
            count: number of samples to skip.

        Raises:
            DataError: it does not.
        """
        one = self._plain(0)
        if one.can_skip:
            skipped = one.skip(count)
            after_skipping = data_digest(one.take(1))
            one.close()
            one = self._plain(0, Draws(seen=True))  # which never skips
            read = len(one.take(count))
            after_reading = data_digest(one.take(1))
            if (skipped, after_skipping) != (read, after_reading):
                which = "the same" if after_skipping == after_reading else "another one"
                raise DataError(
                    f"dataset('train'): skip({count}) has passed over {skipped} samples, and the "
                    f"next sample is {which} as after reading {read}; skip must lead to where "
                    "next() does"
                )
        one.close()

    def epoch_of(self, epoch: int, position: int) -> int:
        """The number of the pass that a position, which has been read, lies in."""
        return epoch if self._length is not None else bisect_right(self.starts, position) - 1

    def landmarks(self, stride: int) -> dict[str, str]:
        """Digests of every `stride`-th sample of the newest batch that was read, by location."""
        epoch = self._epoch if self._length is not None else 0
        return {
            f"sample {position} of epoch {epoch}": sample_digest(sample)
            for position, sample in self._kept.items()
            if position >= self._batch_start and (position - self._batch_start) % stride == 0
        }

    def close(self) -> None:
        """End the present pass; the next reading begins another one."""
        if self._pass is not None:
            self._pass.close()
        self._pass = None
        self._kept = {}

    def _read(self, epoch: int, wanted: Range, batch_start: int) -> list[Any]:
        if self._pass is None or self._is_behind(epoch, wanted):
            self._begin(epoch, batch_start)
        if batch_start != self._batch_start:
            self._kept = {p: s for p, s in self._kept.items() if p >= batch_start}
        self._skip(batch_start)
        if self._pass is not None and self._pass.can_skip:
            self._skip(wanted.first)
        while self._position < wanted.last:
            assert self._pass is not None
            left = wanted.last - self._position
            found = self._pass.take(left)
            self._kept.update(enumerate(found, self._position))
            self._position += len(found)
            if len(found) < left:
                self._end_pass()
        if self._position == self._length:
            self._check_end()
        self._batch_start = batch_start
        return [_copied(self._kept[position]) for position in range(*wanted)]

    def _is_behind(self, epoch: int, wanted: Range) -> bool:
        """Whether the present pass is beyond a wanted position whose sample is not kept."""
        if epoch != (self._epoch if self._length is not None else 0):
            return True
        return any(
            p not in self._kept for p in range(wanted.first, min(wanted.last, self._position))
        )

    def _begin(self, epoch: int, position: int) -> None:
        """Begin the pass that contains a position, or the last known pass before it."""
        if self._length is None:
            epoch = bisect_right(self.starts, position) - 1
            position = self.starts[epoch]
        else:
            position = 0
        self.close()
        self._pass, self._epoch, self._position = self._open(epoch), epoch, position

    def note_draws(self) -> None:
        """Find out at the first samples whether the stream draws random numbers."""
        note_draws(lambda draws: self._plain(0, draws), self._draws, _NUM_LANDMARKS)

    def _plain(self, epoch: int, draws: Draws | None = None) -> Pass:
        def key(position: int) -> int:
            return random_key(self._seed, Stream.SAMPLE, epoch, position)

        return Pass(lambda: self._dataset, epoch, key, draws or self._draws)

    def _open(self, epoch: int) -> Pass | ShuffledPass:
        def generator(block: int) -> np.random.Generator:
            bits = random_key(self._seed, Stream.BLOCK, epoch, block)
            return np.random.Generator(np.random.Philox(key=bits))

        plain = self._plain(epoch)
        return ShuffledPass(plain, self._block_size, generator) if self._block_size else plain

    def _skip(self, position: int) -> None:
        """Skip the samples before a position."""
        while self._position < position:
            assert self._pass is not None
            wanted = position - self._position
            skipped = self._pass.skip(wanted)
            self._position += skipped
            if skipped < wanted:
                self._end_pass()

    def _end_pass(self) -> None:
        """Go on with the next pass.

        Raises:
            DataError: the stream should not have ended here.
        """
        if self._length is not None:
            raise DataError(
                f"dataset('train'): ended after {self._position} samples in epoch {self._epoch}, "
                f"its __len__ says {self._length}"
            )
        if self._position == self.starts[self._epoch]:
            again = f" in epoch {self._epoch}" if self._epoch else ""
            raise DataError(
                f"dataset('train'): is empty{again}; training needs at least one sample"
            )
        known = self.starts[self._epoch + 1 :]
        if not known:
            self.starts.append(self._position)
        elif known[0] != self._position:
            first = self.starts[self._epoch]
            raise DataError(
                f"dataset('train'): ended after {self._position - first} samples in epoch "
                f"{self._epoch}, and after {known[0] - first} when it was read before; it must "
                "give the same samples each time"
            )
        assert self._pass is not None
        self._pass.close()
        self._epoch += 1
        self._pass = self._open(self._epoch)

    def _check_end(self) -> None:
        """Check that a pass that has been read to its end has no more samples.

        Raises:
            DataError: there are more.
        """
        assert self._pass is not None
        if self._pass.take(1):
            raise DataError(
                f"dataset('train'): goes on after the {self._length} samples that its __len__ says"
            )


def _copied(sample: Any) -> Any:
    """A copy of a sample: a collate function may change it in place."""
    kind = type(sample)
    if kind is dict:
        return {key: _copied(value) for key, value in sample.items()}
    if kind is list:  # long ones are numbers, mostly
        return list(sample) if PLAIN.issuperset(map(type, sample)) else [*map(_copied, sample)]
    return sample if kind in PLAIN else tree_map(_copied_leaf, sample)


def _copied_leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, (np.ndarray, bytearray)) else value


_NUM_LANDMARKS = 8


class StreamLoader(BatchSource):
    """Microbatches of a stream in the order in which a rank computes them.

    If possible, it goes on reading where the last microbatch ended.
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
        self._draws = Draws()
        super().__init__(dataset, seed, device)
        self._reader = self._new_reader()
        self.pass_starts = self._reader.starts

    def know_passes(self, starts: Sequence[int]) -> None:
        """Take over where passes begin from a process that has read more of them."""
        if len(starts) > len(self.pass_starts):
            self.pass_starts[:] = starts

    def check_skipping(self) -> None:
        """Check that skipping samples ends at the same sample as reading them does.

        Raises:
            DataError: it does not.
        """
        reader = self._new_reader()
        try:
            reader.check_skipping(self._layout.step_size(0))
            reader.note_draws()
        finally:
            reader.close()

    def microbatch(self, step: int, microbatch: int) -> Batch | None:
        """One microbatch, from a pass of its own; None if it has no samples."""
        reader = self._new_reader()
        try:
            return self.copies(self._fetch(reader, step, microbatch))
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
                yield self.copies(self._batch(epoch, step, microbatch, part))

    def stream(
        self, microbatches: Assigned, first_step: int, last_step: int
    ) -> Generator[tuple[int, int, Batch], None, None]:
        """See `BatchSource.stream`.

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
        return StreamReader(
            self.dataset, num_samples, self._seed, self._shuffle_buffer, self._draws
        )

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
        return batch
