"""Datasets that are read from the beginning to the end, sample by sample.

The samples of a stream are numbered in the order in which they come. These numbers determine the
samples of each step and microbatch, so every rank reads the same stream and skips the samples of
other ranks. A resumed run skips the samples that it has seen.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from lockstep.config.parsing import parse_json, shown
from lockstep.data.loader import set_epoch
from lockstep.data.random import data_digest, has_drawn, is_digested_whole, seed_all
from lockstep.errors import DataError

_BLOCK = 64
"""Samples that are read together, and are in memory while a stream passes over them."""


@runtime_checkable
class Skips(Protocol):
    """An iterator over a stream that can skip samples cheaply."""

    def skip(self, count: int) -> int:
        """Skip the next `count` samples.

        Returns:
            The number of skipped samples: fewer if the stream ends before.
        """


@runtime_checkable
class Stateful(Protocol):
    """A stream, or an iterator over one, that can go on from a saved position (torchdata's)."""

    def state_dict(self) -> dict[str, Any]:
        """The present position, in values that JSON has."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from a position."""


def is_stream(dataset: object) -> bool:
    """Whether a dataset can only be read in order, by `__iter__`, as a whole or in parts."""
    if isinstance(dataset, IterableDataset):
        return True
    can_read = hasattr(dataset, "__iter__") or hasattr(dataset, "shard")
    return can_read and not hasattr(dataset, "__getitem__")


def stream_length(dataset: Any, split: str) -> int | None:
    """The number of samples in one pass, if the stream knows it.

    Raises:
        DataError: it cannot be read several times, or makes batches itself.
    """
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"dataset({split!r}): is a DataLoader, which makes batches itself; return the dataset "
            "it reads, and set batch_size, data.num_workers and Task.collate"
        )
    if not hasattr(dataset, "__iter__"):
        raise DataError(
            f"dataset({split!r}): a {type(dataset).__name__} has shard and no __iter__, so it can "
            "only be read in parts; set data.stream_shards for the split train, and give others "
            "__iter__"
        )
    # A class of the user's may start over in __iter__ and return itself.
    of_python = type(dataset).__module__.partition(".")[0] in sys.stdlib_module_names
    if isinstance(dataset, Iterator) and of_python:
        raise DataError(
            f"dataset({split!r}): is a {type(dataset).__name__}, an iterator, which can be read "
            "only once; return an object whose __iter__ starts from the beginning each time"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # torch's own raise these where nothing is known
        return None


@dataclass
class Draws:
    """Whether a stream draws from the global generators, which shows only when it does.

    Attributes:
        seen: whether it has, after the first sample of a pass.
    """

    seen: bool = False


class Pass:
    """One pass over a stream.

    The draws of the stream from the global generators depend on the number of the next sample only.

    Attributes:
        position: number of samples that were read or skipped.
    """

    def __init__(
        self,
        made: Callable[[], Iterable[Any]],
        epoch: int,
        key: Callable[[int], int],
        draws: Draws,
        position: int = 0,
        state: str | None = None,
    ) -> None:
        """Begin a pass.

        Args:
            made: function that returns the stream; called again if the pass begins again.
            epoch: number of the pass, from 0.
            key: function from a position to the seed of the global generators, 63 bits.
            draws: what is known of the stream's draws; what is found is noted.
            position: where in the pass to begin.
            state: what `state` has returned there; None if there is none, and `position` is 0.

        Raises:
            DataError: the stream refuses the state.
        """
        self._made = made
        self._epoch = epoch
        self._key = key
        self._draws = draws
        self._begin = position, state
        self._open()

    def take(self, count: int) -> list[Any]:
        """The next samples; fewer at the end.

        Setting the generators takes as long as reading many a sample. So it is done once for a
        block of samples, and if they turn out to have drawn numbers, they are read again one by
        one. Blocks lie at multiples of their size: code may look at the seed without drawing, and
        must see the same one whichever samples are read together here.
        """
        samples: list[Any] = []
        while len(samples) < count:
            left = count - len(samples)
            if self._draws.seen:
                return samples + self._one_by_one(left)
            if self.position == self._begin[0]:
                left = 1
                found: list[Any] | None = self._first()
            else:
                left = min(left, _BLOCK - self.position % _BLOCK)
                found = self._together(left)
            samples += found or []
            if found is not None and len(found) < left:
                break
        return samples

    @property
    def can_skip(self) -> bool:
        """Whether skipping samples costs less than reading them."""
        return self._skipping is not None

    def skip(self, count: int) -> int:
        """Skip samples; returns how many there were.

        Raises:
            DataError: the stream's own `skip` returns something else.
        """
        if self._skipping is None:
            begin, end = self.position, self.position + count
            while self.position < end and self.take(min(end - self.position, _BLOCK)):
                pass
            return self.position - begin
        seed_all(self._key(self.position))
        skipped: object = self._skipping.skip(count) if count else 0
        if not isinstance(skipped, int) or not 0 <= skipped <= count:
            kind = type(self._iterator).__name__
            raise DataError(
                f"{kind}.skip({count}): must return how many samples were passed over, at most "
                f"{count}; returned {skipped!r}"
            )
        self.position += skipped
        return skipped

    def state(self) -> str | None:
        """The states of the stream and of its iterator, as JSON; None if they have none.

        Raises:
            DataError: JSON has no form for a state.
        """
        if self.position == self._begin[0]:
            return self._begin[1]  # many streams know a state only after their first sample
        states = [None if one is None else one.state_dict() for one in self._stateful]
        if states == [None, None]:
            return None
        try:
            return json.dumps(states)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{type(self._dataset).__name__}.state_dict: must return what JSON has (dicts, "
                f"lists, texts, numbers), to be kept in checkpoints: {error}"
            ) from None

    def close(self) -> None:
        """End the pass, and close a generator."""
        if isinstance(self._iterator, types.GeneratorType):
            self._iterator.close()

    def _open(self) -> None:
        """Go to the beginning."""
        self.position, state = self._begin
        self._dataset = self._made()
        set_epoch(self._epoch, self._dataset)
        seed_all(self._key(0))
        of_dataset, of_iterator = (None, None) if state is None else parse_json(state)
        _load(self._dataset, of_dataset)
        self._iterator = iterator = iter(self._dataset)
        _load(iterator, of_iterator)
        # To ask for a protocol takes long.
        self._skipping = iterator if isinstance(iterator, Skips) else None
        owners = (self._dataset, iterator)
        self._stateful = [one if isinstance(one, Stateful) else None for one in owners]

    def _one_by_one(self, count: int) -> list[Any]:
        """The next samples, with the generators set before each."""
        samples: list[Any] = []
        for _ in range(count):
            seed_all(self._key(self.position))
            try:
                samples.append(next(self._iterator))
            except StopIteration:
                break
            self.position += 1
        return samples

    def _first(self) -> list[Any]:
        """What comes first, alone: to begin may draw."""
        key = self._key(self.position // _BLOCK * _BLOCK)
        seed_all(key)
        samples = list(islice(self._iterator, 1))
        if self.position % _BLOCK and has_drawn(key):
            # A sample that draws does so by its own number, wherever a pass begins.
            self.close()
            self._open()
            return self._one_by_one(1)
        self.position += len(samples)
        return samples

    def _together(self, count: int) -> list[Any] | None:
        """Samples of one block; None if they have drawn numbers, and are to be read again."""
        position = self.position
        key = self._key(position // _BLOCK * _BLOCK)
        seed_all(key)
        try:
            samples = list(islice(self._iterator, count))
        except Exception:
            if not has_drawn(key):
                raise
        else:
            if not has_drawn(key):
                self.position += len(samples)
                return samples
        self._draws.seen = True
        self.close()
        self._open()
        self.skip(position - self.position)
        return None


def note_draws(make: Callable[[Draws], Pass], draws: Draws, count: int) -> None:
    """Note whether a stream draws for its first samples.

    Draws that leave the generators as they were are found by other samples.

    Args:
        make: function that begins a pass.
        draws: where to note it.
        count: number of samples to read.
    """
    found, known = set(), (Draws(seen=False), Draws(seen=True))
    is_seen_whole = True
    for one in map(make, known):
        samples = one.take(count)
        found.add(data_digest(samples))
        is_seen_whole = is_seen_whole and is_digested_whole(samples)
        one.close()
    # What the digest cannot see may have been drawn.
    draws.seen = draws.seen or known[0].seen or len(found) > 1 or not is_seen_whole


def _load(owner: Any, state: Any) -> None:
    """Let a stream or an iterator go on from a state, if there is one."""
    if state is None:
        return
    try:
        owner.load_state_dict(state)
    except Exception as error:
        raise DataError(
            f"{type(owner).__name__}.load_state_dict: cannot go on from {shown(state)}: "
            f"{type(error).__name__}: {error}"
        ) from error


class Skipping(Protocol):
    """What samples can be shuffled of: a pass over a stream, or over parts of one."""

    position: int

    def take(self, count: int) -> list[Any]:
        """The next samples; fewer at the end."""

    @property
    def can_skip(self) -> bool:
        """Whether skipping samples costs less than reading them."""

    def skip(self, count: int) -> int:
        """Skip samples; returns how many there were."""

    def close(self) -> None:
        """End the pass."""


class ShuffledPass:
    """A pass whose samples are shuffled in blocks.

    A block's order depends on its number only, so a run can start at any block. (The order of a
    buffer whose slots are refilled one by one depends on all samples before.)
    """

    def __init__(self, inner: Skipping, block_size: int, generator: Callable[[int], Any]) -> None:
        """Shuffle a pass.

        Args:
            inner: the pass, from its beginning.
            block_size: number of samples of a block.
            generator: function from the number of a block to a numpy generator.
        """
        self._inner = inner
        self._size = block_size
        self._generator = generator
        self._block: list[Any] = []
        self._next = 0

    @property
    def can_skip(self) -> bool:
        """Whether skipping samples costs less than reading them."""
        return self._inner.can_skip

    def take(self, count: int) -> list[Any]:
        """The next samples; fewer at the end."""
        samples: list[Any] = []
        while len(samples) < count:
            if self._next == len(self._block):
                self._load()
            if not self._block:
                break
            more = self._block[self._next : self._next + count - len(samples)]
            self._next += len(more)
            samples += more
        return samples

    def skip(self, count: int) -> int:
        """Skip samples; returns how many there were."""
        rest = min(count, len(self._block) - self._next)
        self._next += rest
        if rest == count:
            return count
        whole = (count - rest) // self._size * self._size
        skipped = self._inner.skip(whole)
        if skipped < whole:
            return rest + skipped
        left = count - rest - whole
        self._block, self._next = [], 0
        if left:
            self._load()
            self._next = min(left, len(self._block))
        return rest + whole + self._next

    def close(self) -> None:
        """End the pass."""
        self._inner.close()

    def _load(self) -> None:
        number = self._inner.position // self._size
        block = self._inner.take(self._size)
        self._block = [block[i] for i in self._generator(number).permutation(len(block))]
        self._next = 0
