"""Reading the parts of one microbatch, in order, from any place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from lockstep.data.parts import Place, StreamParts
from lockstep.data.passes import Pass, ShuffledPass
from lockstep.data.random import Stream, random_key, sample_bytes
from lockstep.errors import DataError
from lockstep.parallel.layout import Range


class PartsPass:
    """One pass over the parts of a microbatch, one after another.

    Attributes:
        epoch: number of the pass.
        position: number of samples that were read or skipped.
    """

    can_skip = True

    def __init__(self, parts: StreamParts, place: Place) -> None:
        """Begin, or go on, at a place."""
        self._parts = parts
        self.epoch = place.epoch
        self._indices = parts.of(place.microbatch)
        self.position = place.position
        self._number = place.part
        self._pass: Pass | None = None
        self._last = place
        self._state: str | None = None
        self._state_count = 0
        self._digest = hashlib.sha256()
        if place.count:
            self._pass = self._reopened(place)

    def take(self, count: int) -> list[Any]:
        """The next samples; fewer at the end."""
        samples: list[Any] = []
        while len(samples) < count and self._number < len(self._indices):
            present, length, left = self._present(), self._length(), count - len(samples)
            if length is not None:
                left = min(left, length - present.position)
            if not left:
                self.check_end()
                self._leave()
                continue
            first = present.position
            found = present.take(left)
            self.position += len(found)
            if self._state is not None:
                self._digest_some(found, first)
            samples += found
            if len(found) < left:
                self._end_part()
        return samples

    def skip(self, count: int) -> int:
        """Skip samples, whole parts of known lengths unread; returns how many there were."""
        left = count
        self._state = None  # the samples after it are not known
        while left and self._number < len(self._indices):
            present, length = self._present(), self._length()
            if length is not None and length - present.position <= left:
                left -= length - present.position
                self._leave()
                continue
            skipped = present.skip(left)
            left -= skipped
            if left:
                self._end_part()
        self.position += count - left
        return count - left

    def place(self) -> Place:
        """The present place, with the state at the last place that was asked for.

        A state may be false, as where a buffer is not in it. So it is used only if it leads to the
        samples that came after it.
        """
        count = self._pass.position if self._pass is not None else 0
        last = self._last
        if (self._number, count) == (last.part, last.count) and self.position == last.position:
            return last
        state = self._state if count else None
        begun = (0, "") if state is None else (self._state_count, self._digest.hexdigest())
        self._last = Place(
            last.microbatch,
            last.epoch,
            last.start,
            self.position,
            self._number,
            count,
            state,
            *begun,
        )
        self._state = None
        if self._pass is not None and count and self._parts.keep_states:
            self._note_state(self._pass.state(), count)
        return self._last

    def check_end(self) -> None:
        """Check that a part that has been read to its known length has no more samples.

        Raises:
            DataError: there are more.
        """
        is_read = self._pass is not None and self._pass.position == self._length()
        if is_read and self._present().take(1):
            raise DataError(
                f"{self._name()}: goes on after the {self._length()} samples that its __len__ says"
            )

    def close(self) -> None:
        """End the pass."""
        if self._pass is not None:
            self._pass.close()

    def _note_state(self, state: str | None, count: int) -> None:
        self._state, self._state_count, self._digest = state, count, hashlib.sha256()

    def _digest_some(self, samples: list[Any], first: int) -> None:
        """Count samples into the digest if they are 0, 1, 2, 4, 8, … after the state.

        Args:
            samples: samples of the present part.
            first: number of the first of them in the part.
        """
        for distance, sample in enumerate(samples, first - self._state_count):
            if not distance & (distance - 1):
                self._digest.update(sample_bytes(sample))

    def _reopened(self, place: Place) -> Pass:
        """The pass over the present part, at a place; by its state if that leads there."""
        index = self._indices[self._number]
        if place.state is not None and self._parts.keep_states:
            one = self._parts.open(index, self.epoch, place.state_count, place.state)
            self._note_state(place.state, place.state_count)
            self._digest_some(one.take(place.count - place.state_count), place.state_count)
            if self._digest.hexdigest() == place.digest:
                return one
            one.close()
            self._parts.keep_states = False
            self._state = None
        one = self._parts.open(index, self.epoch)
        one.skip(place.count)
        return one

    def _present(self) -> Pass:
        """The pass over the present part."""
        if self._pass is None:
            self._pass = self._parts.open(self._indices[self._number], self.epoch)
        return self._pass

    def _end_part(self) -> None:
        """Go on from the end of a part to the next one.

        Raises:
            DataError: it should not have ended there.
        """
        length = self._length()
        if length is not None:
            raise DataError(
                f"{self._name()}: ended after {self._present().position} samples in epoch "
                f"{self.epoch}, its __len__ says {length}"
            )
        self._leave()

    def _leave(self) -> None:
        self.close()
        self._pass = self._state = None
        self._number += 1

    def _length(self) -> int | None:
        lengths = self._parts.lengths
        return None if lengths is None else lengths[self._indices[self._number]]

    def _name(self) -> str:
        return self._parts.name(self._indices[self._number])


class ShuffledParts(ShuffledPass):
    """A pass over parts whose samples are shuffled in blocks."""

    def __init__(self, inner: PartsPass, block_size: int, key: int) -> None:
        def generator(block: int) -> np.random.Generator:
            bits = random_key(key, Stream.BLOCK, inner.epoch, block)
            return np.random.Generator(np.random.Philox(key=bits))

        super().__init__(inner, block_size, generator)
        self._parts = inner
        self._block_place = inner.place()

    def place(self) -> Place:
        """The place where the present block begins, for its samples have to be read again."""
        return self._block_place if self._next < len(self._block) else self._parts.place()

    def check_end(self) -> None:
        """See `PartsPass.check_end`."""
        self._parts.check_end()

    def _load(self) -> None:
        self._block_place = self._parts.place()
        super()._load()


class PartsReader:
    """Reads the samples of one microbatch; quickly if they come after a known place.

    Parts of unknown length are read again when all of the microbatch's have ended; positions then
    go on counting.
    """

    def __init__(
        self, parts: StreamParts, microbatch: int, places: Iterable[Place], shuffle_buffer: int
    ) -> None:
        """Read the parts of a microbatch.

        Args:
            parts: all parts.
            microbatch: number of the microbatch.
            places: known places of this microbatch.
            shuffle_buffer: number of samples that are shuffled together; 0 leaves their order.
        """
        self._parts = parts
        self._microbatch = microbatch
        self._places = tuple(places)
        self._shuffle_buffer = shuffle_buffer
        self._length = parts.length_of(microbatch)
        self._pass: PartsPass | ShuffledParts | None = None
        self._epoch = self._start = self._position = 0

    def read(self, epoch: int, wanted: Range) -> tuple[int, list[Any]]:
        """The number of the pass that the first sample is of, and the samples at some positions.

        Args:
            epoch: number of the epoch; 0 for parts of unknown length, whose positions count on.
            wanted: positions in the epoch, at least one.

        Raises:
            DataError: the parts are empty, or have other lengths than they say.
        """
        try:
            if self._pass is None or not self._is_at(epoch, wanted.first):
                self._go_to(epoch, wanted.first)
            of_first, samples = self._take(len(wanted))
            if self._position == self._length and self._pass is not None:
                self._pass.check_end()
        except BaseException:
            self.close()  # a generator that has raised would look as if it had ended
            raise
        return of_first, samples

    def place(self) -> Place:
        """The place from which the sample after those that were read last can be reached."""
        assert self._pass is not None
        return self._pass.place()

    def close(self) -> None:
        """End the present pass; the next reading begins at a place."""
        if self._pass is not None:
            self._pass.close()
        self._pass = None

    def _is_at(self, epoch: int, position: int) -> bool:
        is_right = self._length is None or self._epoch == epoch
        return is_right and self._start + self._position == position

    def _go_to(self, epoch: int, position: int) -> None:
        is_endless = self._length is None
        first = Place(self._microbatch, epoch)
        near = [p for p in self._places if p.leads_to(None if is_endless else epoch, position)]
        self._open(max(near, key=lambda place: place.order, default=first))
        while (left := position - self._start - self._position) > 0:
            assert self._pass is not None
            skipped = self._pass.skip(left)
            self._position += skipped
            if skipped < left:
                self._next_pass()

    def _open(self, place: Place) -> None:
        self.close()
        self._epoch, self._start, self._position = place.epoch, place.start, place.position
        self._pass = PartsPass(self._parts, place)
        if self._shuffle_buffer:
            key = self._parts.key(self._microbatch)
            self._pass = ShuffledParts(self._pass, self._shuffle_buffer, key)

    def _take(self, count: int) -> tuple[int, list[Any]]:
        """The next samples, of several passes if need be, and the number of the first one's."""
        of_first, samples = self._epoch, list[Any]()
        while len(samples) < count:
            assert self._pass is not None
            found = self._pass.take(count - len(samples))
            of_first = of_first if samples else self._epoch
            self._position += len(found)
            samples += found
            if len(samples) < count:
                self._next_pass()
        return of_first, samples

    def _next_pass(self) -> None:
        """Read the parts again.

        Raises:
            DataError: they have no samples.
        """
        if not self._position:
            raise DataError(
                f"{self._parts.name(self._microbatch)}: microbatch {self._microbatch} has no "
                f"samples in pass {self._epoch} over its parts; it needs at least one"
            )
        self._open(Place(self._microbatch, self._epoch + 1, self._start + self._position))
