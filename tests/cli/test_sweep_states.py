"""Whether a run that is there is that of a sweep's point, and what a sweep is sorted by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field
from tests.launching.api import longer_tasks
from tests.launching.api.longer_tasks import Line, LineConfig

import lockstep as ls
from lockstep.cli.start.sweep_grid import state_of
from lockstep.cli.start.sweep_pool import ordered_by, unknown
from lockstep.config import NO_OUTCOME
from lockstep.errors import RunDirectoryError
from lockstep.observe.reading.listing import Summary, chosen


class ReadingConfig(LineConfig):
    """With a key for files, which are no part of the hash."""

    history: str = Field(default="", json_schema_extra=NO_OUTCOME)


class Reading(Line):
    """Reads nothing."""

    Config = ReadingConfig


CONFIG = ReadingConfig(steps=2, history="2024.nc")


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "run"
    ls.train(Reading(CONFIG), CONFIG, run_dir=path, quiet=True)
    return path


def test_a_run_of_the_same_values_is_the_points_own(run: Path) -> None:
    assert state_of(run.with_name("none"), (), CONFIG) == "new"
    for same in ({}, {"log_every": 3}, {"data": {"num_workers": 1}}, {"stop_at_step": 1}):
        assert state_of(run, (), ReadingConfig(**{**CONFIG.model_dump(), **same})) == "completed"
    for length in ({"steps": 5}, {"steps": None, "epochs": 7}):
        config = CONFIG.model_copy(update=length)
        assert state_of(run, (), config) == "of another length"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"history": "2025.nc"}, "history is '2024.nc' there, '2025.nc' here"),
        ({"how": "x", "steps": 5}, "how is '' there, 'x' here"),
        ({"threads": 2}, "threads is 1 there, 2 here"),
        ({"test_on": "last"}, "test_on is 'best' there, 'last' here"),
    ],
)
def test_a_run_of_other_values_is_not(run: Path, other: dict[str, Any], said: str) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        state_of(run, (), CONFIG.model_copy(update=other))
    expected = f"{run}: is a run with other values: {said}; choose another with --dir"
    assert str(caught.value) == expected


def test_a_scripts_run_is_told_by_what_it_was_started_with(run: Path) -> None:
    identity = json.loads((run / "run.json").read_text())
    own = {**identity, "overrides": ["lr=0.1", "history=a", "epochs=2"]}
    (run / "run.json").write_text(json.dumps(own))
    try:
        assert state_of(run, ("lr=0.10", "history=a", "epochs=2"), None) == "completed"
        assert state_of(run, ("lr=0.1", "history=a", "epochs=2", "log_every=1"), None)
        longer = ("lr=0.1", "history=a", "epochs=3")
        assert state_of(run, longer, None) == "of another length"
        for others, said in (
            (("lr=0.1", "history=b"), "history is 'a' there, 'b' here"),
            (("lr=0.1",), "history is 'a' there, not set here"),
            (("lr=0.1", "history=a", "width=3"), "width is not set there, 3 here"),
        ):
            with pytest.raises(RunDirectoryError, match=said):
                state_of(run, others, None)
    finally:
        (run / "run.json").write_text(json.dumps(identity))


def test_a_sweep_refuses_runs_of_other_fixed_values(here: Any, tmp_path: Path) -> None:
    task = f"{longer_tasks.__file__}:Line"
    done = here("train", task, "lr=0.1", "steps=1", "--run-dir", "s/lr=0.1", "-q")
    assert done.returncode == 0, done.stderr
    sweep = ("sweep", task, "lr=0.1,0.2", "--dir", "s", "--dry-run")
    done = here(*sweep, "steps=1", "clip_norm=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "s/lr=0.1: is a run with other values: clip_norm is None there, 2.0 here" in done.stderr
    done = here(*sweep, "steps=2", "log_every=1", "--metric", "-val/loss")
    assert done.stdout == "to train: lr=0.1 (of another length)\nto train: lr=0.2 (new)\n"


def summary(name: str, config: dict[str, Any], **metrics: float) -> Summary:
    run = Summary(Path(name), metrics={k.replace("_", "/", 1): v for k, v in metrics.items()})
    run.__dict__["config"] = config
    return run


def test_what_a_sweep_is_sorted_by() -> None:
    most = {"watch": "accuracy", "watch_mode": "max", "lr": 0.1}
    runs = [
        summary("a", most, val_accuracy=0.9, val_loss=0.5, test_top5=0.1),
        summary("b", most, val_accuracy=0.8, val_loss=0.4, test_top5=0.2),
    ]
    for metric, expected in {
        None: ("val/accuracy", True),
        "accuracy": ("val/accuracy", True),
        "-accuracy": ("val/accuracy", True),
        "val/accuracy": ("val/accuracy", True),
        "loss": ("val/loss", False),
        "-val/loss": ("val/loss", True),
        "-test/top5": ("test/top5", True),
        "nothing": ("val/nothing", False),
        "seconds": ("seconds", False),
        "-lr": ("lr", True),
    }.items():
        assert ordered_by(runs, metric) == expected
    names = [run.path.name for run in chosen(runs, [], "-test/top5")]
    assert names == ["b", "a"]
    assert ordered_by([], None) == ("val/loss", False)
    assert ordered_by([summary("a", {"watch": "val_ood/f1"})], None) == ("val_ood/f1", False)


def test_metrics_are_named_where_none_was_chosen() -> None:
    runs = [summary("a", {}, val_loss=1.0), summary("b", {}, train_loss=1.0)]
    expected = "no run has val/x: choose another --metric: train/loss, val/loss"
    assert unknown(runs, "val/x") == expected
    assert unknown(runs, "val/loss") == unknown([], "val/x") == unknown(runs, "seconds") == ""
