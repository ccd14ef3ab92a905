"""Streams: samples by their numbers, however they are read."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import slow
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep.data.passes import Draws, Pass, is_stream, stream_length
from lockstep.data.sampler import BatchLayout
from lockstep.data.stream_reader import StreamLoader, StreamReader
from lockstep.errors import DataError
from lockstep.parallel.layout import Range

CPU = torch.device("cpu")


class Numbers:
    """(epoch, i, something random) for i < size; remembers how many it has made."""

    def __init__(self, size: int | Callable[[int], int] = 23) -> None:
        self.size = size
        self.epoch = -1
        self.made = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def num_samples(self) -> int:
        return self.size if isinstance(self.size, int) else self.size(self.epoch)

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.num_samples()):
            self.made += 1
            yield self.epoch, i, random.random() + np.random.rand() + float(torch.rand(()))


class Seeking(Numbers):
    def __iter__(self) -> Iterator[Any]:
        return SeekingIterator(self)


class SeekingIterator:
    def __init__(self, stream: Numbers) -> None:
        self.stream, self.next, self.last = stream, 0, stream.num_samples()
        self.epoch = stream.epoch

    def __iter__(self) -> SeekingIterator:
        return self

    def __next__(self) -> Any:
        if self.next >= self.last:
            raise StopIteration
        self.next += 1
        self.stream.made += 1
        drawn = random.random() + np.random.rand() + float(torch.rand(()))
        return self.epoch, self.next - 1, drawn

    def skip(self, count: int) -> int:
        skipped = min(count, self.last - self.next)
        self.next += skipped
        return skipped


def whole_batches(stream: Any, length: int | None, block: int, num_steps: int) -> list[list[Any]]:
    layout = BatchLayout(length, 8, 3)
    reader = StreamReader(stream, length, seed=4, shuffle_buffer=block)
    return [
        reader.read(layout.epoch(step), Range(start, start + layout.step_size(step)), start)
        for step in range(num_steps)
        for start in [layout.start(step)]
    ]


@pytest.mark.parametrize("kind", [Numbers, Seeking])
@pytest.mark.parametrize("block", [0, 5, slow(8), 100])
@pytest.mark.parametrize("length", [23, None])
@given(wanted=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=8))
@settings(deadline=None, max_examples=12)
def test_samples_do_not_depend_on_what_was_read_before(
    kind: type[Numbers], block: int, length: int | None, wanted: list[tuple[int, int]]
) -> None:
    expected = whole_batches(Numbers(), length, block, 9)
    layout = BatchLayout(length, 8, 3)
    reader = StreamReader(kind(), length, seed=4, shuffle_buffer=block)
    for step, microbatch in wanted:
        positions, start = layout.positions(step, microbatch), layout.start(step)
        own = expected[step][positions.first - start : positions.last - start]
        assert reader.read(layout.epoch(step), positions, start) == own


@pytest.mark.parametrize("length", [23, None])
def test_every_sample_comes_once_a_pass(length: int | None) -> None:
    for block in (0, 5, 100):
        samples = [s for batch in whole_batches(Numbers(), length, block, 9) for s in batch]
        for epoch in range(3):
            numbers = [i for e, i, _ in samples if e == epoch]
            assert sorted(numbers) == list(range(23))
            assert (numbers == sorted(numbers)) == (block == 0)


def test_a_batch_of_a_stream_of_unknown_length_goes_on_with_the_next_pass() -> None:
    batches = whole_batches(Numbers(10), None, 0, 3)
    assert [(e, i) for e, i, _ in batches[1]] == [(0, 8), (0, 9), *((1, i) for i in range(6))]


def test_passes_may_be_of_any_length_where_none_is_promised() -> None:
    stream = Numbers(lambda epoch: 3 + epoch)
    samples = [s for batch in whole_batches(stream, None, 0, 4) for s in batch]
    expected = [(epoch, i) for epoch in range(9) for i in range(3 + epoch)]
    assert [(e, i) for e, i, _ in samples] == expected[:32]


def test_reading_goes_on_where_it_ended() -> None:
    stream = Numbers()
    layout = BatchLayout(None, 8, 2)
    reader = StreamReader(stream, None, seed=0, draws=Draws(seen=True))
    for step in range(4):
        for m in range(2):
            reader.read(0, layout.positions(step, m), layout.start(step))
    assert stream.made == 32
    # Another rank's microbatch of the same batch, after a loss.
    reader.read(0, layout.positions(3, 0), layout.start(3))
    assert stream.made == 32


def test_a_stream_that_skips_makes_no_others_samples() -> None:
    stream = Seeking(1000)
    layout = BatchLayout(1000, 100, 4)
    reader = StreamReader(stream, 1000, seed=0, draws=Draws(seen=True))
    for step in (7, 8):
        reader.read(0, layout.positions(step, 2), layout.start(step))
    assert stream.made == 50


def test_known_starts_of_passes_spare_reading_them() -> None:
    first = Numbers()
    reader = StreamReader(first, None, seed=0)
    expected = reader.read(0, Range(96, 104), 96)
    assert reader.starts == [0, 23, 46, 69, 92]
    other = Numbers()
    again = StreamReader(other, None, seed=0, draws=Draws(seen=True))
    again.starts = list(reader.starts)
    assert again.read(0, Range(96, 104), 96) == expected
    assert other.made == 12


@pytest.mark.parametrize(
    ("stream", "length", "message"),
    [
        (Numbers(0), None, r"^dataset\('train'\): is empty; training needs"),
        (Numbers(lambda epoch: 9 * (epoch == 0)), None, "is empty in epoch 1"),
        (Numbers(22), 23, "ended after 22 samples in epoch 0, its __len__ says 23"),
        (Numbers(24), 23, "goes on after the 23 samples that its __len__ says"),
        (Seeking(22), 23, "ended after 22 samples in epoch 0"),
        (Numbers(0), 23, "ended after 0 samples in epoch 0"),
    ],
)
def test_streams_of_impossible_lengths_are_named(
    stream: Numbers, length: int | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        whole_batches(stream, length, 0, 4)


def test_a_pass_that_is_shorter_when_it_is_read_again_is_found() -> None:
    stream = Numbers(10)
    reader = StreamReader(stream, None, seed=0)
    reader.read(0, Range(16, 24), 16)
    stream.size = 9
    reader.read(0, Range(0, 8), 0)
    with pytest.raises(DataError, match="after 9 samples in epoch 0, and after 10 when it was rea"):
        reader.read(0, Range(8, 16), 8)


def test_a_stream_that_has_raised_is_not_at_its_end() -> None:
    class Failing(Numbers):
        fails = True

        def __iter__(self) -> Iterator[Any]:
            for i, sample in enumerate(super().__iter__()):
                if i == 3 and self.fails:
                    self.fails = False
                    raise OSError("try again")
                yield sample

    reader = StreamReader(Failing(), None, seed=0, draws=Draws(seen=True))
    with pytest.raises(OSError, match="try again"):
        reader.read(0, Range(0, 8), 0)
    expected = StreamReader(Numbers(), None, seed=0).read(0, Range(0, 8), 0)
    assert reader.read(0, Range(0, 8), 0) == expected


class Lies(Seeking):
    def __init__(self, skip: Callable[[SeekingIterator, int], Any]) -> None:
        super().__init__()
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        iterator = SeekingIterator(self)
        iterator.skip = lambda count: self.skip(iterator, count)  # type: ignore[method-assign]
        return iterator


def too_far(iterator: SeekingIterator, count: int) -> int:
    iterator.next += count + 1
    return count


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (too_far, r"skip\(8\) has passed over 8 samples, .* another one as after reading 8"),
        (lambda iterator, count: 0, r"skip\(8\) has passed over 0 samples"),
        (lambda iterator, count: None, r"SeekingIterator\.skip\(8\): must return how many.* None"),
        (lambda iterator, count: count + 1, r"skip\(8\): must return .* at most 8; returned 9"),
    ],
)
def test_a_skip_that_leads_elsewhere_is_refused(skip: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        StreamReader(Lies(skip), None, seed=0).check_skipping(8)
    StreamReader(Seeking(5), None, seed=0).check_skipping(8)


class Drawing:
    """Draws for some samples."""

    def __init__(self, draw: Callable[[], float], of: Collection[int]) -> None:
        self.draw, self.of = draw, of
        self.made = 0

    def __iter__(self) -> Iterator[Any]:
        for i in range(60):
            self.made += 1
            yield i, self.draw() if i in self.of else None


def isolated() -> float:
    with torch.random.fork_rng():
        return float(torch.rand(()))


DRAWS = [random.random, np.random.standard_normal, lambda: float(torch.rand(())), isolated]


@pytest.mark.parametrize("draw", DRAWS[:3])
def test_what_a_sample_draws_depends_on_its_number_only(draw: Callable[[], float]) -> None:
    def read(stream: Drawing, draws: Draws, *sizes: int) -> list[Any]:
        one = Pass(lambda: stream, 0, lambda position: 1000 + position, draws)
        one.skip(5)
        return [sample for size in sizes for sample in one.take(size)]

    expected = read(Drawing(draw, (0, 33)), Draws(seen=True), 60)
    for sizes in ((60,), (20, 20, 20), (1, 27, 27)):
        draws, stream = Draws(), Drawing(draw, (0, 33))
        assert read(stream, draws, *sizes) == expected
        assert draws.seen
        assert stream.made <= 120
    draws = Draws()
    read(Drawing(draw, (0,)), draws, 60)
    assert not draws.seen  # what a pass begins with is drawn with numbers of its own


def seed_of_torch() -> int:
    return torch.initial_seed()


@pytest.mark.parametrize("draw", [isolated, seed_of_torch])
def test_what_a_sample_sees_of_generators_does_not_depend_on_what_is_read_together(
    draw: Callable[[], float],
) -> None:
    def read(first: int, *sizes: int) -> list[Any]:
        stream = Drawing(draw, (50, 53))
        one = Pass(lambda: stream, 0, lambda position: 1000 + position, Draws())
        one.skip(first)
        return [sample for size in sizes for sample in one.take(size)]

    expected = read(0, 60)
    for first, sizes in ((0, (20, 31, 9)), (7, (1, 60)), (50, (3, 1, 6)), (53, (7,))):
        assert read(first, *sizes) == expected[first:]


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_are_noticed_at_the_first_samples(draw: Callable[[], float]) -> None:
    for of, seen in ((range(60), True), ((0, 50), False)):
        draws = Draws()
        StreamReader(Drawing(draw, of), None, seed=0, draws=draws).note_draws()
        assert draws.seen is seen


class Held:
    """What no digest sees into."""

    __slots__ = ("number",)

    def __init__(self, number: float) -> None:
        self.number = number


def test_what_a_digest_does_not_see_may_have_been_drawn() -> None:
    draws = Draws()
    samples = [Held(1.0) for _ in range(60)]
    StreamReader(OfSamples(samples), None, seed=0, draws=draws).note_draws()
    assert draws.seen


class OfSamples(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


class Torchs(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Measured(Torchs):
    def __len__(self) -> int:
        return 3


def test_what_a_stream_is() -> None:
    assert [is_stream(one) for one in (Torchs(), Numbers(), {1, 2})] == [True] * 3
    for other in ([1, 2], TensorDataset(torch.zeros(3)), 7, "text"):
        assert not is_stream(other)
    assert stream_length(Torchs(), "train") is None
    assert stream_length(Measured(), "train") == 3


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (iter([1, 2]), r"^dataset\('val'\): is a list_iterator, an iterator, which can be read on"),
        ((i for i in range(3)), "is a generator, an iterator"),
        (itertools.count(), "is a count, an iterator"),
        (map(abs, [1]), "is a map, an iterator"),
        (DataLoader(range(3)), "is a DataLoader, which makes batches itself"),  # type: ignore[arg-type]
    ],
)
def test_what_can_be_read_only_once_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        stream_length(dataset, "val")


def test_collate_functions_are_told_the_pass_and_draw_by_microbatch() -> None:
    class Collate:
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __call__(self, samples: list[Any]) -> Any:
            return self.epoch, random.random(), [i for _, i, _ in samples]

    loader = StreamLoader(Numbers(10), Collate(), BatchLayout(None, 8, 2), 0, CPU)
    batches = [batch for _, _, batch in loader.stream(Range(0, 2), 0, 3)]
    assert [(epoch, numbers) for epoch, _, numbers in batches] == [
        (0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (0, [8, 9, 0, 1]), (1, [2, 3, 4, 5]),
        (1, [6, 7, 8, 9]), (2, [0, 1, 2, 3]),
    ]  # fmt: skip
    assert len({drawn for _, drawn, _ in batches}) == 6
    assert loader.microbatch(2, 1) == batches[5]
    halves = [numbers for _, _, numbers in loader.halved(1, 0)]
    assert halves == [[8, 9, 0, 1], [8, 9], [0, 1]]


def test_a_smaller_last_batch_may_leave_microbatches_empty() -> None:
    loader = StreamLoader(Numbers(10), len, BatchLayout(10, 8, 4), 0, CPU)
    sizes = [batch for _, _, batch in loader.stream(Range(0, 4), 0, 3)]
    assert sizes == [2, 2, 2, 2, 1, 1, None, None, 2, 2, 2, 2]
