"""What simple models reach beside a trained one: `lockstep eval --baselines` and reports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config import TrainConfig
from lockstep.data.images import embedded_digits, simple_classifiers
from lockstep.observe.baselines import Beside, beside_baselines, keep, kept, table
from lockstep.systems.hrm.config import HrmConfig
from lockstep.systems.hrm.puzzles import puzzles_of
from lockstep.systems.hrm.reports.rules import simple_answers
from lockstep.systems.sketched.task import Sketched, SketchedConfig
from lockstep.systems.ufs.model import simple_models

TASK = """
import torch, lockstep as ls
from torch.utils.data import TensorDataset
class Line(ls.Task):
    def build_model(self): return torch.nn.Linear(1, 1)
    def dataset(self, split):
        x = torch.arange(12.0)[:, None]
        return TensorDataset(x, x + 1) if split in ("train", "val", "test") else None
    def loss(self, model, batch):
        return ls.Loss.mean(((model(batch[0]) - batch[1]) ** 2).mean(), len(batch[0]))
class Compared(Line):
    def baselines(self, model, split):
        losses = {"a constant": 1e9, "the law (limit)": 0.0, "x + 1": 0.0}
        return {name: {"loss": loss} for name, loss in losses.items()}
"""


def test_a_run_is_put_beside_what_its_task_names(here: Any, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASK)
    for name in ("Line", "Compared"):
        keys = ("steps=3", "batch_size=4", "num_microbatches=2", "lr=1e-4")
        done = here("train", f"tasks.py:{name}", *keys, "--run-dir", name)
        assert done.returncode == 0, done.stderr
    done = here("eval", "Compared", "--baselines")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.partition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == ["test,", "a", "the", "x", "the", "better"]
    assert lines[-1].endswith(": x + 1 (0)"), "what no model can beat is no rival"
    assert here("report", "Compared").returncode == 0
    page = (tmp_path / "Compared" / "report.html").read_text()
    assert "Beside simple models" in page
    assert lines[-1] in page
    assert "Beside simple models" not in _report(here, tmp_path, "Line")
    done = here("eval", "Compared", "lr=2", "--baselines")
    assert (done.returncode, "leave lr=2 out" in done.stderr) == (2, True)
    done = here("eval", "Line", "--baselines")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "line names no simple models; define baselines(self, model, split)" in done.stderr


def _report(here: Any, tmp_path: Path, run: str) -> str:
    assert here("report", run).returncode == 0
    return (tmp_path / run / "report.html").read_text()


def test_the_watched_metric_says_which_is_better_if_both_have_it(tmp_path: Path) -> None:
    config = TrainConfig(watch="accuracy", watch_mode="max")
    found = {"neighbours": {"accuracy": 0.9}, "chance": {"accuracy": 0.1, "loss": 0.1}}
    beside = beside_baselines(found, {"loss": 0.2, "accuracy": 0.8, "more": 1.0}, "val", 7, config)
    assert beside.better == {"neighbours": 0.9}
    assert table(beside)[0].split() == ["val,", "step", "7", "accuracy", "loss"]
    other = beside_baselines({"chance": {"loss": 0.1}}, {"loss": 0.2}, "test", 7, config)
    assert (other.by, other.better) == ("loss", {"chance": 0.1})
    for one in (beside, other):
        keep(one, tmp_path)
    assert kept(tmp_path) == [other, beside]
    (tmp_path / "baselines_val.json").write_text('{"rows": {"a": ')
    (tmp_path / "baselines_x.json").write_text(json.dumps(beside._asdict() | {"rows": {}}))
    assert kept(tmp_path) == [other]
    best = Beside("val", 7, "loss", "min", {"a": {"loss": 1.0}, "the model": {"loss": 0.5}})
    assert best.verdict == "no simple model has a better loss than the model (0.5)"
    nothing = beside_baselines(
        {"chance": {"accuracy": 0.1}}, {"loss": 0.2}, "val", 7, TrainConfig()
    )
    assert nothing.verdict == "not compared: no simple model has a loss"
    broken = beside_baselines({"chance": {"loss": 3.0}}, {"loss": math.nan}, "val", 7, config)
    assert broken.verdict == "better loss than the model (nan): chance (3)"


def test_simple_classifiers_of_digits() -> None:
    images, labels = embedded_digits()
    found = simple_classifiers((images[:300], labels[:300]), (images[300:600], labels[300:600]))
    assert found["the commonest class"]["accuracy"] < 0.2
    assert found["logistic regression"]["accuracy"] > 0.8
    assert found["5 nearest neighbours"]["accuracy"] > 0.8


@pytest.mark.slow
def test_networks_without_sketches_have_no_more_parameters() -> None:
    task = Sketched(SketchedConfig(low_rank=8, epochs=1, hidden=(64, 32)))
    model = task.build_model()
    most = sum(p.numel() for p in model.parameters())
    found = task.baselines(model, "test")
    for name in ("narrower", "one hidden layer", "low rank"):
        row = next(row for row in found if row.startswith(f"{name}, "))
        assert most / 2 < int(row.split()[-2].replace(",", "")) <= most
        assert found[row]["accuracy"] > found["the commonest class"]["accuracy"]


@pytest.mark.parametrize(("puzzle", "size"), [("sudoku", 4), ("maze", 8)])
def test_a_search_solves_what_copies_and_majorities_do_not(puzzle: Any, size: int) -> None:
    config = HrmConfig(puzzle=puzzle, size=size, num_train=60, num_val=20)
    splits = puzzles_of(config)
    found = simple_answers(splits["train"], splits["val"])
    by_rules = found.pop(next(name for name in found if name.endswith("(limit)")))
    assert by_rules == {"exact": 1.0, "token_accuracy": 1.0}
    assert all(row["exact"] < 0.5 for row in found.values())
    copied = (splits["val"].inputs == splits["val"].labels).float().mean()
    assert found["the question, copied"]["token_accuracy"] == pytest.approx(float(copied))
    itself = simple_answers(splits["train"], splits["train"])
    assert itself["the nearest training puzzle"]["exact"] == 1.0


def test_logistic_regression_finds_a_logistic_law_and_trees_what_is_not_linear() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 3))
    law = 1 / (1 + np.exp(-(x @ [2.0, -1.0, 0.5] + 0.3)))
    found = _predicted(np.column_stack([x, law])[:400], x[400:])
    errors = {n: np.abs(v[:, 0] - law[400:]).max() for n, v in found.items()}
    assert errors["logistic regression"] < 1e-5 < errors["linear regression"] < errors["the mean"]
    law = 1 / (1 + np.exp(x[:, 0] * x[:, 1] - x[:, 2] ** 2))[:, None]
    found = _predicted(np.column_stack([x, law])[:400], x[400:])
    errors = {n: np.abs(v[:, 0] - law[400:, 0]).max() for n, v in found.items()}
    assert errors["logistic regression"] > 0.1
    assert errors["logistic regression, squares and products"] < 1e-3
    bent = np.where(np.abs(x[:, 0]) > 1, 0.9, 0.1)
    found = _predicted(np.column_stack([x, bent])[:400], x[400:])
    squared = {n: np.square(v[:, 0] - bent[400:]).mean() for n, v in found.items()}
    assert squared["gradient-boosted trees"] < 0.2 * squared["logistic regression"]
    assert torch.isfinite(torch.tensor([*squared.values()])).all()


def _predicted(train: Any, x: Any) -> dict[str, Any]:
    return {name: model(x) for name, model in simple_models(train, 3, ["aice"]).items()}
