"""By what a process that comes later is compared with those that train already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import Dataset, TensorDataset

from lockstep.comm.transport import LocalTransport
from lockstep.config import TrainConfig
from lockstep.engine.assembly import Parts, assemble
from lockstep.engine.digests import model_digest
from lockstep.engine.recovery.leader import NOWHERE, Owned, find_origin
from lockstep.engine.runtime import Runtime
from lockstep.engine.task import Loss, Task


class Classify(Task):
    scale = 1.0
    lr = 0.1
    first = 0.0
    bias = True
    metric = "one"

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4, bias=self.bias), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split != "train":
            return None
        x = torch.arange(60.0).view(20, 3)
        x[:, 0] += self.first
        return TensorDataset(x)

    def build_optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        [x] = batch
        return Loss(model(x).square().sum() * self.scale, len(x), {self.metric: (0, 1)})


def parts(**changes: Any) -> Parts:
    task = Classify()
    for name, value in changes.items():
        setattr(task, name, value)
    transport = LocalTransport()
    runtime = Runtime(transport, torch.device("cpu"), 0, "python", 0, lambda _: None, lambda: None)
    config = TrainConfig(batch_size=8, num_microbatches=2, seed=changes.get("seed", 3))
    return assemble(task, config, runtime)


def differing(changes: dict[str, Any]) -> set[str]:
    here, there = parts().facts, parts(**changes).facts
    assert here.keys() == there.keys()
    return {name for name in here if here[name] != there[name]}


GRADIENT = "loss and gradient of the first microbatch"
STEPPED = {
    f"{what} of group 0 of optimizer"
    for what in ("number of tensors", "number of elements", "SHA-256 of parameters' names")
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),
        ({"scale": 1.001}, {GRADIENT}),
        ({"lr": 0.2}, {"lr of group 0 of optimizer"}),
        ({"first": 0.5}, {"first microbatch", GRADIENT}),
        ({"metric": "two"}, {"metrics", GRADIENT}),
        ({"bias": False}, {"the model's start", GRADIENT, *STEPPED}),
    ],
)
def test_what_was_edited_is_named(changes: dict[str, Any], expected: set[str]) -> None:
    assert differing(changes) == expected


def test_comparing_leaves_nothing_behind() -> None:
    made = parts()
    assert all(p.grad is None for p in made.model.parameters())
    fresh = nn.BatchNorm1d(4)
    for name, buffer in made.model[1].named_buffers():  # type: ignore[index]
        assert torch.equal(buffer, fresh.get_buffer(name))
    assert made.facts["the model's start"] == model_digest(made.model)


class Gathered(LocalTransport):
    """A group of ranks with known values."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__()
        self.rows = rows

    def gather_json(self, value: Any) -> list[Any]:
        return self.rows


def test_joiners_are_compared_with_ranks_that_have_trained() -> None:
    names = ("former", "owned", "row", "facts")
    ranks = [
        (1, Owned(0, 1, 3), {}, {"data": "a", "loss": "b"}),
        (2, Owned(0, 2, 3), {}, {"data": "a", "loss": "b"}),
        (NOWHERE, Owned(), {}, {"data": "a", "loss": "c"}),
        (NOWHERE, Owned(), {}, {"data": "a", "loss": "b"}),
        (NOWHERE, Owned(), {}, {"loss": "c"}),
    ]
    rows = [dict(zip(names, rank, strict=True)) for rank in ranks]
    origin = find_origin(Gathered(rows), 1, Owned(0, 1, 3), {}, {})
    assert origin.foreign_ranks == {2: ["loss"], 4: ["data", "loss"]}
