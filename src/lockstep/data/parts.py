"""Parts of a stream, each of which feeds one microbatch, wherever that is computed.

With `data.stream_shards=S` and M microbatches, microbatch m reads the parts m, m + M, m + 2 M, …,
one after another. So a rank reads the parts of its own microbatches only, and what it reads depends
on nothing but the microbatch. A `Place` says how far that reading has come, in a form that goes
into checkpoints and to other ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config.parsing import parse_json, shown
from lockstep.data.loader import set_epoch
from lockstep.data.passes import Draws, Pass, is_stream, note_draws, stream_length
from lockstep.data.random import Stream, data_digest, random_key
from lockstep.errors import ConfigError, DataError

_NUM_COMPARED = 8
"""First samples of each part that are compared with those of the others."""
_LEAST_ALIKE = 4
"""Samples in a row that two parts have in common where they overlap; fewer are equal by chance."""


@dataclass(frozen=True)
class Place:
    """How far the parts of a microbatch have been read.

    Attributes:
        microbatch: number of the microbatch.
        epoch: number of the present pass over its parts.
        start: position at which that pass begins; 0 where passes have a known length.
        position: number of samples of the pass before this place.
        part: which of the microbatch's parts is read, from 0; their number at the end of a pass.
        count: number of samples of that part before this place.
        state: JSON of `Pass.state` of that part, some samples earlier; None where they are counted.
        state_count: number of samples of the part before that state.
        digest: SHA-256 of the samples from there to this place, by which the state is checked.
    """

    microbatch: int
    epoch: int = 0
    start: int = 0
    position: int = 0
    part: int = 0
    count: int = 0
    state: str | None = None
    state_count: int = 0
    digest: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the places of a microbatch."""
        return self.epoch, self.position

    def leads_to(self, epoch: int | None, position: int) -> bool:
        """Whether a position comes after this place.

        Args:
            epoch: epoch of the position; None if there is one endless epoch.
            position: position in the epoch.
        """
        return epoch in (None, self.epoch) and self.start + self.position <= position


class StreamParts:
    """The parts of the training split.

    Attributes:
        count: number of parts.
        lengths: number of samples of each part; None if one of them does not know it.
        keep_states: whether places hold states of parts that have them; else samples are counted.
    """

    def __init__(self, dataset: Any, count: int, num_microbatches: int, seed: int) -> None:
        """Make each part once, to learn their lengths.

        Args:
            dataset: dataset that has a `shard`.
            count: number of parts, a multiple of `num_microbatches`.
            num_microbatches: number of microbatches that the parts feed.
            seed: seed of the run.

        Raises:
            ConfigError: the dataset knows that it has fewer parts.
            DataError: a part cannot be read.
        """
        self._dataset = dataset
        self.count = count
        self.keep_states = True
        self._num_microbatches = num_microbatches
        self._seed = seed
        self._draws = Draws()
        there = getattr(dataset, "num_shards", None)
        if isinstance(there, int) and there < count:
            raise ConfigError(
                f"data.stream_shards={count}: dataset('train') has {there} shards (num_shards); "
                f"set it to a multiple of num_microbatches={num_microbatches} that is at most "
                f"{there}, or split the data into more files"
            )
        lengths = [stream_length(self.part(index), "train") for index in range(count)]
        known = [length for length in lengths if length is not None]
        self.lengths = tuple(known) if len(known) == count else None

    def of(self, microbatch: int) -> range:
        """The numbers of a microbatch's parts."""
        return range(microbatch, self.count, self._num_microbatches)

    def length_of(self, microbatch: int) -> int | None:
        """The number of samples in a microbatch's parts, if it is known."""
        if self.lengths is None:
            return None
        return sum(self.lengths[index] for index in self.of(microbatch))

    def part(self, index: int) -> Iterable[Any]:
        """A new object of a part: one that was read may keep where that ended.

        Raises:
            DataError: there is no such part, or it cannot be read.
        """
        dataset, count, name = self._dataset, self.count, self.name(index)
        try:
            # datasets.IterableDataset.shard takes them the other way around.
            if "num_shards" in inspect.signature(dataset.shard).parameters:
                part = dataset.shard(num_shards=count, index=index)
            else:
                part = dataset.shard(index, count)
        except (LookupError, ValueError) as error:
            raise DataError(
                f"{name}: there is no such part ({type(error).__name__}: {error}); set "
                f"data.stream_shards={count} to the number of parts that there are"
            ) from error
        if part is dataset:
            raise DataError(
                f"{name}: returned the dataset itself, so that every microbatch would read all "
                "samples; return a dataset with the samples of this part"
            )
        if is_stream(part):
            return part  # type: ignore[no-any-return]
        if hasattr(part, "__len__") and hasattr(part, "__getitem__"):
            return _InOrder(part)
        raise DataError(
            f"{name}: returned a {type(part).__name__}; a part must have __iter__, or __len__ and "
            "__getitem__"
        )

    def problem(self, place: Place) -> str:
        """Why a place cannot be one of these parts; empty if it can."""
        numbers = [place.microbatch, place.epoch, place.start, place.position, place.count]
        num_parts = self.count // self._num_microbatches
        is_real = min(numbers) >= 0 and place.microbatch < self._num_microbatches
        is_real = is_real and 0 <= place.part < num_parts + (not place.count)
        is_real = is_real and place.count <= place.position and self._is_counted(place)
        if is_real and place.state is not None:
            try:
                states = parse_json(place.state)
                is_real = 0 < place.state_count <= place.count
                is_real = is_real and isinstance(states, list) and len(states) == 2
            except ValueError:
                is_real = False
        return "" if is_real else shown(place)

    def _is_counted(self, place: Place) -> bool:
        """Whether the samples of the parts before a place add up to its position."""
        if self.lengths is None:
            return place.part > 0 or place.count == place.position
        before = [self.lengths[index] for index in self.of(place.microbatch)][: place.part]
        return not place.start and sum(before) + place.count == place.position

    def name(self, index: int) -> str:
        """A part's name for messages."""
        return f"dataset('train').shard({index}, {self.count})"

    def open(
        self,
        index: int,
        epoch: int,
        count: int = 0,
        state: str | None = None,
        draws: Draws | None = None,
    ) -> Pass:
        """Begin a pass over a part.

        Args:
            index: number of the part.
            epoch: number of the pass.
            count: number of samples to begin after, if there is a state.
            state: state of the part there; None begins with its first sample.
            draws: what is known of its draws; None takes what is known of all parts.
        """
        own = self.key(index)

        def key(position: int) -> int:
            return random_key(own, Stream.SAMPLE, epoch, position)

        begin = count if state is not None else 0
        return Pass(lambda: self.part(index), epoch, key, draws or self._draws, begin, state)

    def note_draws(self) -> None:
        """Find out at the first samples whether parts draw random numbers."""
        note_draws(lambda draws: self.open(0, 0, draws=draws), self._draws, _NUM_COMPARED)

    def key(self, index: int) -> int:
        """The seed of a part, 63 bits; that of part m is also the seed of microbatch m."""
        return random_key(self._seed, Stream.PART, index)

    def first_digests(self, index: int) -> list[str]:
        """Digests of the first samples of a part, at least one.

        All parts are read with the same random state, so equal samples are equal here.

        Raises:
            DataError: it is empty.
        """
        one = Pass(lambda: self.part(index), 0, lambda position: position, self._draws)
        digests = [data_digest(sample) for sample in one.take(_NUM_COMPARED)]
        one.close()
        if not digests:
            raise DataError(
                f"{self.name(index)}: is empty; set data.stream_shards={self.count} to the number "
                "of parts that have samples"
            )
        return digests

    def check_apart(self, digests: Mapping[int, Sequence[str]]) -> None:
        """Refuse parts that begin with samples of others.

        Args:
            digests: `first_digests` of each part.

        Raises:
            DataError: two of them have the same samples.
        """
        starts: dict[tuple[str, ...], int] = {}
        for index, own in sorted(digests.items()):
            for start in (tuple(own[:_LEAST_ALIKE]), tuple(own)):
                if len(own) == 1 or len(set(start)) > 1:  # samples that are all alike tell nothing
                    other = starts.setdefault(start, index)
                    if other != index:
                        raise self._overlap(other, index)
        for index, own in sorted(digests.items()):
            for first in range(1, len(own) - _LEAST_ALIKE + 1):
                other = starts.get(tuple(own[first : first + _LEAST_ALIKE]), index)
                if other != index:
                    raise self._overlap(index, other)

    def _overlap(self, one: int, other: int) -> DataError:
        return DataError(
            f"{self.name(other)}: begins with samples that shard({one}, {self.count}) has too; "
            "parts must not overlap, or samples would come twice: let shard(index, count) return "
            "each sample in one part only, or set data.stream_shards=0, with which every rank "
            "reads the whole stream"
        )


class _InOrder:
    """A map-style dataset as a stream in the order of its indices."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> _Indexed:
        return _Indexed(self._dataset)

    def set_epoch(self, epoch: int) -> None:
        set_epoch(epoch, self._dataset)


class _Indexed:
    """An iterator over a map-style dataset that can skip."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._position = 0

    def __iter__(self) -> _Indexed:
        return self

    def __next__(self) -> Any:
        if self._position == len(self._dataset):
            raise StopIteration
        self._position += 1
        return self._dataset[self._position - 1]

    def skip(self, count: int) -> int:
        skipped = min(count, len(self._dataset) - self._position)
        self._position += skipped
        return skipped
