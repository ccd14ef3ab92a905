"""Which splits there are, and what their metrics are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm.transport import LocalTransport
from lockstep.engine.assembly import assemble
from lockstep.engine.evaluation.batches import by_split, evaluated_splits, judged
from lockstep.engine.runtime import Runtime
from lockstep.errors import ConfigError, TaskError


class Line(ls.Task):
    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def dataset(self, split: str) -> Any:
        size = {"train": 8, "val": 4, "val_ood": 5}.get(split)
        return TensorDataset(torch.randn(size, 2)) if size else None

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        return ls.Loss(model(batch[0]).square().sum(), len(batch[0]))


class Judged(Line):
    splits = ("val", "val_ood", "test")


class OodOnly(Line):
    splits = ("val_ood",)


def assembled(task: ls.Task, **keys: Any) -> Any:
    config = ls.TrainConfig(batch_size=4, num_microbatches=2, **keys)
    runtime = Runtime(
        LocalTransport(), torch.device("cpu"), 0, "python", 0, lambda _: None, lambda: None
    )
    return assemble(task, config, runtime)


def test_splits_are_those_that_the_dataset_gives() -> None:
    assert list(assembled(Judged()).evaluations) == ["val", "val_ood"]
    assert list(assembled(Line()).evaluations) == ["val"]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ("val", r"must be a tuple of names, is 'val'; write `splits = \('val',\)`"),
        (["val"], "must be a tuple of names"),
        (("val", 3), "must be a tuple of names"),
        (("train",), "'train': a name must begin with `val`"),
        (("ood",), "'ood': a name must begin with `val`"),
        (("val/ood",), "'val/ood': a name must begin"),
        (("val ood",), "'val ood': a name must begin"),
        (("",), "'': a name must begin"),
        (("val", "test", "val"), "'val': comes twice"),
    ],
)
def test_impossible_names_are_refused(splits: Any, message: str) -> None:
    task = type("Odd", (Line,), {"splits": splits})()
    with pytest.raises(TaskError, match=rf"^Odd\.splits: {message}"):
        evaluated_splits(task)
    with pytest.raises(TaskError, match=message):
        assembled(task)


def test_a_plain_name_is_one_of_val() -> None:
    metrics = {"val": {"loss": 1.0}, "val_ood": {"loss": 2.0, "a/b": 3.0}}
    assert judged(metrics) == {"loss": 1.0, "val_ood/loss": 2.0, "val_ood/a/b": 3.0}
    flat = {f"{split}/{name}": v for split, values in metrics.items() for name, v in values.items()}
    assert by_split(flat | {"test/loss": 4.0, "train/loss": 5.0}) == metrics


@pytest.mark.parametrize("key", ["watch", "convergence"])
def test_metrics_of_all_validation_splits_can_be_watched(key: str) -> None:
    def keys(name: str) -> dict[str, Any]:
        return {key: name if key == "watch" else [{"metric": name, "window": 2}]}

    assembled(Judged(), **keys("val_ood/loss"))
    with pytest.raises(ConfigError, match=r"'val_odd/loss': no such metric.* loss, val_ood/loss"):
        assembled(Judged(), **keys("val_odd/loss"))
    with pytest.raises(ConfigError, match=r"'val_ood/loss': no such metric"):
        assembled(Line(), **keys("val_ood/loss"))
    assembled(OodOnly(), watch="val_ood/loss", early_stopping={"patience": 2})
    with pytest.raises(ConfigError, match="'loss': no such metric; the evaluation has val_ood/l"):
        assembled(OodOnly())
