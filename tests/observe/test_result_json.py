from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from sample_events import Recorder, finished, full_disk, run_started, step_done

from lockstep.engine.events import Failed, Warned
from lockstep.errors import RunDirectoryError
from lockstep.observe import Measured, Sinks, StepCost, read_result
from lockstep.observe.storing.jsonl import EventsJsonl
from lockstep.observe.storing.result import ResultJson, cost_of


def test_a_finished_run(tmp_path: Path) -> None:
    path = tmp_path / "ergebnis-é" / "result.json"
    sink = ResultJson(path, clock=lambda: 0.0)
    sink(run_started())
    sink(step_done(500))
    assert not path.exists()
    arrays = {"val/matrix": [[1, 2], [3, math.nan]]}
    metrics = {"accuracy": 0.97, "gap": math.inf}
    sink(finished(500, metrics=metrics, arrays=arrays, checkpoint="c/step_500"))
    result = read_result(path.parent)
    assert result == {
        "status": "completed",
        "reason": "",
        "step": 500,
        "params_sha256": "ab" * 32,
        "metrics": {"accuracy": 0.97, "gap": math.inf},
        "arrays": {"val/matrix": [[1, 2], [3, "NaN"]]},
        "world_size": 4,
        "wall_s": 65.0,
        "task": "digits",
        "config_hash": "0123456789abcdef",
        "run_dir": "/runs/grün",
        "finished_at": "1970-01-01T00:00:00+00:00",
        "exit_code": 0,
        "error": None,
        "checkpoint": "c/step_500",
        "test_step": None,
        "measured": None,
        "predicted": None,
        "predicted_reason": "",
    }
    assert os.listdir(path.parent) == ["result.json"]
    assert json.loads(path.read_text())["metrics"]["gap"] == "Infinity"


def test_a_process_that_has_joined_nobody_says_how_far_the_run_had_come(tmp_path: Path) -> None:
    events = EventsJsonl(tmp_path / "events.jsonl")
    for event in (run_started(), step_done(6), step_done(7)):
        events(event)
    events.close()
    sink = ResultJson(tmp_path / "result.json")
    sink(Failed(step=0, error="RankLostError", message="nobody is left to go on from"))
    assert read_result(tmp_path)["step"] == 7


@pytest.mark.parametrize("failed_step", [0, 7])
def test_a_failed_run(tmp_path: Path, failed_step: int) -> None:
    times = iter([0.0, 100.0, 107.5])
    sink = ResultJson(tmp_path / "result.json", clock=lambda: next(times))
    sink(run_started())
    sink(step_done(7))
    message = "step 7: the loss is NaN"
    sink(Failed(step=failed_step, error="NonFiniteError", message=message, exit_code=2))
    result = read_result(tmp_path / "result.json")
    assert (result["status"], result["step"], result["wall_s"]) == ("failed", 7, 7.5)
    assert (result["error"], result["exit_code"]) == ("NonFiniteError", 2)
    assert result["reason"] == message
    assert result["params_sha256"] is None


def test_a_run_that_was_complete_before_keeps_its_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    first = ResultJson(path, clock=lambda: 0.0)
    first(run_started())
    first(finished(500, metrics={"train/loss": 0.5}))
    before = read_result(path)
    again = ResultJson(path, clock=lambda: 7.0)
    again(run_started(step=500, world_size=1, run_dir="moved"))
    assert not path.exists()
    again(finished(500, metrics={}, world_size=1))
    assert read_result(path) == {**before, "run_dir": "moved"}
    other = ResultJson(path, clock=lambda: 7.0)
    other(run_started(step=400))
    other(finished(500, metrics={}))
    assert read_result(path)["metrics"] == {}


COST = Measured(
    step=500, measured=StepCost(0.5, 7), predicted=StepCost(0.25, 6), by="plan.json", reason="why"
)


def test_what_steps_have_cost_is_beside_what_was_predicted(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for cost in (COST, Measured(step=500, measured=StepCost(0.5, 7), predicted=None, reason="why")):
        sink = ResultJson(path)
        sink(run_started())
        sink(cost)
        sink(finished(500))
        result = read_result(path)
        predicted = {"step_s": 0.25, "peak_bytes": 6, "by": "plan.json"}
        assert result["measured"] == {"step_s": 0.5, "peak_bytes": 7}
        assert result["predicted"] == (predicted if cost.predicted else None)
        assert result["predicted_reason"] == "why"
        read = cost_of(result)
        assert read is not None
        assert (read.measured, read.by, read.reason) == (cost.measured, cost.by, cost.reason)
        assert (read.predicted is None) == (cost.predicted is None)
    assert read_result(path)["predicted"] is None


def test_a_run_that_was_complete_before_keeps_what_its_steps_have_cost(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    first = ResultJson(path)
    for event in (run_started(), COST, finished(500)):
        first(event)
    before = read_result(path)
    again = ResultJson(path)
    nothing = Measured(step=500, measured=None, predicted=None, reason="no report")
    for event in (run_started(step=500), nothing, finished(500)):
        again(event)
    after = read_result(path)
    for key in ("measured", "predicted", "predicted_reason"):
        assert after[key] == before[key]


def test_a_failed_run_tells_what_its_steps_have_cost(tmp_path: Path) -> None:
    sink = ResultJson(tmp_path / "result.json")
    for event in (run_started(), COST, Failed(step=7, error="E", message="m")):
        sink(event)
    assert read_result(tmp_path)["measured"] == {"step_s": 0.5, "peak_bytes": 7}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("measured", {"step_s": 0.5}), ("measured", {"step_s": "0.5", "peak_bytes": 7}),
        ("measured", {"step_s": math.nan, "peak_bytes": 7}), ("measured", 0.5),
        ("measured", {"step_s": -1.0, "peak_bytes": 7}), ("predicted", []),
        ("measured", {"step_s": 0.5, "peak_bytes": 7.5}), ("predicted_reason", None),
        ("predicted", {"step_s": 0.5, "peak_bytes": 7}),
        ("predicted", {"step_s": 0.5, "peak_bytes": 7, "by": 1}),
        ("predicted", {"step_s": 0.5, "peak_bytes": 7, "by": "p", "more": 1}),
    ],
)  # fmt: skip
def test_costs_that_nobody_has_written_are_damage(tmp_path: Path, key: str, value: Any) -> None:
    ResultJson(tmp_path / "result.json")(finished())
    result = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(result | {key: value}))
    with pytest.raises(RunDirectoryError, match=f"is damaged: {key}"):
        read_result(tmp_path)


def test_a_result_of_an_older_version_says_nothing_of_costs(tmp_path: Path) -> None:
    ResultJson(tmp_path / "result.json")(finished())
    result = json.loads((tmp_path / "result.json").read_text())
    for key in ("measured", "predicted", "predicted_reason"):
        del result[key]
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert cost_of(read_result(tmp_path)) is None


def test_a_run_that_goes_on_has_no_result_of_an_earlier_session(tmp_path: Path) -> None:
    sink = ResultJson(tmp_path / "result.json")
    sink(finished(10, status="stopped"))
    assert read_result(tmp_path)["status"] == "stopped"
    sink(run_started(step=10))
    with pytest.raises(RunDirectoryError, match="has not ended, or was killed"):
        read_result(tmp_path)


@pytest.mark.parametrize("at_closing", [False, True])
def test_a_result_that_found_no_room_is_written_once_there_is(
    tmp_path: Path, at_closing: bool
) -> None:
    recorder = Recorder()
    sinks = Sinks([ResultJson(tmp_path / "result.json"), recorder])
    with full_disk(20):
        sinks(finished())
    assert os.listdir(tmp_path) == []
    assert any(isinstance(event, Warned) for event in recorder.events)
    if not at_closing:
        sinks(step_done(500))
        assert read_result(tmp_path)["status"] == "completed"
        (tmp_path / "result.json").unlink()
    sinks.close()
    assert os.listdir(tmp_path) == (["result.json"] if at_closing else [])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"status": '])
def test_a_damaged_result_is_one_clear_message(tmp_path: Path, content: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(RunDirectoryError, match=r"result\.json"):
        read_result(tmp_path)


def test_keys_come_in_the_order_of_their_weight(tmp_path: Path) -> None:
    ResultJson(tmp_path / "result.json")(finished())
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert list(result)[:3] == ["status", "reason", "step"]
