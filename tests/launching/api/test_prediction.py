"""Plans beside runs: read before training, and compared with what steps have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import target
from tests.distributed.tasks import EverythingConfig
from tests.launching.api.test_train import Line, config

import lockstep as ls
from lockstep.config import override
from lockstep.engine.faults import PlannedFault, to_env
from lockstep.errors import ConfigError
from lockstep.launching.api import predicted
from lockstep.launching.api.session import predicted_for_joiner
from lockstep.observe import StepCost, read_events, read_result
from lockstep.planning.measurements import Anatomy, Facts, Network, Timed
from lockstep.planning.plan import Plan, make_plan
from lockstep.planning.prediction import Layout
from lockstep.planning.profile import write_json

KEYS = ("steps=24", "log_every=2")


def plan_of(of: ls.TrainConfig, ranks: Sequence[int] = (1, 2, 3), **facts: Any) -> Plan:
    """A plan as `lockstep plan` makes it, of made-up measurements."""
    values: dict[str, Any] = {
        "task": "line", "overrides": (), "config_hash": of.hash, "measured_at": 0.0,
        "versions": {}, "host": "h", "cores": 4, "memory_bytes": 1 << 34, "launcher": "local",
        "batch_size": of.batch_size, "num_microbatches": of.num_microbatches, "total_steps": 24,
        "buddy": False, "groups": (), "messages": (), "group_bytes": 1 << 20,
        "anatomy": Anatomy(2, 8, 8, 8, 2, 1, True, False),
        "timed": (Timed(1, 1, 1, 1, 0.01, 1 << 28), Timed(8, 1, 1, 1, 0.08, 1 << 28),
                  Timed(4, 1, 2, 1, 0.05, 1 << 28)),
        "start_s": 1.0, "checkpoint_bytes": 1000, "checkpoint_s": 0.01, "write_s": 0.1,
    }  # fmt: skip
    made = Facts(**values | facts)
    return make_plan(made, Network([], 4), ranks, 4, 10_000.0)


def said_by(plan: Plan, layout: Layout, path: str) -> dict[str, Any]:
    row = plan.find(layout)
    assert row is not None
    way = row.prediction
    return {"step_s": way.step_s, "peak_bytes": way.peak_bytes, "by": path}


def with_plan(folder: Path, plan: Plan | None = None, **keys: Any) -> ls.TrainConfig:
    """The config of a short training with a file that holds a plan of it, or another one."""
    keys = {"steps": 24, "log_every": 2} | keys
    path = folder / "plan.json"
    write_json(path, plan or plan_of(config(**keys)))
    return config(plan=str(path), **keys)


def reports_of(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_events(run_dir / "events.jsonl") if row["event"] == "StepDone"]


def test_a_run_keeps_what_its_plan_says_beside_what_steps_cost(tmp_path: Path) -> None:
    of = with_plan(tmp_path)
    assert of.hash == config(steps=24, log_every=2).hash
    ls.train(Line(), of, run_dir=tmp_path / "run", quiet=True)
    result = read_result(tmp_path / "run")
    assert result["predicted"] == said_by(plan_of(of), Layout(1), of.plan)
    assert result["predicted_reason"] == ""
    reports = reports_of(tmp_path / "run")
    assert result["measured"]["peak_bytes"] == max(r["ranks"][0]["peak_bytes"] for r in reports)
    times = [r["seconds"] / r["num_steps"] for r in reports[1:]]
    assert min(times) / 10 < result["measured"]["step_s"] <= max(times)


def test_without_a_plan_the_first_ten_steps_after_a_report_predict(tmp_path: Path) -> None:
    ls.train(Line(), config(steps=24, log_every=2), run_dir=tmp_path / "run", quiet=True)
    result = read_result(tmp_path / "run")
    first: list[dict[str, Any]] = []
    for row in reports_of(tmp_path / "run")[1:]:
        first += [row] if sum(r["num_steps"] for r in first) < 10 else []
    assert result["predicted"]["by"] == "the first reports"
    assert result["predicted"]["peak_bytes"] == max(r["ranks"][0]["peak_bytes"] for r in first)
    times = [(r["seconds"] - r["ranks"][0]["checkpoint_s"]) / r["num_steps"] for r in first]
    assert min(times) / 2 < result["predicted"]["step_s"] <= max(times)


def test_too_few_reports_say_nothing(tmp_path: Path) -> None:
    ls.train(Line(), config(steps=4, log_every=2), run_dir=tmp_path / "run", quiet=True)
    result = read_result(tmp_path / "run")
    assert (result["measured"], result["predicted"]) == (None, None)
    assert result["predicted_reason"] == "too few steps on 1 rank"


def test_a_plan_of_another_config_is_named_and_does_not_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    of = with_plan(tmp_path, plan_of(config(steps=23)))
    ls.train(Line(), of, run_dir=tmp_path / "run")
    result = read_result(tmp_path / "run")
    assert result["predicted"]["by"] == "the first reports"
    assert f"is of config {config(steps=23).hash}" in result["predicted_reason"]
    assert "warning" in capfd.readouterr().out


def test_a_plan_without_the_layout_is_named_and_predicts_nothing(tmp_path: Path) -> None:
    plan = plan_of(config(steps=24, log_every=2), [2])
    ls.train(Line(), with_plan(tmp_path, plan), run_dir=tmp_path / "run", quiet=True)
    result = read_result(tmp_path / "run")
    assert result["predicted"] is None
    assert result["predicted_reason"].endswith("plan.json has no row for 1 rank (mesh 1x1x1)")
    assert result["measured"]["step_s"] > 0


@pytest.mark.parametrize(
    ("keys", "num_ranks", "layout"),
    [
        ({}, 1, Layout(1)),
        ({"sharding": "gradients"}, 1, Layout(1)),
        ({"sharding": "gradients"}, 2, Layout(2, sharding="gradients")),
        ({"optimizer": {"sharded": True}}, 3, Layout(3, sharding="optimizer")),
        ({"mesh": {"pp": 2}}, 2, Layout(2, pp=2)),
        ({}, 4, None),
        ({"mesh": {"pp": 2}}, 3, None),
    ],
)
def test_the_row_of_a_run_is_that_of_its_layout(
    tmp_path: Path, keys: dict[str, Any], num_ranks: int, layout: Layout | None
) -> None:
    of = with_plan(tmp_path, **keys)
    said = predicted(of, num_ranks)
    assert said is not None
    if layout is None:
        assert said.cost is None
        assert f"no row for {num_ranks} ranks" in said.reason
        return
    expected = said_by(plan_of(of), layout, of.plan)
    assert said.cost == StepCost(expected["step_s"], expected["peak_bytes"])
    assert (said.by, said.reason) == (of.plan, "")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("", "is no plan"),
        ("{", "is no plan"),
        ('{"format": "lockstep plan", "version": 99}', "this Lockstep reads version"),
        ("[1]", "not a JSON object"),
    ],
)
def test_a_file_that_is_no_plan_is_told_before_training(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        ls.train(Line(), config(steps=4, plan=str(path)), run_dir=tmp_path / "run", quiet=True)
    message = str(caught.value)
    for part in ("plan=", str(path), problem, "lockstep plan TASK --json FILE", "plan='\"\"'"):
        assert part in message
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        predicted(config(plan=str(tmp_path)), 1)


def test_a_joiner_is_told_what_is_wrong_with_a_plan_and_joins(tmp_path: Path) -> None:
    said = predicted_for_joiner(config(plan="no.json"), 2)
    assert said is not None
    assert (said.cost, said.by) == (None, "")
    assert "plan='no.json': no.json: cannot be read" in said.reason
    good = with_plan(tmp_path)
    assert predicted_for_joiner(good, 2) == predicted(good, 2)
    assert predicted_for_joiner(config(), 2) is None


@pytest.mark.parametrize("num_ranks", ["1", "2"])
def test_the_command_says_what_is_wrong_with_a_plan(
    lockstep: Any, tmp_path: Path, num_ranks: str
) -> None:
    done = lockstep("train", target(), "-n", num_ranks, "--run-dir", "run", "plan=no.json")
    assert done.returncode == 2
    assert done.stderr.startswith("error: plan='no.json': no.json: cannot be read: No such file")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_resume_keeps_the_plan_and_reads_it_again(lockstep: Any, tmp_path: Path) -> None:
    of = override(EverythingConfig(), KEYS)
    write_json(tmp_path / "plan.json", plan_of(of))
    arguments = ("train", target(), "--run-dir", "run", *KEYS, "plan=plan.json")
    done = lockstep(*arguments, "stop_at_step=12")
    assert done.returncode == 0, done.stderr
    first = read_result(tmp_path / "run")
    assert first["predicted"] == said_by(plan_of(of), Layout(1), "plan.json")
    assert "predicted by plan.json" in done.stdout

    (tmp_path / "plan.json").rename(tmp_path / "other.json")
    gone = lockstep("resume", "run")
    assert gone.returncode == 2
    assert "plan='plan.json': plan.json: cannot be read" in gone.stderr
    assert read_result(tmp_path / "run") == first

    done = lockstep("resume", "run", "-n", "2", "--launcher", "local", "plan=other.json")
    assert done.returncode == 0, done.stderr
    second = read_result(tmp_path / "run")
    assert second["predicted"] == said_by(plan_of(of), Layout(2), "other.json")

    done = lockstep("resume", "run", 'plan=""')
    assert done.returncode == 0, done.stderr
    third = read_result(tmp_path / "run")
    for key in ("measured", "predicted", "predicted_reason"):  # it was complete before
        assert third[key] == second[key]


@pytest.mark.slow
def test_the_prediction_outlives_rank_0(lockstep: Any, tmp_path: Path) -> None:
    of = override(EverythingConfig(), KEYS)
    write_json(tmp_path / "plan.json", plan_of(of))
    faults = to_env([PlannedFault(0, 17)], tmp_path / "faults")
    done = lockstep(
        "train", target(), "-n", "3", "--launcher", "local", "--run-dir", "run", *KEYS,
        "plan=plan.json", **faults,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "run")
    assert result["world_size"] == 2
    assert result["predicted"] == said_by(plan_of(of), Layout(3), "plan.json")
    rows = read_events(tmp_path / "run" / "events.jsonl")
    assert [r["event"] for r in rows].count("Measured") == 1
    whole = [r for r in rows if r["event"] == "StepDone" and len(r["ranks"]) == 3]
    peak = max(rank["peak_bytes"] for row in whole for rank in row["ranks"])
    assert result["measured"]["peak_bytes"] == peak
    assert "predicted by plan.json" in done.stdout


@pytest.mark.slow
def test_of_ranks_of_which_one_dies_before_training_only_the_others_are_told(
    lockstep: Any, tmp_path: Path
) -> None:
    """They start over, and read again what the plan predicts for so many."""
    of = override(EverythingConfig(), [*KEYS, "evil=death"])
    write_json(tmp_path / "plan.json", plan_of(of, [1]))
    done = lockstep(
        "train", target(), "-n", "3", "--launcher", "local", "--run-dir", "run", *KEYS,
        "evil=death", "plan=plan.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_result(tmp_path / "run")["world_size"] == 2
    rows = read_events(tmp_path / "run" / "events.jsonl")
    warned = [row["message"] for row in rows if row["event"] == "Warned"]
    assert [m for m in warned if m.startswith("plan.json")] == [
        "plan.json has no row for 2 ranks (mesh 2x1x1)"
    ]


def test_what_a_run_says_of_itself_is_in_its_events(tmp_path: Path) -> None:
    of = with_plan(tmp_path)
    ls.train(Line(), of, run_dir=tmp_path / "run", quiet=True)
    rows = read_events(tmp_path / "run" / "events.jsonl")
    kinds = [row["event"] for row in rows]
    assert kinds.index("Predicted") < kinds.index("RunStarted")
    assert kinds[-2:] == ["Measured", "Finished"]
    result = read_result(tmp_path / "run")
    assert rows[-2]["measured"] == result["measured"]
    assert rows[-2]["predicted"] | {"by": of.plan} == result["predicted"]


def test_a_plan_with_hostile_names_is_shown_as_text(tmp_path: Path) -> None:
    made = plan_of(config(steps=24))
    evil = replace(made, facts=replace(made.facts, config_hash="\x1b[31m" + "x" * 9999))
    said = predicted(with_plan(tmp_path, evil), 1)
    assert said is not None
    assert "\x1b" not in said.reason
    assert len(said.reason) < 1000
