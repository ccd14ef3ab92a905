"""Metrics of torchmetrics: on any number of ranks what they are on the whole split at once."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.thread_transport import on_ranks
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep as ls
from lockstep.comm.transport import LocalTransport, Transport
from lockstep.engine.evaluation.batches import Scores, evaluation_batches
from lockstep.engine.evaluation.evaluation import Evaluation
from lockstep.engine.passes.compute import Compute
from lockstep.errors import TaskError

tm = pytest.importorskip("torchmetrics")
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:Metric .* will save all:UserWarning")
CLASSES = 4
X = torch.randn(103, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(CLASSES, (103,), generator=torch.Generator().manual_seed(2))


def everything() -> dict[str, Any]:
    of_classes: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
    return {
        "f1": tm.F1Score(**of_classes, average="macro"),
        "f1_of_classes": tm.F1Score(**of_classes, average="none"),
        "auroc": tm.AUROC(**of_classes),
        "auroc_binned": tm.AUROC(**of_classes, thresholds=20),
        "confusion": tm.ConfusionMatrix(**of_classes),
        "roc": tm.ROC(task="binary", thresholds=5),
        "perplexity": tm.text.Perplexity(),
        "mean": tm.MeanMetric(),
        "max": tm.MaxMetric(),
        "min": tm.MinMetric(),
        "all": tm.CatMetric(),
        "mse": tm.MeanSquaredError(),
    }


def updates_of(logits: Tensor, y: Tensor) -> dict[str, Any]:
    probabilities = logits.softmax(1)
    first = probabilities[:, 0]
    return {
        **dict.fromkeys(("f1", "f1_of_classes", "confusion"), (logits.argmax(1), y)),
        "auroc": {"preds": probabilities, "target": y},
        "auroc_binned": {"target": y, "preds": probabilities},
        "roc": (first, (y == 0).int()),
        "perplexity": [logits[None], y[None]],
        **dict.fromkeys(("mean", "max", "min", "all"), first),
        "mse": (first, y.float()),
    }


class Classifier(ls.Task):
    def build_model(self) -> nn.Module:
        return nn.Linear(6, CLASSES)

    def dataset(self, split: str) -> Any:
        return TensorDataset(X, Y)

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        x, y = batch
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
        return ls.Loss(loss, len(y), updates=updates_of(logits, y))

    def metrics(self) -> Any:
        return everything()


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


MODEL = nn.Linear(6, CLASSES)


def model() -> nn.Module:
    return copy.deepcopy(MODEL)


def evaluated(task: ls.Task, transport: Transport, dataset: Any = None) -> Scores:
    config, net = ls.TrainConfig(), model()
    data = TensorDataset(X, Y) if dataset is None else dataset
    evaluation = Evaluation(task, evaluation_batches(task, "val", data, 8, CPU, 0))
    return evaluation.run(transport, net, Compute(task, net, config, CPU))


@pytest.fixture(scope="module")
def alone() -> Scores:
    return evaluated(Classifier(), LocalTransport())


@pytest.mark.parametrize("num_ranks", [2, 3, 15])
@pytest.mark.parametrize("dataset", [None, Streamed()], ids=["indexed", "streamed"])
def test_same_bits_on_any_number_of_ranks(alone: Scores, num_ranks: int, dataset: Any) -> None:
    for scores in on_ranks(num_ranks, lambda t: evaluated(Classifier(), t, dataset)):
        assert repr(scores) == repr(alone)


def test_results_are_those_of_the_whole_split_at_once(alone: Scores) -> None:
    expected = everything()
    with torch.no_grad():
        for name, arguments in updates_of(model()(X), Y).items():
            if isinstance(arguments, dict):
                expected[name].update(**arguments)
            elif isinstance(arguments, Tensor):
                expected[name].update(arguments)
            else:
                expected[name].update(*arguments)
    for name, metric in expected.items():
        result = metric.compute()
        if isinstance(result, Tensor) and result.dim() == 0:
            assert alone.metrics[name] == pytest.approx(float(result), rel=1e-5), name
        else:
            assert name not in alone.metrics
            theirs = result if isinstance(result, Tensor) else torch.stack(result)
            torch.testing.assert_close(
                torch.tensor(alone.arrays[name]), theirs * 1.0, check_dtype=False
            )
    assert torch.tensor(alone.arrays["confusion"]).sum() == len(Y)
    assert sorted(alone.arrays) == ["all", "confusion", "f1_of_classes", "roc"]


def own(metrics: Any, updates: Any, **methods: Any) -> Any:
    def evaluate(self: Any, net: nn.Module, batch: Any) -> ls.Loss:
        return ls.Loss(net(batch[0]).sum(), 1, {"known": (1, 1)}, updates=updates)

    return type("Own", (Classifier,), {"metrics": lambda self: metrics, "evaluate": evaluate})()


def custom(reduction: Any, default: Any = None, **attributes: Any) -> Any:
    class Custom(tm.Metric):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            start = torch.zeros(()) if default is None else default
            self.add_state("total", start, dist_reduce_fx=reduction)
            self.seen = 0

        def update(self, value: Any) -> None:
            self.seen += attributes.get("counts", 0)
            self.total = self.total + value

        def compute(self) -> Any:
            if attributes.get("fails"):
                raise ValueError("too few")
            return self.total

    return Custom()


@pytest.mark.parametrize(
    ("metrics", "updates", "message"),
    [
        ([tm.MeanMetric()], {}, "must return a dict of names"),
        ({"a": 3}, {"a": 1}, "'a': must be a torchmetrics.Metric, is a int"),
        ({"a": torch.nn.Linear(1, 1)}, {"a": 1}, "'a': must be a torchmetrics.Metric, is a Linear"),
        ({"a": tm.MetricCollection([tm.MeanMetric()])}, {}, "is a MetricCollection"),
        ({"a": tm.MinMaxMetric(tm.MeanMetric())}, {}, "'a': a MinMaxMetric has a metric in"),
        ({"a": tm.MeanMetric() + 1}, {}, "'a': a CompositionalMetric has a metric in"),
        ({"a": tm.PearsonCorrCoef()}, {}, r"state 'mean_x' of a Pearson.* dist_reduce_fx=None"),
        ({"a": custom(lambda x: x)}, {}, "state 'total' of a Custom has dist_reduce_fx=<function"),
        ({"a": custom("sum", torch.ones(()))}, {}, "state 'total' of a Custom begins at 1"),
        ({"a": custom("sum", counts=1)}, {"a": 1}, "'a': update changes Custom.seen, which is no"),
        ({"a": custom("sum", fails=True)}, {"a": 1}, "'a': compute failed: too few"),
        ({"a": tm.MeanMetric()}, {}, r"names in Task.metrics, \['a'\]; is \[\]"),
        ({"a": tm.MeanMetric()}, {"a": 1, "b": 2}, r"\['a'\]; is \['a', 'b'\]"),
        ({}, {"b": 2}, r"\[\]; is \['b'\]"),
        ({"a": tm.MeanMetric()}, [1], r"\['a'\]; is \[1\]"),
        ({"a": tm.F1Score(task="binary")}, {"a": 1}, "update of metric 'a' failed"),
        ({"known": tm.MeanMetric()}, {"known": 1.0}, "'known' is the name of a metric of Loss.met"),
        ({"loss": tm.MeanMetric()}, {"loss": 1.0}, "'loss' is the name of a metric of Loss.metri"),
    ],
)
def test_what_cannot_be_combined_is_named(metrics: Any, updates: Any, message: str) -> None:
    with pytest.raises(TaskError, match=rf"^Task\.(metrics|evaluate): .*{message}"):
        evaluated(own(metrics, updates), LocalTransport())


def test_means_of_states_are_means_over_batches() -> None:
    task = own({"a": custom("mean")}, {"a": 3.0})
    assert evaluated(task, LocalTransport()).metrics["a"] == 3.0


def test_a_list_that_nothing_was_added_to_stays_empty() -> None:
    class Listed(tm.Metric):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("rows", [], dist_reduce_fx="cat")

        def update(self, rows: Tensor) -> None:
            if len(rows):
                self.rows.append(rows)

        def compute(self) -> Any:
            return sum(len(rows) for rows in self.rows)

    class Sometimes(Classifier):
        def metrics(self) -> Any:
            return {"rows": Listed()}

        def evaluate(self, net: nn.Module, batch: Any) -> ls.Loss:
            rows = torch.ones(int(batch[1][0] == 2), 3, dtype=torch.bool)
            return ls.Loss(net(batch[0]).sum(), 1, updates={"rows": rows})

    expected = float((Y[::8] == 2).sum())
    found = on_ranks(3, lambda t: evaluated(Sometimes(), t).metrics["rows"])
    assert list(found) == [expected] * 3
    none = own({"rows": Listed()}, {"rows": torch.ones(0, 3)})
    assert list(on_ranks(2, lambda t: evaluated(none, t).metrics["rows"])) == [0.0, 0.0]


def test_a_metric_of_states_can_be_watched_and_arrays_are_in_the_files(tmp_path: Path) -> None:
    from lockstep.launching.api import Session, run

    class Watching(Classifier):
        def dataset(self, split: str) -> Any:
            return TensorDataset(X, Y) if split != "test" else None

        def metrics(self) -> Any:
            chosen = ("f1", "confusion", "roc")
            return {name: metric for name, metric in everything().items() if name in chosen}

        def evaluate(self, net: nn.Module, batch: Any) -> ls.Loss:
            loss = self.loss(net, batch)
            updates = {name: loss.updates[name] for name in self.metrics()}
            return ls.Loss(loss.sum, loss.weight, updates=updates)

    config = ls.TrainConfig(steps=2, batch_size=32, watch="f1", watch_mode="max", lr=0.1)
    finished = run(Watching(config), config, Session(str(tmp_path / "run"), console=False))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["metrics"]["val/f1"] == finished.metrics["val/f1"]
    assert sum(map(sum, result["arrays"]["val/confusion"])) == len(Y)
    assert result["arrays"] == finished.arrays
    header = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    assert ",f1" in header
    assert "confusion" not in header
    events = [json.loads(x) for x in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    [evaluation] = [event for event in events if event["event"] == "Evaluated"]
    assert evaluation["arrays"].keys() == {"confusion", "roc"}
    assert math.isfinite(evaluation["metrics"]["f1"])
