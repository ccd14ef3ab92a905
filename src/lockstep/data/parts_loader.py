"""Loading the microbatches of a stream that is read in parts."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lockstep.config.parsing import as_type
from lockstep.data.loader import Batch, BatchSource, Collate, set_epoch, to_device
from lockstep.data.parts import Place, StreamParts
from lockstep.data.parts_reader import PartsReader
from lockstep.data.random import (
    IdleGenerators,
    Stream,
    data_digest,
    kept_generators,
    random_key,
    seed_all,
)
from lockstep.data.sampler import PartsLayout
from lockstep.data.stream_reader import StreamReader
from lockstep.data.workers import fetched, hide_worker, release
from lockstep.errors import DataError, LockstepError, TaskError
from lockstep.parallel.layout import Assigned, Range

_NUM_PLACES = 3
"""Places of a microbatch that are kept: ranks differ by one step, which may be done again."""


class Fetched(NamedTuple):
    """A microbatch, and the place after its samples."""

    batch: Batch
    place: Place


class PartsFetcher(Dataset[Fetched | LockstepError | None]):
    """Reads and collates microbatches, each of which goes on where its last one ended.

    Attributes:
        watched: generators that the dataset must not draw from; drawing raises a `TaskError`.
    """

    def __init__(
        self,
        parts: StreamParts,
        collate: Collate,
        layout: PartsLayout,
        seed: int,
        shuffle_buffer: int,
        places: Mapping[int, Sequence[Place]],
        watched: IdleGenerators,
    ) -> None:
        self._parts = parts
        self._collate = collate
        self._layout = layout
        self._seed = seed
        self._shuffle_buffer = shuffle_buffer
        self._places = dict(places)
        self.watched = watched
        self._readers: dict[int, PartsReader] = {}

    def fetch(self, step: int, microbatch: int) -> Fetched | None:
        """One microbatch; None if it has no samples."""
        if not self._layout.microbatch_size(step, microbatch):
            return None
        epoch, samples = self.samples(step, microbatch)
        batch = self.batch(epoch, step, microbatch, samples)
        return Fetched(batch, self._readers[microbatch].place())

    def samples(self, step: int, microbatch: int) -> tuple[int, list[Any]]:
        """The number of the pass that a microbatch begins in, and its samples, at least one."""
        reader = self._readers.get(microbatch)
        if reader is None:
            places = self._places.get(microbatch, ())
            reader = PartsReader(self._parts, microbatch, places, self._shuffle_buffer)
            self._readers[microbatch] = reader
        return reader.read(self._layout.epoch(step), self._layout.positions(step, microbatch))

    def batch(self, epoch: int, step: int, microbatch: int, samples: list[Any]) -> Batch:
        """The batch of some samples."""
        set_epoch(epoch, self._collate)
        seed_all(random_key(self._seed, Stream.DATA, step, microbatch))
        batch = self._collate(samples)
        self.watched.check()
        return batch

    def close(self) -> None:
        """End all reading."""
        for reader in self._readers.values():
            reader.close()

    def __getitem__(self, request: tuple[int, int | None]) -> Fetched | LockstepError | None:
        """A microbatch in a worker process, or an error that is to be raised."""
        hide_worker()
        step, microbatch = request
        try:
            return None if microbatch is None else self.fetch(step, microbatch)
        except LockstepError as error:
            return error  # raised here, torch would wrap it in an error with a traceback as message


class PartsLoader(BatchSource):
    """Microbatches of a stream that is read in parts, here or ahead of time in other processes.

    Attributes:
        remarks: what a user should know of the stream.
    """

    has_places = True

    def __init__(
        self,
        dataset: Any,
        parts: StreamParts,
        collate: Collate | None,
        layout: PartsLayout,
        seed: int,
        device: torch.device,
        num_workers: int = 0,
        prefetch: int = 2,
        shuffle_buffer: int = 0,
    ) -> None:
        """Read a stream in parts.

        Args:
            dataset: the stream.
            parts: its parts.
            collate: function from samples to a batch; None takes torch's.
            layout: positions of each step and microbatch in the microbatch's parts.
            seed: seed of the run.
            device: device that batches are moved to.
            num_workers: number of processes that read; 0 reads in this one.
            prefetch: number of microbatches that each of them reads ahead.
            shuffle_buffer: number of samples of a microbatch that are shuffled together; 0 leaves
                their order.
        """
        super().__init__(dataset, seed, device)
        self.parts = parts
        self.num_workers = num_workers
        self._collate: Collate = collate or default_collate
        self._layout = layout
        self._prefetch = prefetch
        self._shuffle_buffer = shuffle_buffer
        self._places: dict[int, list[Place]] = {}
        self._own: Assigned = Range(0, 0)

    def check_resuming(self) -> None:
        """Check on one part that going on from its middle leads to where reading does.

        A `state_dict` that does not is a remark, and no longer used.

        Raises:
            DataError: its own `skip` does not.
        """
        size = self._layout.microbatch_size(0, 0)
        StreamReader(self.parts.part(0), None, self._seed).check_skipping(size)
        self.parts.note_draws()
        for count in sorted({1, size}):
            one = self.parts.open(0, 0)
            num_read = len(one.take(count))
            try:
                state = one.state()
                if state is None:
                    return
                other = self.parts.open(0, 0, num_read, state)
                is_same = data_digest(other.take(1)) == data_digest(one.take(1))
                problem = "" if is_same else "leads to another sample than reading does"
                other.close()
            except DataError as error:
                problem = str(error)
            finally:
                one.close()
            if problem:
                self.parts.keep_states = False
                self.remarks.append(
                    f"{self.parts.name(0)}: its state_dict after {num_read} samples is of no use: "
                    f"{problem}. A resumed run reads what it has had again instead. Shuffle by "
                    "data.shuffle_buffer: buffers of other libraries are often not in their states"
                )
                return

    def microbatch(self, step: int, microbatch: int) -> Batch | None:
        """One microbatch, read by itself; None if it has no samples."""
        with closing(self._fetcher()) as fetcher:
            found = fetcher.fetch(step, microbatch)
        return None if found is None else to_device(found.batch, self._device)

    def halved(self, step: int, microbatch: int) -> Iterator[Batch]:
        """A microbatch and its two halves, read now; nothing if it cannot be halved."""
        if self._layout.microbatch_size(step, microbatch) < 2:
            return
        with closing(self._fetcher()) as fetcher:
            epoch, samples = fetcher.samples(step, microbatch)
            middle = (len(samples) + 1) // 2
            for some in (samples, samples[:middle], samples[middle:]):
                batch = fetcher.batch(epoch, step, microbatch, some)
                yield to_device(batch, self._device)

    def stream(
        self, microbatches: Assigned, first_step: int, last_step: int
    ) -> Generator[tuple[int, int, Batch], None, None]:
        """See `BatchSource.stream`.

        Raises:
            LockstepError: the stream raised it, is empty, or has another length than it says.
            RuntimeError: a worker process has died.
        """
        self._own = microbatches
        return self._stream(range(*microbatches), range(first_step, last_step))

    def places(self, step: int, all_known: bool = False) -> list[dict[str, Any]]:
        """The places from which reading goes on at a step, as JSON has them.

        Args:
            step: number of the step.
            all_known: whether to return those of microbatches that others read, too.
        """
        own, found = range(*self._own), []
        is_endless = self.parts.lengths is None
        epoch = None if is_endless else self._layout.epoch(step)
        for microbatch, places in sorted(self._places.items()):
            position = self._layout.positions(step, microbatch).first
            near = [place for place in places if place.leads_to(epoch, position)]
            if near and (all_known or microbatch in own):
                found.append(asdict(near[-1]))
        return found

    def add_places(self, places: Iterable[dict[str, Any]]) -> None:
        """Take over places that other ranks have read to."""
        for place in places:
            self._add(as_type(Place, place))

    def problem(self, place: object) -> str:
        """See `BatchSource.problem`."""
        assert isinstance(place, Place)
        return self.parts.problem(place)

    def set_places(self, places: Iterable[dict[str, Any]]) -> None:
        """Go on from the places of a checkpoint."""
        self._places = {}
        self.add_places(places)

    def close(self) -> None:
        """No more batches will be fetched by worker processes."""
        release(self)

    def _add(self, place: Place) -> None:
        known = {other.order: other for other in self._places.get(place.microbatch, ())}
        known[place.order] = place
        self._places[place.microbatch] = [known[key] for key in sorted(known)][-_NUM_PLACES:]

    def _fetcher(self) -> PartsFetcher:
        return PartsFetcher(
            self.parts,
            self._collate,
            self._layout,
            self._seed,
            self._shuffle_buffer,
            self._places,
            self.watched,
        )

    def _stream(self, own: range, steps: range) -> Generator[tuple[int, int, Batch], None, None]:
        is_ahead = bool(self.num_workers and own)
        with closing((self._fetched_ahead if is_ahead else self._fetched)(own, steps)) as batches:
            for step in steps:
                for microbatch in own:
                    found = next(batches)
                    if found is not None:
                        self._add(found.place)
                    yield step, microbatch, None if found is None else found.batch

    def _fetched(self, own: range, steps: range) -> Generator[Fetched | None, None, None]:
        with closing(self._fetcher()) as fetcher:
            for step in steps:
                for microbatch in own:
                    yield fetcher.fetch(step, microbatch)

    def _fetched_ahead(self, own: range, steps: range) -> Generator[Fetched | None, None, None]:
        num_workers = min(self.num_workers, len(own))
        # Workers get requests in turn. So all requests of a microbatch go to the same one.
        turn = [*own, *[None] * (-len(own) % num_workers)]
        batches = fetched(
            DataLoader(
                self._fetcher(),
                sampler=((step, microbatch) for step in steps for microbatch in turn),
                batch_size=None,
                collate_fn=_unchanged,
                num_workers=num_workers,
                prefetch_factor=self._prefetch,
                generator=torch.Generator(),  # else it draws from, and so changes, the global one
            ),
            self,
        )
        is_checked = False
        with closing(batches):
            for step in steps:
                for microbatch in turn:
                    found = next(batches)
                    if isinstance(found, LockstepError):
                        raise found
                    if found is not None and not is_checked:
                        self._check_fetched(step, microbatch, found.batch)
                        is_checked = True
                    if microbatch is not None:
                        yield found

    def _check_fetched(self, step: int, microbatch: int, batch: Batch) -> None:
        """Refuse a stream that gives another batch in a worker process than in this one.

        Raises:
            TaskError: it does.
        """
        with kept_generators(), closing(self._fetcher()) as fetcher:
            own = fetcher.fetch(step, microbatch)
        if own is None or data_digest(own.batch) != data_digest(batch):
            raise TaskError(
                f"dataset('train'): gave another batch in a worker process than in the rank itself "
                f"(step {step}, microbatch {microbatch}), with the same random state; its parts "
                "share something, such as an open file, or look at the process they are in"
            )


def _unchanged(found: Any) -> Any:
    """A batch as it is: torch would make tensors of arrays."""
    return found
