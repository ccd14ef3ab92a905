from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import TrainConfig
from lockstep.engine.evaluation.batches import check_judged
from lockstep.engine.run.progress import Progress
from lockstep.errors import ConfigError

NAN, INF = math.nan, math.inf


def config(**keys: Any) -> TrainConfig:
    stopping = {k: keys.pop(k) for k in ("patience", "min_delta") if k in keys}
    return TrainConfig(early_stopping=stopping, **keys)


def judged(values: list[float], **keys: Any) -> tuple[list[bool], Progress]:
    progress = Progress()
    found = []
    for value in values:
        progress.step += 10
        found.append(progress.judge(config(**keys), {"loss": value, "other": 0.0}))
    return found, progress


def test_what_goes_by_evaluations_needs_some() -> None:
    for keys, name in [
        ({"patience": 1}, "early_stopping.patience"),
        ({"schedule": {"name": "plateau"}}, "schedule.name='plateau'"),
        ({"convergence": [{"metric": "loss", "window": 2}]}, "convergence"),
    ]:
        check_judged(config(**keys), ["val"])
        with pytest.raises(ConfigError, match=f"{name}: goes by evaluations"):
            check_judged(config(**keys), ["test"])
    check_judged(config(), [])


@pytest.mark.parametrize(
    ("keys", "values", "expected"),
    [
        ({}, [3.0, 2.0, 2.5, 1.0], [True, True, False, True]),
        ({"watch_mode": "max"}, [3.0, 2.0, 3.5], [True, False, True]),
        ({}, [3.0, 3.0], [True, False]),
        ({"min_delta": 0.5}, [3.0, 2.6, 2.5, 2.4], [True, False, False, True]),
        ({"min_delta": 0.5, "watch_mode": "max"}, [1.0, 1.4, 1.6], [True, False, True]),
        ({}, [NAN, NAN, 3.0, NAN, 2.0], [False, False, True, False, True]),
        ({}, [INF, INF, 3.0], [True, False, True]),
        ({"watch_mode": "max"}, [-INF, 1.0, NAN, INF, INF], [True, True, False, True, False]),
    ],
)
def test_an_evaluation_is_the_best_if_it_beats_the_best_before(
    keys: dict[str, Any], values: list[float], expected: list[bool]
) -> None:
    assert judged(values, **keys)[0] == expected


def test_the_best_value_and_its_step_are_remembered() -> None:
    _, progress = judged([3.0, 2.0, 2.5, 2.5])
    assert (progress.best, progress.best_step, progress.stale) == (2.0, 20, 2)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=False), max_size=20))
def test_the_best_is_the_minimum_of_all_numbers(values: list[float]) -> None:
    found, progress = judged(values)
    numbers = [v for v in values if not math.isnan(v)]
    assert progress.best == (min(numbers) if numbers else None)
    assert found == [
        not math.isnan(v) and all(v < w for w in values[:i] if not math.isnan(w))
        for i, v in enumerate(values)
    ]


def test_patience_counts_evaluations_without_improvement() -> None:
    progress = Progress()
    patient = config(patience=2)
    exhausted = []
    for value in (3.0, 4.0, 2.0, 2.0, 2.0):
        progress.judge(patient, {"loss": value})
        exhausted.append(bool(progress.exhausted(patient)))
    assert exhausted == [False, False, False, False, True]


def test_without_patience_a_run_never_stops_early() -> None:
    _, progress = judged([1.0] + [2.0] * 100)
    assert not progress.exhausted(config(patience=0))


def test_an_unknown_metric_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"watch='f1': no such metric.* accuracy, loss$"):
        Progress().judge(config(watch="f1"), {"loss": 1.0, "accuracy": 0.5})


@pytest.mark.parametrize(
    "progress",
    [
        Progress(),
        Progress(7, 7, 0.25, 5, 2, metrics={"val/loss": 0.25}, finished="all steps done"),
        Progress(best=INF, metrics={"val/loss": -INF}),
    ],
)
def test_progress_survives_json(progress: Progress) -> None:
    assert Progress.from_state_dict(json.loads(json.dumps(progress.state_dict()))) == progress


RULE = {"metric": "norm", "window": 3, "tolerance": 0.1}


def test_convergence_ends_a_run_when_a_metric_has_settled() -> None:
    settling = config(convergence=[RULE])
    progress, ended = Progress(), []
    for step, norm in enumerate([1.0, 2.0, 2.1, 1.95, 5.0], start=1):
        progress.step = step
        progress.judge(settling, {"loss": 1.0, "norm": norm})
        ended.append(progress.exhausted(settling))
    assert ended[:3] == ["", "", ""]
    assert ended[3] == "converged: norm within 0.1 of itself in 3 evaluations"
    assert ended[4] == ""
    assert Progress.from_state_dict(progress.state_dict()) == progress


def test_a_metric_that_is_nan_has_not_settled() -> None:
    settling = config(convergence=[RULE])
    progress = Progress()
    for _ in range(5):
        progress.judge(settling, {"loss": 1.0, "norm": math.nan})
    assert not progress.exhausted(settling)


def test_convergence_of_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"convergence.metric='norm': no such metric.* has loss"):
        Progress().judge(config(convergence=[RULE]), {"loss": 1.0})
