"""What a task's data must be to be trained on with a config."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep as ls
from lockstep.comm.transport import LocalTransport
from lockstep.engine.assembly import Parts, assemble
from lockstep.engine.runtime import Runtime
from lockstep.errors import ConfigError, DataError, LockstepError, TaskError

CPU = torch.device("cpu")


class Base(ls.Task):
    def __init__(self, **datasets: Any) -> None:
        super().__init__()
        self._datasets = {"train": TensorDataset(torch.randn(20, 3), torch.randn(20, 1))} | datasets

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def dataset(self, split: str) -> Any:
        return self._datasets.get(split)

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        return ls.Loss((model(x) - y).square().sum(), len(y))


class Points(IterableDataset[Any]):
    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(self.size):
            yield torch.full((3,), float(i)), torch.tensor([1.0])


class Measured(Points):
    def __len__(self) -> int:
        return self.size


class Sharded(Points):
    """Has parts of four samples; `cut` says which."""

    def __init__(self, cut: Any = lambda index, count: range(4 * index, 4 * index + 4)) -> None:
        super().__init__()
        self.cut, self.own = cut, range(20)

    def shard(self, index: int, count: int) -> Any:
        part = type(self)(self.cut)
        part.own = self.cut(index, count)
        return part if part.own is not None else self

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in self.own:
            yield torch.full((3,), float(i)), torch.tensor([1.0])


class ShardedLength(Sharded):
    def __len__(self) -> int:
        return len(self.own)


PARTS = {"data": {"stream_shards": 4}}


def assembled(task: ls.Task, **keys: Any) -> Parts:
    config = ls.TrainConfig(**{"batch_size": 8, "num_microbatches": 2, "steps": 3} | keys)
    runtime = Runtime(LocalTransport(), CPU, 0, "python", 0, lambda _: None, lambda: None)
    return assemble(task, config, runtime)


def given(**methods: Any) -> type[Base]:
    return type("Own", (Base,), methods)


def weights(value: Any) -> type[Base]:
    return given(sample_weights=lambda self: value)


def order(make: Any) -> type[Base]:
    return given(epoch_indices=lambda self, epoch, generator: make(epoch))


@pytest.mark.parametrize(
    ("task", "keys", "message"),
    [
        (weights([1.0] * 19)(), {}, r"Task\.sample_weights: .* 20 samples .* shape \(19,\)"),
        (weights([1.0] * 20)(), {"data": {"shuffle": False}}, r"^data\.shuffle=False: Task\.samp"),
        (order(lambda e: [20])(), {}, r"Task\.epoch_indices: epoch 0: index 20"),
        (
            given(
                sample_weights=lambda self: [1.0] * 20,
                epoch_indices=lambda self, epoch, generator: [1],
            )(),
            {},
            "^Own: has sample_weights and epoch_indices",
        ),
        (Base(), {"data": {"drop_last": True}, "batch_size": 21}, r"^data\.drop_last=True: leave"),
        (
            order(lambda e: [1, 2])(),
            {"data": {"drop_last": True}},
            r"drop_last=True: .* an epoch has 2 samples and batch_size=8",
        ),
        (Base(), {"data": {"shuffle_buffer": 5}}, r"^data\.shuffle_buffer=5: is for streams"),
        (Base(train=Points()), {"steps": None}, r"^steps: must be set, .* a Points without __len_"),
        (Base(train=Points()), {"data": {"num_workers": 2}}, r"^data\.num_workers=2: .* a stream"),
        (Base(train=Points(0)), {}, r"^dataset\('train'\): is empty; training needs"),
        (Base(train=Measured(0)), {"steps": None}, r"^dataset\('train'\): is empty; training need"),
        (Base(val=Points(0)), {}, r"^dataset\('val'\): is empty; return None"),
        (Base(train=DataLoader(TensorDataset(torch.zeros(3)))), {}, "is a DataLoader"),
        (Base(train=iter([])), {}, "is a list_iterator, an iterator"),
        (Base(val=iter([])), {}, r"dataset\('val'\): is a list_iterator"),
        (
            Base(train=Measured(3)),
            {"data": {"drop_last": True}, "steps": None},
            r"drop_last=True: .* 3 samples",
        ),
        (weights([1.0])(train=Points()), {}, r"^Task\.sample_weights: is for map-style datasets"),
        (order(lambda e: [1])(train=Points()), {}, r"^Task\.epoch_indices: is for map-style"),
        (Base(), PARTS, r"^data\.stream_shards=4: .* has no shard.* reads its own samples only"),
        (
            Base(train=Points()),
            PARTS,
            r"^data\.stream_shards=4: .* has no shard.* the whole stream",
        ),
        (
            Base(train=Sharded()),
            PARTS | {"steps": None},
            r"^steps: must be set, .* parts that have no",
        ),
        (
            weights([1.0])(train=Sharded()),
            PARTS,
            r"^Task\.sample_weights: .* is read in parts, which",
        ),
        (Base(train=Sharded(lambda i, n: None)), PARTS, "returned the dataset itself"),
        (Base(train=Sharded(lambda i, n: range(20))), PARTS, r"shard\(1, 4\): begins with samples"),
        (Base(train=Sharded(lambda i, n: range(0))), PARTS, r"shard\(0, 4\): .* empty|no samples"),
        (Base(train=ShardedLength(lambda i, n: range(4 * i, 9))), PARTS, r"shard\(3, 4\): is emp"),
        (
            Base(val=type("Only", (), {"shard": 0})()),
            {},
            r"\('val'\): .* has shard and no __iter__",
        ),
    ],
)
def test_impossible_data_are_named(task: Base, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(LockstepError, match=message) as caught:
        assembled(task, **keys)
    assert isinstance(caught.value, (ConfigError, DataError, TaskError))
    assert "\n" not in str(caught.value)


def test_epochs_of_streams_that_say_their_length() -> None:
    parts = assembled(Base(train=Measured(20)), steps=None, epochs=2)
    assert (parts.total_steps, parts.sampler.steps_per_epoch) == (6, 3)
    parts = assembled(Base(train=Measured(20)), steps=None, data={"drop_last": True})
    assert (parts.total_steps, parts.sampler.num_samples) == (2, 20)
    parts = assembled(Base(train=Points()), steps=9)
    assert (parts.total_steps, parts.sampler.steps_per_epoch) == (9, None)


def test_epochs_of_streams_in_parts_end_with_the_longest_microbatch() -> None:
    sharded = ShardedLength(lambda index, count: range(10 * index, 10 * index + 4 + index))
    parts = assembled(Base(train=sharded), **PARTS, steps=None, epochs=2)
    # Microbatches of four have parts of 4 + 6 and 5 + 7 samples.
    assert (parts.total_steps, parts.sampler.num_samples) == (6, 22)
    assert [parts.sampler.step_size(step) for step in range(4)] == [8, 8, 6, 8]


def test_epochs_have_the_length_of_a_tasks_own_order() -> None:
    parts = assembled(order(lambda e: range(e, e + 17))(), steps=None, epochs=2)
    assert (parts.total_steps, parts.sampler.num_samples) == (6, 17)


def test_orders_and_weights_are_facts_that_ranks_compare() -> None:
    digests = [
        assembled(task()).facts["order of samples"]
        for task in (
            Base, order(lambda e: [1]), order(lambda e: [2]), order(lambda e: [1 + e]),
            weights([1.0] * 20), weights([1.0] * 10 + [2.0] * 10),
        )
    ]  # fmt: skip
    assert len(set(digests)) == 6
    assert digests[0] is None


class Counting(Points):
    """Keeps a counter in self."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            self.count += 1
            yield x + self.count, y


class OwnGenerator(Points):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield x + self.random.random(), y


class FromTheSystem(Points):
    def __iter__(self) -> Iterator[Any]:
        draw = np.random.default_rng()
        for x, y in super().__iter__():
            yield x + float(draw.random()), y


class OnlyOnce(Points):
    """Is an iterator of its own, so it can be read only once."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        return self  # type: ignore[return-value]

    def __next__(self) -> Any:
        self.position += 1
        return torch.full((3,), float(self.position)), torch.tensor([1.0])


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (Counting, r"\['train'\]\.count: is changed by every microbatch"),
        (OwnGenerator, r"\['train'\]\.random: is changed by every microbatch"),
        (FromTheSystem, r"dataset\('train'\): gave another batch"),
        (OnlyOnce, r"\['train'\]\.position: is changed by every microbatch"),
    ],
)
def test_streams_that_keep_something_are_refused_by_name(stream: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        assembled(Base(train=stream()))
