"""What a task must not do with a model in shards is found before training, on one rank too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.launching.api.test_train import config
from tests.nn.sharded.test_refusals import Change, Net
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.errors import TaskError


class Regression(ls.Task):
    """Of a model with a region; what is done in it is an argument."""

    between: Change = staticmethod(lambda module, x: F.gelu(x))

    def build_model(self) -> nn.Module:
        return ls.nn.shard(Net(type(self).between), {"up": "column", "down": "row"})

    def dataset(self, split: str) -> Any:
        x = torch.linspace(-1, 1, 256).view(64, 4)
        return TensorDataset(x) if split != "test" else None

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        return ls.Loss(model(batch[0]).square().sum(), len(batch[0]))


def train(kind: type[Regression], folder: Path, **keys: Any) -> ls.Result:
    return ls.train(kind(config(steps=2, num_shards=2, **keys)), run_dir=folder, quiet=True)


def penalty(tensors: Any) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()


class PenaltyInLoss(Regression):
    def loss(self, model: Any, batch: Any) -> ls.Loss:
        plain = super().loss(model, batch)
        return ls.Loss(plain.sum + penalty(model.parameters()), plain.weight)


class PenaltyInMetric(Regression):
    def loss(self, model: Any, batch: Any) -> ls.Loss:
        plain, size = super().loss(model, batch), len(batch[0])
        num_positive = sum((p > 0).sum() for p in model.down.parameters())
        return ls.Loss(plain.sum, size, {"positive": (num_positive, size)})


class PenaltyInEvaluation(Regression):
    def evaluate(self, model: Any, batch: Any) -> ls.Loss:
        return ls.Loss(penalty(p for n, p in model.named_parameters() if "up" in n), 1)


class StateInLoss(Regression):
    def loss(self, model: Any, batch: Any) -> ls.Loss:
        plain = super().loss(model, batch)
        return ls.Loss(plain.sum + penalty(model.state_dict().values()), plain.weight)


class ChecksParameters(Regression):
    def loss(self, model: Any, batch: Any) -> ls.Loss:
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            raise RuntimeError("not finite")
        return super().loss(model, batch)


class PenaltyOnWholeParameters(Regression):
    def loss(self, model: Any, batch: Any) -> ls.Loss:
        plain = super().loss(model, batch)
        return ls.Loss(plain.sum + penalty([model.down.bias]), plain.weight)


def test_parameters_that_every_rank_has_may_be_read(tmp_path: Path) -> None:
    assert train(PenaltyOnWholeParameters, tmp_path).status == "completed"


class Softmax(Regression):
    between = staticmethod(lambda module, x: x.softmax(-1))


class SetsBuffer(Regression):
    @staticmethod
    def between(module: Any, x: Any) -> Any:
        module.mean = x.detach().mean()
        return x


class NoTensor(Regression):
    between = staticmethod(lambda module, x: x * float(x.sum()))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (PenaltyInLoss, "Task.loss reads up.weight itself"),
        (PenaltyInMetric, "Task.loss reads down.weight itself"),
        (PenaltyInEvaluation, "Task.evaluate reads up.weight itself"),
        (StateInLoss, "state_dict: up.weight lies on other ranks"),
        (ChecksParameters, "Task.loss reads up.weight itself"),
        (Softmax, r"Look at softmax in between \(Between\) at test_cut_model.py"),
        (SetsBuffer, "buffer between.mean: is set to features that are cut into shards"),
        (NoTensor, r"TypeError in between \(Between\) at test_cut_model.py.*float\(\) argument"),
    ],
)
def test_parameters_and_features_in_shards_that_the_task_uses_itself(
    kind: type[Regression], words: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=words):
        train(kind, tmp_path)


class Counts(Regression):
    """Counts its forward passes in a buffer, of which a step has the mean over microbatches."""

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        model.between.mean += 1.0
        return super().loss(model, batch)


def test_comparing_with_the_whole_model_leaves_buffers_as_they_are(tmp_path: Path) -> None:
    assert float(train(Counts, tmp_path).model.between.mean) == 2.0
