from __future__ import annotations

import gc
import inspect
import multiprocessing
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from lockstep.comm.transport import LocalTransport
from lockstep.data.loader import Loader, to_device
from lockstep.data.random import Stream, random_key
from lockstep.data.sampler import ElasticSampler
from lockstep.data.workers import _Deferred
from lockstep.engine.runtime import shared_error
from lockstep.engine.task import Task
from lockstep.engine.task_config import own_collate
from lockstep.engine.training_data import dataset_size
from lockstep.errors import DataError
from lockstep.launching.host.processes import is_alive
from lockstep.parallel.layout import Range

NUM_SAMPLES, BATCH_SIZE, NUM_MICROBATCHES = 22, 8, 4
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

STEPS = 6
ALL = Range(0, NUM_MICROBATCHES)
CPU = torch.device("cpu")
X = torch.arange(NUM_SAMPLES * 3, dtype=torch.float32).view(NUM_SAMPLES, 3)
Y = torch.arange(NUM_SAMPLES)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Plain(Dataset[Any]):
    """Gives `make(i)`."""

    def __init__(self, make: Callable[[int], Any] = lambda i: (X[i], Y[i])) -> None:
        self.make = make

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


class ManyAtOnce(Plain):
    def __getitem__(self, i: int) -> Any:
        raise AssertionError("has __getitems__")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(i) for i in indices]


class OnlyMethods:
    """No subclass of torch's Dataset."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, i: int) -> Any:
        return X[i], Y[i]


def augmented(i: int) -> tuple[Tensor, float, float]:
    """Draws from all three global generators."""
    return X[i] + torch.rand(3), float(np.random.rand()), random.random()


def sampler(num_samples: int = NUM_SAMPLES, shuffle: bool = True) -> ElasticSampler:
    return ElasticSampler(num_samples, BATCH_SIZE, NUM_MICROBATCHES, seed=4, shuffle=shuffle)


def loader(
    dataset: Any, collate: Callable[[list[Any]], Any] | None = None, **options: Any
) -> Loader:
    return Loader(dataset, collate, sampler(), options.pop("seed", 4), CPU, **options)


def batches_of(stream: Iterable[tuple[int, int, Any]]) -> list[Any]:
    return [batch for _, _, batch in stream]


def everything(made: Loader, microbatches: Range = ALL, first: int = 0) -> list[Any]:
    return batches_of(made.stream(microbatches, first, STEPS))


def as_bytes(value: Any) -> Any:
    """A nested batch with its tensors as bytes, to be compared."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {k: as_bytes(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_bytes(v) for v in value]
    return value


def indices_in_order() -> list[list[int]]:
    whole = sampler()
    return [
        whole.indices(step, m).tolist() for step in range(STEPS) for m in range(NUM_MICROBATCHES)
    ]


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), range(NUM_SAMPLES)),
        Plain(),
        ManyAtOnce(),
        OnlyMethods(),
    ],
    ids=["tensors", "subset", "plain", "many", "methods"],
)
def test_microbatches_hold_the_samplers_samples_in_order(dataset: Any) -> None:
    batches = everything(loader(dataset))
    for batch, indices in zip(batches, indices_in_order(), strict=True):
        if not indices:
            assert batch is None
            continue
        x, y = batch
        assert y.tolist() == indices
        assert torch.equal(x, X[indices])
        assert isinstance(batch, list)


def test_an_uneven_last_batch_may_leave_microbatches_without_samples() -> None:
    made = Loader(TensorDataset(X[:10], Y[:10]), None, sampler(num_samples=10), 4, CPU)
    batches = batches_of(made.stream(ALL, 0, 2))
    assert [None if b is None else len(b[1]) for b in batches] == [2, 2, 2, 2, 1, 1, None, None]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_skip_microbatches_without_samples(num_workers: int) -> None:
    made = Loader(Plain(), None, sampler(num_samples=10), 4, CPU, num_workers=num_workers)
    stream = list(made.stream(Range(1, NUM_MICROBATCHES), 1, 4))
    assert [place[:2] for place in stream] == [(s, m) for s in range(1, 4) for m in range(1, 4)]
    batches = batches_of(stream)
    sizes = [None if b is None else len(b[1]) for b in batches]
    assert sizes == [1, None, None, 2, 2, 2, 1, None, None]


def test_dict_samples_make_dict_batches() -> None:
    [batch, *_] = everything(loader(Plain(lambda i: {"x": X[i], "y": Y[i]})))
    assert batch["y"].tolist() == indices_in_order()[0]
    assert torch.equal(batch["x"], X[indices_in_order()[0]])


def test_named_tuple_samples_make_named_tuple_batches() -> None:
    [batch, *_] = everything(loader(Plain(lambda i: Pair(X[i], Y[i]))))
    assert isinstance(batch, Pair)
    assert batch.y.tolist() == indices_in_order()[0]


@pytest.mark.parametrize(
    "dataset", [Plain(), ManyAtOnce(), TensorDataset(X, Y)], ids=["plain", "many", "tensors"]
)
def test_own_collate_gets_the_samples(dataset: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        return [int(y) for _, y in samples]

    batches = everything(loader(dataset, collate))
    assert batches == [indices or None for indices in indices_in_order()]


def test_own_item_access_of_a_tensor_dataset_is_used() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, i: Any) -> Any:
            return tuple(2 * t for t in super().__getitem__(i))

    class DoubledTogether(TensorDataset):
        def __getitems__(self, indices: list[int]) -> Any:
            return [(2 * X[i], 2 * Y[i]) for i in indices]

    for dataset in (Doubled(X, Y), DoubledTogether(X, Y)):
        [batch, *_] = everything(loader(dataset))
        assert batch[1].tolist() == [2 * i for i in indices_in_order()[0]]


def test_a_task_passes_on_a_collate_of_its_own_only() -> None:
    class Inheriting(Task):
        build_model = dataset = loss = None  # type: ignore[assignment]

    class Overriding(Inheriting):
        def collate(self, samples: list[Any]) -> Any:
            return len(samples)

    assert own_collate(Inheriting()) is None
    assert own_collate(Overriding())([1, 2, 3]) == 3  # type: ignore[misc]
    patched = Inheriting()
    patched.collate = len  # type: ignore[method-assign,assignment]
    assert own_collate(patched) is len


@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Plain()], ids=["tensors", "plain"])
def test_the_default_is_torchs_collate(dataset: Any) -> None:
    explicit = as_bytes(everything(loader(dataset, default_collate)))
    assert as_bytes(everything(loader(dataset))) == explicit


@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Plain()], ids=["tensors", "plain"])
def test_a_batch_shares_no_memory_with_the_dataset(dataset: Any) -> None:
    before = X.clone()
    for batch in everything(loader(dataset)):
        if batch is not None:
            batch[0].fill_(-1)
    assert torch.equal(X, before)


@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(X, Y), Plain(augmented), ManyAtOnce(augmented)],
    ids=["tensors", "augmented", "augmented_many"],
)
def test_workers_fetch_the_same_bits(dataset: Any) -> None:
    alone = as_bytes(everything(loader(dataset)))
    assert as_bytes(everything(loader(dataset, num_workers=2))) == alone
    assert as_bytes(everything(loader(dataset, num_workers=1, prefetch=1))) == alone


def test_augmentation_depends_on_step_and_microbatch_and_seed_only() -> None:
    made = loader(Plain(augmented))
    whole = as_bytes(everything(made))
    for m in range(NUM_MICROBATCHES):
        random.seed(m)
        torch.manual_seed(m)
        own = as_bytes(everything(loader(Plain(augmented)), Range(m, m + 1)))
        assert own == whole[m::NUM_MICROBATCHES]
    assert as_bytes(made.microbatch(3, 2)) == whole[3 * NUM_MICROBATCHES + 2]
    assert as_bytes(everything(loader(Plain(augmented), seed=5)))[0] != whole[0]


def test_augmentation_differs_from_one_microbatch_and_epoch_to_the_next() -> None:
    drawn = [tuple(b[2].tolist()) for b in everything(loader(Plain(augmented))) if b is not None]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("first", [1, 4])
def test_a_stream_begun_in_the_middle_is_the_tail(num_workers: int, first: int) -> None:
    whole = as_bytes(everything(loader(Plain(augmented))))
    tail = everything(loader(Plain(augmented), num_workers=num_workers), first=first)
    assert as_bytes(tail) == whole[first * NUM_MICROBATCHES :]


def test_workers_leave_the_training_process_random_state_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr,index]
    assert len(everything(loader(Plain(augmented), num_workers=2))) == STEPS * NUM_MICROBATCHES
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert np.random.get_state()[1].tolist() == state[2]  # type: ignore[union-attr,index]


def test_tensors_are_picked_without_touching_random_state() -> None:
    state = torch.get_rng_state()
    everything(loader(TensorDataset(X, Y)))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_in_a_worker_names_the_datasets_own_error() -> None:
    def broken(i: int) -> Any:
        raise RuntimeError("file is gone")

    with pytest.raises(RuntimeError, match="file is gone"):
        everything(loader(Plain(broken), num_workers=1))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class NoItems:
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Endless(), r"dataset\('train'\): a Endless has no __len__"),
        (NoItems(), r"dataset\('train'\): a NoItems has no __getitem__"),
        (7, r"dataset\('train'\): a int has no __len__"),
    ],
)
def test_what_is_no_map_style_dataset_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataset_size(dataset, "train")


def test_size_of_a_dataset_is_its_length() -> None:
    assert dataset_size(Plain(), "val") == NUM_SAMPLES
    assert dataset_size([1, 2, 3], "val") == 3  # type: ignore[arg-type]


def test_nested_batches_are_moved_with_their_structure() -> None:
    meta = torch.device("meta")
    batch = {"pair": Pair(X, Y), "list": [X, (Y, "text")], "number": 3, "none": None}
    moved = to_device(batch, meta)
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["list"][1], tuple)
    tensors = [*moved["pair"], moved["list"][0], moved["list"][1][0]]
    assert all(t.device == meta for t in tensors)
    assert (moved["list"][1][1], moved["number"], moved["none"]) == ("text", 3, None)


def test_random_keys_of_all_uses_differ() -> None:
    keys = [
        random_key(seed, stream, step, microbatch)
        for seed in (0, 1, 2**63 - 1)
        for stream in Stream
        for step in range(20)
        for microbatch in range(20)
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)


def test_random_keys_never_change() -> None:
    assert random_key(0, Stream.MODEL) == 7530090308580795546
    assert random_key(7, Stream.DATA, 3, 2) == 5896761131763000566


DEATH = "worker .* (killed by|exited unexpectedly|it has died)"


def started(stream: Any) -> list[Any]:
    """The workers of a stream whose first microbatch is fetched."""
    before = set(multiprocessing.active_children())
    next(stream)
    return [w for w in multiprocessing.active_children() if w not in before]


@pytest.mark.slow
def test_a_killed_worker_is_noticed_when_the_next_batch_is_fetched() -> None:
    """And nowhere else: torch's handler of SIGCHLD would raise at any point of this thread."""
    made = loader(Plain(), num_workers=1)
    stream = made.stream(ALL, 0, STEPS)
    [worker] = started(stream)
    worker.kill()
    while is_alive(worker.pid):
        time.sleep(0.01)  # where torch's own handler would raise
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=DEATH):
        list(stream)
    assert time.monotonic() - begun < 3  # torch looks after its workers every 5 s
    assert as_bytes(everything(made)) == as_bytes(everything(loader(Plain())))


def test_an_exception_that_is_told_of_keeps_no_workers_alive() -> None:
    """Else the garbage collector may find their loader in workers that are forked later."""
    stream = loader(Plain(), num_workers=2).stream(ALL, 0, STEPS)
    workers = started(stream)
    workers[0].kill()
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match=DEATH) as caught:
            list(stream)
        assert shared_error(LocalTransport(), caught.value) is not None
        stream.close()
        assert not [worker for worker in workers if is_alive(worker.pid)]
    finally:
        gc.enable()


def test_a_death_that_is_told_of_in_a_destructor_is_raised_with_the_next_batch() -> None:
    class Closer:
        def __del__(self) -> None:
            handler(signal.SIGCHLD, inspect.currentframe())

    def died(signum: int, frame: object) -> None:
        raise RuntimeError("a worker has died")

    def fetch() -> Iterator[int]:
        closer = Closer()
        del closer
        yield 1

    handler = _Deferred(died)
    assert handler.let_in(fetch()) == 1
    with pytest.raises(RuntimeError, match="a worker has died"):
        handler.let_in(fetch())


def test_the_handler_of_sigchld_is_put_back_when_the_last_loader_is_closed() -> None:
    first = loader(Plain(), num_workers=1)
    list(first.stream(ALL, 0, 1))  # torch installs its handler once
    signal.getsignal(signal.SIGCHLD).users.clear()  # loaders of other tests
    first.close()
    before = signal.getsignal(signal.SIGCHLD)
    one, two = loader(Plain(), num_workers=1), loader(Plain(), num_workers=1)
    streams = [made.stream(ALL, 0, STEPS) for made in (one, two)]
    for stream in streams:
        next(stream)
    held = signal.getsignal(signal.SIGCHLD)
    for stream in streams:
        stream.close()
    assert signal.getsignal(signal.SIGCHLD) is held  # late signals do no harm
    one.close()
    assert signal.getsignal(signal.SIGCHLD) is held
    two.close()
    assert signal.getsignal(signal.SIGCHLD) is before


def test_an_error_for_the_user_comes_from_a_worker_as_it_is() -> None:
    def refuse(i: int) -> Any:
        raise DataError(f"sample {i // 100}: is damaged; fetch it again")

    with pytest.raises(DataError, match=r"^sample 0: is damaged; fetch it again$"):
        list(loader(Plain(refuse), num_workers=1).stream(ALL, 0, 1))


def test_a_worker_that_is_killed_while_its_batch_is_waited_for() -> None:
    def slow(i: int) -> Any:
        time.sleep(0 if multiprocessing.parent_process() is None else 30)

    stream = loader(Plain(slow), num_workers=1).stream(ALL, 0, STEPS)
    begun = time.monotonic()

    def kill() -> None:
        while not multiprocessing.active_children():
            time.sleep(0.01)
        time.sleep(0.1)
        multiprocessing.active_children()[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match=DEATH):
        next(stream)
    killer.join()
    assert time.monotonic() - begun < 3


def test_workers_end_with_their_process() -> None:
    script = """
import multiprocessing, time, torch
from torch.utils.data import DataLoader
from lockstep.data.workers import fetched
stream = fetched(DataLoader(torch.arange(99), num_workers=1), None)
next(stream)
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 2
    while is_alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Epochal(Plain):
    """Returns the epoch that it was given."""

    def set_epoch(self, epoch: int) -> None:
        self.make = lambda i: (i, epoch)


class EpochalTensors(TensorDataset):
    def set_epoch(self, epoch: int) -> None:
        self.tensors = (X, Y + 1000 * epoch)


class EpochalCollate:
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, samples: list[Any]) -> Any:
        return [self.epoch for _ in samples], [i for i, _ in samples]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_datasets_and_collate_functions_know_the_epoch_of_what_is_fetched(num_workers: int) -> None:
    per_epoch = sampler().steps_per_epoch
    assert per_epoch is not None
    made = loader(Epochal(), num_workers=num_workers)
    made.microbatch(2 * per_epoch, 0)  # what came before does not matter
    for step, _, batch in made.stream(ALL, per_epoch - 1, per_epoch + 1):
        if batch is not None:
            assert set(batch[1].tolist()) == {step // per_epoch}
    collate = EpochalCollate()
    for step, _, batch in loader(Plain(), collate, num_workers=num_workers).stream(ALL, 0, STEPS):
        if batch is not None:
            assert set(batch[0]) == {step // per_epoch}


def test_a_dataset_of_tensors_is_told_the_epoch_too() -> None:
    per_epoch = sampler().steps_per_epoch
    assert per_epoch is not None
    made = loader(EpochalTensors(X, Y))
    assert made.microbatch(0, 0)[1].max() < 1000 <= made.microbatch(per_epoch, 0)[1].min()


def test_batches_are_settled_where_nothing_of_the_users_runs_before_they_are_used() -> None:
    tensors, given = TensorDataset(X, Y), sampler()
    given.is_given = True
    plain, own = loader(tensors), Loader(tensors, None, given, 4, CPU)
    assert plain.is_settled(3, may_change=False)
    assert not plain.is_settled(3, may_change=True)
    per_epoch = given.steps_per_epoch
    assert per_epoch is not None
    own.microbatch(0, 0)
    steps = range(1, per_epoch + 1)  # the last of them would ask the task for an order
    assert [own.is_settled(step, may_change=False) for step in steps] == [True] * (
        per_epoch - 1
    ) + [False]
    for other in (Plain(), EpochalTensors(X, Y)):
        assert not loader(other).is_settled(3, may_change=False)
    assert not loader(tensors, default_collate).is_settled(3, may_change=False)


def test_batches_of_workers_are_settled_but_those_that_are_compared() -> None:
    made = loader(Plain(), num_workers=1)
    settled = [step for step in range(9) if made.is_settled(step, may_change=True)]
    assert settled == [2, 4, 5, 6, 8]
    given = sampler()
    given.is_given = True
    assert not Loader(Plain(), None, given, 4, CPU, num_workers=1).is_settled(2, may_change=False)
