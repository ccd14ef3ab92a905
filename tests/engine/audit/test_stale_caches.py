"""What passes have kept makes no difference when it is forgotten, or it is no cache."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.engine.audit.lasting_values import Caches
from lockstep.errors import TaskError
from lockstep.launching import api as front
from lockstep.launching.api import Session

SAMPLES = 48


class Numbered(ls.Task):
    """Knows the number of each of its samples; keeps nothing."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def dataset(self, split: str) -> TensorDataset | None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 3, generator=generator)
        return TensorDataset(x, x.sum(1), torch.arange(SAMPLES)) if split == "train" else None

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        x, y, numbers = batch
        errors = (model(x).squeeze(1) - y).square()
        return ls.Loss((errors * self.weights(model, x, errors, numbers)).sum(), len(x))

    def weights(self, model: Any, x: Tensor, errors: Tensor, numbers: Tensor) -> Tensor:
        return torch.ones(len(x))


class FirstFeatures(Numbered):
    """Keeps what the model of that moment has made of each sample."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.kept: dict[int, Tensor] = {}

    def weights(self, model: Any, x: Tensor, errors: Tensor, numbers: Tensor) -> Tensor:
        found = zip(numbers.tolist(), model[0](x).detach().mean(1), strict=True)
        return 1 + torch.stack([self.kept.setdefault(n, f) for n, f in found])


class FeaturesInList(Numbered):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.kept: list[Tensor | None] = [None] * SAMPLES

    def weights(self, model: Any, x: Tensor, errors: Tensor, numbers: Tensor) -> Tensor:
        features = model[0](x).detach().mean(1)
        for n, feature in zip(numbers.tolist(), features, strict=True):
            self.kept[n] = feature if self.kept[n] is None else self.kept[n]
        return 1 + torch.stack([self.kept[n] for n in numbers])  # type: ignore[misc]


class Epochs(Numbered):
    """Counts epochs, as a task may."""

    epoch = 0

    def after_step(self, model: nn.Module, step: int) -> None:
        self.epoch = step // 4

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class LastErrors(Epochs):
    """Weighs each sample by its error of the epoch before: hard ones count more."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.errors = torch.ones(2, SAMPLES)

    def weights(self, model: Any, x: Tensor, errors: Tensor, numbers: Tensor) -> Tensor:
        self.errors[self.epoch % 2, numbers] = errors.detach()
        return self.errors[(self.epoch + 1) % 2, numbers]


class LastErrorsInArray(Epochs):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.errors = np.ones((2, SAMPLES), np.float32)

    def weights(self, model: Any, x: Tensor, errors: Tensor, numbers: Tensor) -> Tensor:
        self.errors[self.epoch % 2, numbers.numpy()] = errors.detach().numpy()
        return torch.from_numpy(self.errors[(self.epoch + 1) % 2, numbers.numpy()])


class HardOnes(Epochs):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.hard: set[tuple[int, int]] = set()

    def weights(self, model: Any, x: Tensor, errors: Tensor, numbers: Tensor) -> Tensor:
        found = zip(numbers.tolist(), errors.tolist(), strict=True)
        self.hard |= {(n, self.epoch) for n, error in found if error > 0.3}
        hard = [(n, self.epoch - 1) in self.hard for n in numbers.tolist()]
        return torch.tensor(hard).float() + 1


MODEL: list[Any] = []


@functools.cache
def feature(values: tuple[float, ...]) -> float:
    return float(MODEL[0][0](torch.tensor(values)).detach().mean())


class FeaturesOfFunction(Numbered):
    def weights(self, model: Any, x: Tensor, errors: Tensor, numbers: Tensor) -> Tensor:
        MODEL[:] = [model]
        return 1 + torch.tensor([feature(tuple(values)) for values in x.tolist()])


def trained(folder: Path, task: ls.Task, **more: Any) -> ls.Result:
    values: dict[str, Any] = {"batch_size": 12, "num_microbatches": 4, "steps": 12, "lr": 0.1}
    return front.run(task, ls.TrainConfig(**values | more), Session(str(folder), console=False))


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (FirstFeatures, r"task\.kept"),
        (FeaturesInList, r"task\.kept"),
        (LastErrors, r"task\.errors"),
        (LastErrorsInArray, r"task\.errors"),
        (HardOnes, r"task\.hard"),
        (FeaturesOfFunction, r"\.feature"),
    ],
)
def test_what_was_kept_of_an_earlier_model_is_refused(
    tmp_path: Path, kind: type[ls.Task], place: str
) -> None:
    feature.cache_clear()
    with pytest.raises(TaskError, match=rf"step \d+: gave another result .* left in .*{place}"):
        trained(tmp_path, kind())


class OwnSums(FirstFeatures):
    """Keeps what follows from each sample alone."""

    def weights(self, model: Any, x: Tensor, errors: Tensor, numbers: Tensor) -> Tensor:
        found = zip(numbers.tolist(), x, strict=True)
        return 1 + torch.stack([self.kept.setdefault(n, row.square().sum()) for n, row in found])


class UnreadErrors(LastErrors):
    def weights(self, model: Any, x: Tensor, errors: Tensor, numbers: Tensor) -> Tensor:
        super().weights(model, x, errors, numbers)
        return torch.ones(len(x))


@functools.lru_cache(maxsize=7)
def scale(number: int) -> float:
    return 1 / (1 + number)


class ScalesOfFunction(Numbered):
    def weights(self, model: Any, x: Tensor, errors: Tensor, numbers: Tensor) -> Tensor:
        return torch.tensor([scale(n) for n in numbers.tolist()])


@pytest.mark.parametrize("kind", [OwnSums, UnreadErrors, ScalesOfFunction])
def test_a_cache_may_be_forgotten_and_is_as_it_was_afterwards(
    tmp_path: Path, kind: type[ls.Task]
) -> None:
    result = trained(tmp_path, kind(), steps=20)
    assert result.step == 20
    if isinstance(result.task, OwnSums):
        assert sorted(result.task.kept) == list(range(SAMPLES))
    assert scale.cache_parameters()["maxsize"] == 7


def test_containers_of_all_kinds_forget_and_remember() -> None:
    containers: dict[str, Any] = {
        "dict": {1: 1}, "ordered": OrderedDict(a=1), "list": [1], "set": {1},
        "deque": deque([1], 9), "bytes": bytearray(b"a"), "array": np.ones(2),
        "tensor": torch.ones(2),
    }  # fmt: skip
    caches = Caches([])
    caches.note(containers)
    first = {name: repr(value) for name, value in containers.items()}
    containers["dict"][2] = containers["ordered"]["b"] = 2
    containers["list"].append(2)
    containers["set"].add(2)
    containers["deque"].append(2)
    containers["bytes"] += b"b"
    containers["array"][0] = containers["tensor"][0] = 2
    now = {name: repr(value) for name, value in containers.items()}
    assert not set(first.values()) & set(now.values())
    caches.note(containers)  # of what is known, the first is kept
    caches.forget()
    assert {name: repr(value) for name, value in containers.items()} == first
    caches.recall()
    caches.recall()
    assert {name: repr(value) for name, value in containers.items()} == now


def test_what_is_too_large_to_be_copied_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.engine.audit.lasting_values._MOST_BYTES", 1000)
    large, small, further = torch.zeros(1000), torch.zeros(200), torch.zeros(200)
    caches = Caches([])
    caches.note({"large": large, "small": small, "further": further})
    for tensor in (large, small, further):
        tensor += 1
    caches.forget()
    assert [float(tensor[0]) for tensor in (large, small, further)] == [1, 0, 1]
    caches.recall()
    assert caches.paths == ["small"]
