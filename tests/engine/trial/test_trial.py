"""What a task must not keep between batches is found before training, and named."""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls
from lockstep.comm.transport import LocalTransport
from lockstep.engine.assembly import Parts, assemble
from lockstep.engine.audit.hidden_state import Walk, hidden_state
from lockstep.engine.runtime import Runtime
from lockstep.engine.task import Loss, Task
from lockstep.errors import TaskError

module_generator = torch.Generator()
module_counter = 0

CONFIG = ls.TrainConfig(batch_size=8, num_microbatches=2, steps=2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.online(x)
        return y


class Plain(Task):
    """Classifies; subclasses add a way to keep state."""

    def build_model(self) -> nn.Module:
        return Net()

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(3)
        return TensorDataset(torch.randn(24, 3, generator=generator), torch.arange(24) % 2)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))


class Samples(Dataset[Any]):
    """Gives what `draw` gives as the first feature."""

    def __init__(self, draw: Callable[[int], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(self.draw(index)), index / 24, 1.0]), index % 2


def tried(task: Task) -> Parts:
    transport = LocalTransport()
    runtime = Runtime(transport, torch.device("cpu"), 0, "python", 0, lambda _: None, lambda: None)
    return assemble(task, CONFIG, runtime)


class TaskGenerator(Plain):
    def __init__(self, config: ls.TrainConfig | None = None) -> None:
        super().__init__(config)
        self.rng = torch.Generator().manual_seed(1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return super().loss(model, [x + torch.randn(x.shape, generator=self.rng), y])


class TaskCounter(Plain):
    """Has no effect on the first batches."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.calls += 1
        return super().loss(model, batch)


class History(Plain):
    def __init__(self, config: ls.TrainConfig | None = None) -> None:
        super().__init__(config)
        self.history: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        self.history.append(float(loss.sum.detach()))
        return loss


class GlobalCounter(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        global module_counter
        module_counter += 1
        return super().loss(model, batch)


class ClassCounter(Plain):
    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        ClassCounter.calls += 1
        return super().loss(model, batch)


class DefaultArgument(Plain):
    def loss(self, model: nn.Module, batch: Any, seen: list[int] = []) -> Loss:  # noqa: B006
        seen.append(len(batch))
        return super().loss(model, batch)


module_list: list[int] = []


class GlobalList(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        module_list.append(1)
        return super().loss(model, batch)


def counted(model: nn.Module, x: Tensor) -> Any:
    counted.calls += 1  # type: ignore[attr-defined]
    return model(x)


counted.calls = 0  # type: ignore[attr-defined]


class FunctionAttribute(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(nn.functional.cross_entropy(counted(model, x), y, reduction="sum"), len(y))


class GlobalGenerator(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        torch.rand(1, generator=module_generator)
        return super().loss(model, batch)


class ModelCounter(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        model.calls = getattr(model, "calls", 0) + 1
        return super().loss(model, batch)


class WithSamples(Plain):
    def dataset(self, split: str) -> Dataset[Any] | None:
        return Samples(self.drawer()) if split == "train" else None

    def drawer(self) -> Callable[[int], float]:
        raise NotImplementedError


class DatasetGenerator(WithSamples):
    def drawer(self) -> Callable[[int], float]:
        rng = np.random.default_rng(5)
        return lambda index: rng.random()


class DatasetRandomState(WithSamples):
    def drawer(self) -> Callable[[int], float]:
        return partial(lambda rng, index: rng.rand(), np.random.RandomState(5))


class DatasetRandom(WithSamples):
    def drawer(self) -> Callable[[int], float]:
        rng = random.Random(5)
        return lambda index: rng.random()


class DatasetStream(WithSamples):
    def drawer(self) -> Callable[[int], float]:
        numbers = itertools.count()
        return lambda index: next(numbers)


class Teacher(Plain):
    """A momentum encoder that moves in each forward pass."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        for slow, fast in zip(model.teacher.parameters(), model.online.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.detach(), alpha=0.1)
        return super().loss(model, batch)


class Clamped(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        with torch.no_grad():
            for parameter in model.online.parameters():
                parameter.clamp_(-100, 100)
        return super().loss(model, batch)


class LateBuffer(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        model.extra = nn.Parameter(torch.zeros(1))
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (TaskGenerator, "task.rng"),
        (TaskCounter, "task.calls"),
        (History, "task.history"),
        (GlobalCounter, "test_trial.module_counter"),
        (ClassCounter, "task.calls"),
        (DefaultArgument, r"task\.loss\.__defaults__"),
        (GlobalList, r"test_trial\.module_list"),
        (FunctionAttribute, r"test_trial\.counted\.calls"),
        (GlobalGenerator, "test_trial.module_generator"),
        (ModelCounter, "model.calls"),
        (DatasetGenerator, r"dataset\('train'\)\.draw\.rng"),
        (DatasetRandomState, r"dataset\('train'\)\.draw\.args\[0\]"),
        (DatasetRandom, r"dataset\('train'\)\.draw\.rng"),
        (DatasetStream, r"dataset\('train'\)\.draw\.numbers"),
        (Teacher, r"parameter teacher\.(weight|bias) .*after_step"),
        (Clamped, r"parameter online\.(weight|bias) .*after_step"),
        (LateBuffer, "extra was made by a forward pass"),
    ],
)
def test_state_that_batches_leave_behind_is_refused_by_name(kind: type[Task], named: str) -> None:
    with pytest.raises(TaskError, match=named):
        tried(kind())


def hidden() -> Callable[[], int]:
    """A counter that no attribute leads to."""
    return iter(range(10**9)).__next__


class DrawsFromNeighbour(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        noise = sys.modules["neighbour"].rng.normal()
        sys.modules["neighbour"].State.calls += 1
        return super().loss(model, [x + noise, y])


def test_modules_beside_the_task_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour: Any = types.ModuleType("neighbour")
    neighbour.__file__ = str(Path(__file__).parent / "neighbour.py")
    neighbour.rng = np.random.default_rng(1)
    neighbour.State = type("State", (), {"calls": 0, "__module__": "neighbour"})
    monkeypatch.setitem(sys.modules, "neighbour", neighbour)
    with pytest.raises(TaskError, match=r"^neighbour\.rng, neighbour\.State\.calls: is changed"):
        tried(DrawsFromNeighbour())


class HooksGradient(Plain):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        calls: list[int] = []

        def hook(gradient: Tensor) -> None:
            calls.append(1)

        model.online.weight.register_hook(hook)
        return model


class NumpyCounter(Plain):
    calls: Any = np.int64(0)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.calls += 1
        return super().loss(model, batch)


class Flags(Plain):
    def __init__(self, config: ls.TrainConfig | None = None) -> None:
        super().__init__(config)
        self.flags, self.columns = bytearray(4), np.zeros((4, 6))[:, ::2]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.flags[1] += 1
        self.columns[1, 1] += 1
        return super().loss(model, batch)


class OverriddenDefault(DefaultArgument):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (HooksGradient, r"model\.online\.weight\._backward_hooks\[.*\]\.calls"),
        (NumpyCounter, r"task\.calls"),
        (Flags, r"task\.flags, task\.columns"),
        (OverriddenDefault, r"task\.DefaultArgument\.loss\.__defaults__"),
    ],
)
def test_state_in_hooks_numbers_and_views_is_refused(kind: type[Task], named: str) -> None:
    with pytest.raises(TaskError, match=f"^{named}.*is changed by every microbatch"):
        tried(kind())


class ByThreads(WithSamples):
    """Fetches with threads, whose locks and counters depend on time."""

    def drawer(self) -> Callable[[int], float]:
        pool = ThreadPoolExecutor(2)
        return lambda index: pool.submit(float, index).result() / 24


class HiddenInLoss(Plain):
    count = staticmethod(hidden())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return super().loss(model, [x * (1 + type(self).count()), y])


class HiddenInGradient(Plain):
    count = staticmethod(hidden())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        factor = 1 + type(self).count()
        loss.sum.register_hook(lambda gradient: gradient * factor)
        return loss


class HiddenInData(WithSamples):
    def drawer(self) -> Callable[[int], float]:
        return lambda index: float(hidden_numbers())


hidden_numbers = hidden()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (HiddenInLoss, r"Task\.loss: gave another loss"),
        (HiddenInGradient, r"parameter online\.weight: got another gradient"),
        (HiddenInData, r"dataset\('train'\): gave another batch"),
    ],
)
def test_state_that_cannot_be_seen_is_found_by_its_effect(kind: type[Task], named: str) -> None:
    with pytest.raises(TaskError, match=named):
        tried(kind())


class Cached(WithSamples):
    """Keeps what it has read, and draws from a generator that it sets for each sample."""

    def drawer(self) -> Callable[[int], float]:
        cache: dict[int, float] = {}
        rng = torch.Generator()

        def draw(index: int) -> float:
            if index not in cache:
                cache[index] = torch.rand(1, generator=rng.manual_seed(index)).item()
            return cache[index]

        return draw


class GivenGenerators(WithSamples):
    def drawer(self) -> Callable[[int], float]:
        return lambda index: torch.rand(1, generator=ls.generator()).item()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return super().loss(model, [x * ls.numpy_generator().normal(), y])


class Declared(TaskCounter):
    scratch = ("task.calls",)


class DeclaredAbove(History):
    scratch = ("task.history",)


class DeclaredBeside(TaskCounter):
    scratch = ("task.call", "task.calls_of")


@pytest.mark.parametrize("scratch", ["task.calls", ["task.calls"], ("task.calls", 3)])
def test_scratch_that_is_no_tuple_of_paths_is_refused(scratch: Any) -> None:
    task = TaskCounter()
    task.scratch = scratch
    with pytest.raises(TaskError, match=r"TaskCounter\.scratch: .*`scratch = \('task.calls',\)`"):
        tried(task)


def test_scratch_names_whole_elements_of_paths() -> None:
    with pytest.raises(TaskError, match=r"^task\.calls: "):
        tried(DeclaredBeside())


@pytest.mark.parametrize(
    "kind", [Plain, Cached, GivenGenerators, Declared, DeclaredAbove, ByThreads]
)
def test_what_does_not_depend_on_earlier_batches_is_taken(kind: type[Task]) -> None:
    assert tried(kind()).train_step.flat.tensors


def test_the_trial_leaves_nothing_behind() -> None:
    class Counting(Plain):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            model.seen += 1
            model.seen = model.seen * 2
            return super().loss(model, batch)

    parts = tried(Counting())
    assert parts.model.seen == 0
    assert all(p.grad is None for p in parts.model.parameters())


def test_batch_norm_that_is_used_later_only_is_watched() -> None:
    class Unused(Plain):
        def build_model(self) -> nn.Module:
            model = Net()
            model.norm = nn.BatchNorm1d(3)
            return model

    parts = tried(Unused())
    names = [entry.name for entry in parts.train_step.state.flat.entries]
    assert names == ["norm.running_mean", "norm.running_var"]
    assert parts.train_step.state.num_counters == 1


def test_digests_of_trials_tell_code_apart() -> None:
    class Scaled(Plain):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            loss = super().loss(model, batch)
            return Loss(loss.sum * 1.5, loss.weight)

    assert tried(Plain()).facts == tried(Plain()).facts
    assert tried(Plain()).facts != tried(Scaled()).facts


def test_cycles_slots_and_large_arrays_are_walked() -> None:
    class Slotted:
        __slots__ = ("number",)

    slotted, knot = Slotted(), {}
    slotted.number = 1
    knot["self"] = knot
    root = {"slotted": slotted, "knot": knot, "array": np.zeros(5_000_000), "many": [0] * 100_000}
    before = hidden_state({"root": root})
    slotted.number = 2
    root["many"].append(1)
    root["array"][0] = 1
    after = hidden_state({"root": root})
    moved = {path for path in before if before[path] != after.get(path)}
    assert moved >= {"root['slotted'].number", "root['many']!", "root['array']"}


def test_long_chains_are_walked() -> None:
    class Node:
        def __init__(self, after: Any) -> None:
            self.after, self.number = after, 0

    last = chain = Node(None)
    for _ in range(3000):
        chain = Node(chain)
    before = hidden_state({"chain": chain})
    last.number = 1
    after = hidden_state({"chain": chain})
    [moved] = [path for path in before if before[path] != after[path]]
    assert moved.startswith("chain.after.after")
    assert moved.endswith(".after.number")
    assert len(moved) < 500


def test_objects_that_raise_or_open_files_are_passed_over() -> None:
    class Hostile(dict[Any, Any]):
        def __len__(self) -> int:
            raise OSError("gone")

        items = __repr__ = __len__  # type: ignore[assignment]

    class Unprintable(int):
        def __repr__(self) -> str:
            raise SystemError("no")

    class Archive(Mapping[str, Any]):
        def __init__(self) -> None:
            self.reads = 0

        def __getitem__(self, key: str) -> Any:
            self.reads += 1

        def __len__(self) -> int:
            self.reads += 1
            return 3

        def __iter__(self) -> Any:
            self.reads += 1
            return iter("abc")

    archive = Archive()
    found = hidden_state({"root": [Hostile({Unprintable(2): 1}), Unprintable(3), archive, 5]})
    assert found["root[0][a Unprintable]"] == "1"
    assert found["root[3]"] == "5"
    assert archive.reads == 0


def test_generators_in_defaults_and_class_attributes_are_found() -> None:
    class Base:
        stream = random.Random(1)

        def __getitem__(self, index: int, rng: Any = np.random.RandomState(1)) -> Any:  # noqa: B008
            return rng.rand()

        @staticmethod
        def draw(rng: torch.Generator = torch.Generator()) -> Any:  # noqa: B008
            return rng

    class Derived(Base):
        def __getitem__(self, index: int, rng: Any = None) -> Any:
            return super().__getitem__(index)

    assert Walk({"dataset": Derived()}).generators.keys() == {
        "dataset.stream",
        "dataset.draw.__defaults__[0][0]",
        "dataset.Base.__getitem__.__defaults__[0][0]",
    }


def test_large_arrays_that_are_views_are_sampled() -> None:
    root = {"array": np.zeros((2000, 1000)).T, "tensor": torch.zeros(2000, 1000).T}
    before = hidden_state({"root": root})
    root["array"][0, 0] = root["tensor"][0, 0] = 1
    after = hidden_state({"root": root})
    assert all(before[f"root['{name}']"] != after[f"root['{name}']"] for name in root)
