"""Streams in parts: samples by microbatch, from any place, in any process."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.parts import Place, StreamParts
from lockstep.data.parts_loader import PartsLoader
from lockstep.data.random import sample_digest
from lockstep.data.sampler import PartsLayout
from lockstep.errors import ConfigError, DataError, TaskError
from lockstep.parallel.layout import Range

CPU = torch.device("cpu")
LENGTHS = (7, 3, 9, 4, 1, 6)
BATCH, MICROBATCHES = 8, 3
ALL = Range(0, MICROBATCHES)
STEPS = 9


class Part:
    """(epoch, number of the part, i, something random); counts what is made in `made`."""

    def __init__(self, lengths: Sequence[int], index: int = -1, made: list[int] | None = None):
        self.lengths, self.index = lengths, index
        self.made = [0] if made is None else made
        self.epoch = -1
        self.position = 0

    def shard(self, index: int, count: int) -> Part:
        assert count == len(self.lengths)
        return type(self)(self.lengths, index, self.made)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def make(self, i: int) -> Any:
        self.made[0] += 1
        return self.epoch, self.index, i, random.random() + float(torch.rand(()))

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.lengths[self.index]):
            yield self.make(i)


class Known(Part):
    def __len__(self) -> int:
        return self.lengths[self.index]


class Indexed(Known):
    """A map-style part."""

    __iter__ = None  # type: ignore[assignment]

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


del Indexed.__iter__


class OfDataset(Part):
    """As Hugging Face has it: the state is the dataset's, and its iterator a generator."""

    start = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": [self.position, None]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"][0]

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.start, self.lengths[self.index]):
            self.position = i + 1
            yield self.make(i)


class OfIterator(Known):
    def __iter__(self) -> Iterator[Any]:
        return Places(self)


class Places:
    def __init__(self, part: Part) -> None:
        self.part, self.position = part, 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Places:
        return self

    def __next__(self) -> Any:
        if self.position == self.part.lengths[self.part.index]:
            raise StopIteration
        self.position += 1
        return self.part.make(self.position - 1)


def loader(
    dataset: Any,
    lengths: Sequence[int] = LENGTHS,
    num_workers: int = 0,
    block: int = 0,
    batch_size: int = BATCH,
    drop_last: bool = False,
) -> PartsLoader:
    parts = StreamParts(dataset, len(lengths), MICROBATCHES, seed=4)
    known = None if parts.lengths is None else [parts.length_of(m) or 0 for m in range(*ALL)]
    layout = PartsLayout(known, batch_size, MICROBATCHES, drop_last)
    made = PartsLoader(dataset, parts, list, layout, 4, CPU, num_workers, shuffle_buffer=block)
    made.check_resuming()
    return made


def everything(made: PartsLoader, own: Range = ALL, first: int = 0) -> list[Any]:
    found = list(made.stream(own, first, STEPS))
    made.close()
    return found


@pytest.mark.parametrize("block", [0, 4])
@pytest.mark.parametrize(
    ("kind", "base"),
    [(Part, Part), (OfDataset, Part), (Known, Known), (Indexed, Known), (OfIterator, Known)],
)
@given(
    stops=st.lists(st.integers(1, STEPS - 1), min_size=1, max_size=2),
    cuts=st.tuples(st.integers(0, MICROBATCHES), st.integers(0, MICROBATCHES)),
)
@settings(deadline=None, max_examples=8)
def test_reading_goes_on_on_any_rank_where_another_has_ended(
    kind: type[Part], base: type[Part], block: int, stops: list[int], cuts: tuple[int, int]
) -> None:
    expected = {(s, m): b for s, m, b in everything(loader(base(LENGTHS), block=block))}
    assert len(expected) == STEPS * MICROBATCHES
    places: list[dict[str, Any]] = []
    begin = 0
    for end, cut in zip([*sorted(stops), STEPS], [*cuts, 0], strict=False):
        told: list[dict[str, Any]] = []
        for own in (Range(0, cut), Range(cut, MICROBATCHES)):
            rank = loader(kind(LENGTHS), block=block)
            rank.set_places(places)
            for step, m, batch in rank.stream(own, begin, end):
                assert batch == expected[step, m]
            told += json.loads(json.dumps(rank.places(end)))
        assert all(not rank.parts.problem(Place(**place)) for place in told)
        places, begin = told, end


def test_every_sample_comes_once_an_epoch_which_ends_with_the_longest_microbatch() -> None:
    made = loader(Known(LENGTHS))
    # 11, 4 and 15 samples in microbatches of 3, 3 and 2.
    assert [made.parts.length_of(m) for m in range(*ALL)] == [11, 4, 15]
    layout = made._layout
    assert (layout.num_samples, layout.steps_per_epoch) == (30, 8)
    assert [layout.step_size(step) for step in range(9)] == [8, 6, 5, 4, 2, 2, 2, 1, 8]
    assert layout.is_epoch_end(8)
    assert not layout.is_epoch_end(7)
    batches = everything(made)
    empty = [(step, m) for step, m, batch in batches if batch is None]
    assert empty == [(2, 1), (3, 1), *((s, m) for s in range(4, 8) for m in (0, 1))]
    samples = [s for step, _, batch in batches if step < 8 for s in batch or ()]
    assert sorted((part, i) for _, part, i, _ in samples) == [
        (part, i) for part, length in enumerate(LENGTHS) for i in range(length)
    ]
    assert {epoch for epoch, *_ in samples} == {0}
    assert {epoch for step, _, batch in batches if step == 8 for epoch, *_ in batch} == {1}


def test_whole_batches_only() -> None:
    layout = loader(Known(LENGTHS), drop_last=True)._layout
    assert (layout.steps_per_epoch, layout.step_size(0), layout.step_size(1)) == (1, 8, 8)
    with pytest.raises(ConfigError, match=r"^data\.drop_last=True: .* microbatch 1 has 5 samples"):
        loader(Known(LENGTHS), batch_size=15, drop_last=True)


def test_without_a_length_each_microbatch_begins_again_by_itself() -> None:
    batches = everything(loader(Part(LENGTHS)))
    own = [(epoch, part, i) for _, m, batch in batches if m == 1 for epoch, part, i, _ in batch]
    one_pass = [(1, 0), (1, 1), (1, 2), (4, 0)]
    assert own == [(e, p, i) for e in range(7) for p, i in one_pass][: 3 * STEPS]


@pytest.mark.parametrize("kind", [OfDataset, Known])
def test_workers_read_what_the_rank_reads(kind: type[Part]) -> None:
    expected = everything(loader(kind(LENGTHS)))
    assert everything(loader(kind(LENGTHS), num_workers=2)) == expected
    # From places, on a rank with one microbatch, and so with one worker.
    rank = loader(kind(LENGTHS), num_workers=2)
    list(rank.stream(Range(2, 3), 0, 4))
    assert everything(rank, Range(2, 3), first=3) == [b for b in expected if b[1] == 2][3:]


def test_a_worker_that_reads_something_else_is_found() -> None:
    class Shared(Part):
        def make(self, i: int) -> Any:
            return torch.utils.data.get_worker_info(), *super().make(i)

    assert everything(loader(Shared(LENGTHS), num_workers=1))[0][2][0][0] is None

    class Own(Part):
        def make(self, i: int) -> Any:
            return os.getpid(), super().make(i)

    with pytest.raises(TaskError, match=r"another batch in a worker process .* share s"):
        everything(loader(Own(LENGTHS), num_workers=1))


def test_errors_of_workers_are_plain() -> None:
    class Longer(Known):
        def __iter__(self) -> Iterator[Any]:
            return iter([*super().__iter__(), 0] if self.index == 4 else [*super().__iter__()])

    with pytest.raises(DataError, match=r"^dataset\('train'\)\.shard\(4, 6\): goes on after the 1"):
        everything(loader(Longer(LENGTHS), num_workers=1))


@pytest.mark.parametrize("kind", [OfDataset, OfIterator])
def test_the_third_epoch_of_ten_million_samples_is_resumed_at_once(kind: type[Part]) -> None:
    lengths, count = (1_700_000,) * 6, 700_000
    dataset = kind(lengths)
    rank = loader(dataset, lengths, batch_size=600)
    # An epoch has 17 000 steps; this is step 12 000 of the third.
    step, is_endless = 46_000, kind is OfDataset
    state = [{"at": [count]}, None] if is_endless else [None, {"position": count}]
    start = 6_800_000 if is_endless else 0
    nothing = hashlib.sha256().hexdigest()
    place = Place(1, 2, start, 2_400_000, 1, count, json.dumps(state), count, nothing)
    assert not rank.parts.problem(place)
    dataset.made[0], began = 0, time.perf_counter()
    rank.set_places([asdict(place)])
    _, _, batch = next(rank.stream(Range(1, 2), step, step + 1))
    assert time.perf_counter() - began < 2
    assert dataset.made == [200]
    assert [sample[:3] for sample in batch[:2]] == [(2, 4, count), (2, 4, count + 1)]


def test_parts_of_known_length_are_passed_over_unread() -> None:
    dataset = Known((50,) * 6)
    rank = loader(dataset, dataset.lengths)
    dataset.made[0] = 0
    rank.microbatch(20, 0)  # 60 samples of two parts come before it
    assert dataset.made == [13]


class Forgetful(OfDataset):
    """Shuffles through a buffer that is not in its state."""

    def __iter__(self) -> Iterator[Any]:
        one, rest = None, super().__iter__()
        for sample in rest:
            one = one or sample
            if sample is not one:
                yield sample
        yield one


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (None, "leads to another sample than reading does"),
        (lambda self: {"at": [{1, 2}, 0]}, "must return what JSON has"),
        (lambda self: {"somewhere": 0}, r"load_state_dict: cannot go on from .*KeyError: 'at'"),
    ],
)
def test_a_state_of_no_use_is_named_and_samples_are_counted(state: Any, why: str) -> None:
    kind = Forgetful if state is None else type("Own", (OfDataset,), {"state_dict": state})
    rank = loader(kind(LENGTHS))
    [remark] = rank.remarks
    assert remark.startswith("dataset('train').shard(0, 6): its state_dict after ")
    assert re.search(why, remark)
    expected = everything(rank)
    assert {place["state"] for place in rank.places(STEPS)} == {None}
    again = loader(kind(LENGTHS))
    again.set_places(rank.places(STEPS - 1))
    assert everything(again, first=STEPS - 1) == expected[-MICROBATCHES:]


class Late(OfDataset):
    """Forgets a sample, but not at the beginning."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"][0] - (state["at"][0] > 50)


def test_a_state_that_is_false_later_on_is_found_when_it_is_used() -> None:
    lengths = (150,) * 6
    rank = loader(Late(lengths), lengths, batch_size=90)
    assert not rank.remarks
    expected = list(rank.stream(ALL, 0, 5))
    for step in (1, 2, 3, 4):
        begun = loader(Late(lengths), lengths, batch_size=90)
        list(begun.stream(ALL, 0, step))
        again = loader(Late(lengths), lengths, batch_size=90)
        again.set_places(begun.places(step))
        assert {place["state"] is None for place in begun.places(step)} == {step == 1}
        assert list(again.stream(ALL, step, 5)) == expected[MICROBATCHES * step :]


def digests(dataset: Any, count: int) -> None:
    parts = StreamParts(dataset, count, count, seed=0)
    parts.check_apart({i: parts.first_digests(i) for i in range(count)})


class Ranges:
    """Parts of the numbers below 100, which `cut` cuts out."""

    def __init__(self, cut: Any) -> None:
        self.cut = cut

    def shard(self, index: int, count: int) -> Any:
        return self.cut(self, index, count)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda s, i, n: s, r"shard\(0, 4\): returned the dataset itself"),
        (lambda s, i, n: range(100), r"shard\(1, 4\): begins with samples that shard\(0, 4\) has"),
        (lambda s, i, n: range(i, 100, n - 1), r"shard\(3, 4\): begins with samples that shard\(0"),
        (lambda s, i, n: [7], r"shard\(1, 4\): begins with samples"),
        (
            lambda s, i, n: [range(9), range(9, 20)][i],
            r"shard\(2, 4\): there is no such part \(Ind",
        ),
        (lambda s, i, n: range(4 * i, 12), r"shard\(3, 4\): is empty; set data\.stream_shards=4"),
        (lambda s, i, n: None, r"shard\(0, 4\): returned a NoneType; a part must have __iter__"),
        (
            lambda s, i, n: iter(range(9)),
            "is a range_iterator, an iterator, which can be read only",
        ),
    ],
)
def test_parts_that_are_none_are_named(cut: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        digests(Ranges(cut), 4)


def test_equal_samples_in_several_parts_are_no_overlap() -> None:
    digests(Ranges(lambda s, i, n: [0] * 20), 4)
    digests(Ranges(lambda s, i, n: [0, 0, 0, *range(100 * i, 100 * i + 20)]), 4)
    digests(Ranges(lambda s, i, n: range(i, 100, n)), 4)


def test_too_few_shards_of_a_library_are_named() -> None:
    class Library(Part):
        num_shards = 4

    with pytest.raises(ConfigError, match=r"^data\.stream_shards=6: dataset\('train'\) has 4 sha"):
        StreamParts(Library(LENGTHS), 6, 3, 0)


def test_places_that_cannot_be_are_named() -> None:
    known, unknown = loader(Known(LENGTHS)).parts, loader(Part(LENGTHS)).parts
    good = Place(1, 2, 0, 3, 1, 0)
    assert not known.problem(good)
    wrong = (
        Place(3), Place(-1), Place(0, -1), Place(0, 0, 0, 4, 0, 3), Place(0, 0, 0, 9, 1, 3),
        Place(0, 0, 5, 7, 1), Place(0, 0, 0, 11, 2, 1), Place(0, 0, 0, 2, 0, 2, "[1]"),
        Place(0, 0, 0, 2, 0, 2, "no"), Place(0, 0, 0, 0, 0, 0, "[1, null]"),
    )  # fmt: skip
    assert all(map(known.problem, wrong))
    assert not unknown.problem(Place(1, 2, 30, 3, 1, 0))
    assert unknown.problem(Place(1, 2, 30, 3, 0, 2))


def test_digests_of_samples_tell_values_apart_and_objects_not() -> None:
    samples: list[Any] = [
        {"x": [0.0, 1.0], "y": "a"}, {"x": [-0.0, 1.0], "y": "a"}, {"x": (0.0, 1.0), "y": "a"},
        {"x": [0, 1], "y": "a"}, {"x": [0.0, 1.0], "y": b"a"}, {"x": torch.tensor([0.0, 1.0])},
        {"x": np.array([0.0, 1.0])}, {"x": np.array([0.0, 1.0], np.float32)},
    ]  # fmt: skip
    assert len({sample_digest(sample) for sample in samples}) == len(samples)
    text = "".join(["a", "b"])  # one object twice, and two of them
    assert sample_digest([text, text]) == sample_digest([text, "".join(["a", "b"])])
    assert sample_digest([object()]) == sample_digest([object()])
