"""Scores by region, and the report of a run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from lockstep.errors import ConfigError, DataError
from lockstep.observe.figures import new_figure, save
from lockstep.systems.ufs.config import UfsConfig
from lockstep.systems.ufs.report.maps import read_curves
from lockstep.systems.ufs.report.scores import Intervals, inside, relative_error, score
from lockstep.systems.ufs.synthetic import (
    EDGE,
    HIDDEN,
    LAWS,
    NOISY_WIDTH,
    RECORDED,
    SALINITY,
    WEATHER,
    grid,
    land,
    noisy_fields,
)
from lockstep.systems.ufs.task import Ufs

SMALL = ("hidden=[8]", "steps=40", "eval_every=10", "log_every=10", "lr=0.02", "batch_size=500")


def test_scores_of_known_values() -> None:
    true = np.array([0.0, 0.5, 1.0, 0.1])
    found = score(2 * true + 0.1, true, np.array([1.0, 1.0, 0.5, 1.0]), is_ice=True)
    assert found.count == 4
    assert found.rmse == pytest.approx(np.sqrt(np.mean((true + 0.1) ** 2)))
    assert (found.mae, found.bias) == (pytest.approx(0.5), pytest.approx(0.5))
    assert (found.correlation, found.slope) == (pytest.approx(1), pytest.approx(2))
    # 0.1 becomes 0.3: one cell more than the true one and a half (the third one is half as large).
    assert found.edge_error == pytest.approx(1 / 1.5)


def test_scores_that_do_not_exist_are_nan() -> None:
    same = np.zeros(3)
    found = score(same, same, same, is_ice=True)
    assert all(map(math.isnan, (found.correlation, found.slope, found.edge_error)))
    assert math.isnan(score(same, same, same, is_ice=False).edge_error)


def test_regions() -> None:
    latitude = np.array([-80.0, -50.0, 0.0, 50.0, 70.0])
    assert inside(latitude, "arctic").tolist() == [False, False, False, True, True]
    assert inside(latitude, "antarctic").tolist() == [True, True, False, False, False]
    assert inside(latitude, "global").all()


@pytest.mark.parametrize("world", ["exact", "noisy"])
def test_the_law_and_its_derivatives_agree(world: Any) -> None:
    law, step = LAWS[world], 1e-6
    columns = {
        "sst": np.linspace(-1.8, 3, 50), "sss": np.linspace(33, 35, 50),
        "tair": np.linspace(-5.1, 4.9, 50), "hi": np.linspace(0, 1.6, 50),
    }  # fmt: skip
    inputs = ("sss", "qref", "sst", "hi", "tair")
    found = law.jacobian(columns, inputs)
    assert found.shape == (50, 5)
    for name in law.inputs:
        ends = (
            law.expected(*(columns[n] + sign * step * (n == name) for n in law.inputs))
            for sign in (1, -1)
        )
        wanted = -np.subtract(*reversed([*ends])) / (2 * step)
        assert np.abs(wanted).max() > 1e-3
        assert np.allclose(found[:, inputs.index(name)], wanted, atol=1e-7)
    assert not found[:, [n for n, name in enumerate(inputs) if name not in law.inputs]].any()
    assert relative_error(2 * found, found) == pytest.approx(1)


def test_the_law_of_the_noisy_world_is_the_mean_of_what_is_recorded() -> None:
    law, generator = LAWS["noisy"], np.random.default_rng(0)
    sst = np.linspace(-2.5, 2.0, 10)
    given = sst, np.full(10, SALINITY), np.full(10, -5.0), np.zeros(10)
    shift = np.hypot(HIDDEN, WEATHER) * generator.normal(size=(200_000, 1))
    aice = concentration_of((EDGE - sst) / NOISY_WIDTH + shift)
    recorded = np.clip(aice + RECORDED * generator.normal(size=aice.shape), 0, 1).mean(0)
    assert np.abs(law.expected(*given) - recorded).max() < 2e-3
    assert np.abs(aice.mean(0) - recorded).max() > 5e-3, "clipping is not seen"


def concentration_of(logit: Any) -> Any:
    return 1 / (1 + np.exp(-logit))


def test_the_noisy_world_has_seasons_memory_and_the_noise_that_it_names() -> None:
    axes = grid(30, 60)
    arctic = (axes[0] > 60)[:, None] & ~land(*axes, 0)
    months = [noisy_fields(*axes, month, 0) for month in range(12)]
    for one, other in zip(months[7].values(), noisy_fields(*axes, 7, 0).values(), strict=True):
        assert np.array_equal(one, other)
    ice = [fields["aice"][arctic].mean() for fields in months]
    assert np.argmax(ice) in (1, 2, 3)
    assert np.argmin(ice) in (7, 8, 9)
    # What a month leaves is the thickness of the next, wherever there was ice.
    before, after = (months[n]["hi"][arctic] for n in (2, 3))
    left = months[2]["aice"][arctic] * (0.6 * before + 0.6)
    assert np.abs(after - left).mean() < 0.05
    law, squares = LAWS["noisy"], []
    for fields in months:
        expected = law.expected(*(fields[name][arctic].astype(float) for name in law.inputs))
        between = (expected > 0.3) & (expected < 0.7)
        logit = np.log(expected / (1 - expected))
        aice = np.clip(fields["aice"][arctic], 1e-3, 1 - 1e-3)
        squares.append(np.square(np.log(aice / (1 - aice)) - logit)[between])
    assert np.sqrt(np.concatenate(squares).mean()) == pytest.approx(np.hypot(HIDDEN, WEATHER), 0.3)


def test_intervals_hold_what_they_promise_where_errors_differ() -> None:
    generator = np.random.default_rng(0)

    def drawn(count: int) -> tuple[Any, Any]:
        predicted = generator.uniform(0, 1, count)
        predicted[: 3 * count // 10] = 0  # open water
        return predicted, predicted + 0.2 * predicted * generator.normal(size=count)

    known, (predicted, true) = Intervals(*drawn(5000), bounds=(0, 2)), drawn(5000)
    for level, found in known.coverage(predicted, true).items():
        assert found["coverage"] == pytest.approx(0.3 + 0.007 * float(level[:-1]), abs=0.02)
    low, high = known.at(np.array([0.0, 0.2, 0.9]), 0.9)
    assert (high - low)[0] == 0
    assert (high - low)[2] > 3 * (high - low)[1]
    assert known.at(np.array([1.9]), 0.9)[1][0] <= 2
    # Of 3 errors, none says how far the outer 5 % lie; of 100, the 90 % are no fewer.
    lonely = Intervals(np.zeros(3), np.array([0.1, 0.2, 0.3]), bounds=(-1, 10))
    assert lonely.coverage(np.ones(2), np.array([1.2, 9.0]))["90%"]["coverage"] == 1
    few = []
    for _ in range(200):
        known = Intervals(np.zeros(100), generator.normal(size=100))
        few.append(known.coverage(np.zeros(100), generator.normal(size=100))["90%"]["coverage"])
    assert np.mean(few) == pytest.approx(0.9, abs=0.015)


def test_a_report_has_scores_and_pictures(here: Any, files: Path, tmp_path: Path) -> None:
    given = f"history={files}/iceh.*.nc"
    assert here("train", "ufs", given, *SMALL, "--run-dir", "run").returncode == 0
    done = here("eval", "run", "--report", "out")
    assert done.returncode == 0, done.stderr
    for line in (
        "aice arctic: ",
        "aice antarctic: ",
        "ice edge error",
        "sensitivity: ",
        "aice: intervals of 90% have ",
        "aice global DJF: ",
        " against persistence",
        " against climatology",
    ):
        assert line in done.stdout
    assert "law" not in done.stdout  # these files are the user's, for all that is known
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    scores = found["scores"]["aice"]
    assert scores["arctic"]["count"] + scores["antarctic"]["count"] == scores["global"]["count"]
    metrics = dict(line.split()[:2] for line in done.stdout.splitlines()[:9])
    assert scores["global"]["mae"] == pytest.approx(float(metrics["mae_aice"]), rel=1e-4)
    assert scores["global"]["rmse"] ** 2 == pytest.approx(float(metrics["mse_aice"]), rel=1e-4)
    assert len(found["sensitivity"]) == 14
    against = found["skill"]["aice"]["arctic"]["DJF"]
    assert 0 < against["persistence"]["count"] < against["climatology"]["count"]
    assert against["rmse"] == scores["arctic"]["rmse"]
    for name in (
        "history",
        "skill_aice",
        "map_global_aice",
        "map_arctic_aice",
        "map_antarctic_aice",
    ):
        picture = imread(tmp_path / "out" / f"{name}.png")
        assert picture.shape[1] > 1000
        assert len(np.unique(picture)) > 20
    assert not list((tmp_path / "out").glob(".*"))


def test_a_law_is_known_of_synthetic_data_with_all_of_its_inputs() -> None:
    for world in ("exact", "noisy"):
        assert Ufs(UfsConfig(synthetic=world)).law is LAWS[world]
        assert Ufs(UfsConfig(synthetic=world, history=("a.nc",))).law is None
        assert Ufs(UfsConfig(synthetic=world, outputs=("aice", "frzmlt"))).law is None
    without = UfsConfig(synthetic="noisy", inputs=("sst", "sss", "hi"))
    assert Ufs(without).law is None
    assert Ufs(without.model_copy(update={"synthetic": "exact"})).law is LAWS["exact"]


@pytest.mark.slow
def test_the_noisy_world_is_put_beside_its_law(here: Any, tmp_path: Path) -> None:
    keys = ("synthetic=noisy", "mask_mode=both", "region=arctic", "split=time", "val_fraction=0.25",
            "test_fraction=0.25", "max_patterns=4000")  # fmt: skip
    assert here("train", "ufs", *keys, *SMALL, "steps=150", "--run-dir", "run").returncode == 0
    done = here("eval", "run", "--report", "out", "--baselines")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert 0 < found["jacobian_error"]["everywhere"] < 1, "of zeros it is 1"
    seasons = found["skill"]["aice"]["arctic"]
    assert {*seasons} == {"all", "DJF", "MAM", "JJA", "SON"}
    assert seasons["all"]["climatology"]["skill"] > 0
    assert 0.8 < found["intervals"]["aice"]["90%"]["coverage"] < 0.97
    rows = json.loads((tmp_path / "run" / "baselines_test.json").read_text())["rows"]
    law = rows.pop("the law itself (limit)")["loss"]
    assert law < min(row["loss"] for row in rows.values() if "loss" in row)


def test_a_report_that_cannot_be_made(here: Any, tmp_path: Path) -> None:
    small = ("steps=1", "hidden=4")
    assert here("train", "digits", *small, "--run-dir", "run").returncode == 0
    done = here("eval", "run", "--report", "out")
    assert (done.returncode, done.stderr) == (
        2, "error: --report out: digits has no report beyond its metrics\n",
    )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_pictures_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "picture.png").mkdir()
    with pytest.raises(DataError, match=r"picture.png: cannot be written"):
        save(new_figure(1, 1, ""), tmp_path / "picture.png")
    assert [p.name for p in tmp_path.iterdir()] == ["picture.png"]


def test_a_run_without_curves(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics.csv: cannot be read"):
        read_curves(tmp_path / "metrics.csv")


def test_damaged_curves_are_said_in_a_short_message(tmp_path: Path) -> None:
    text = "step,split,loss\n1,train,nan\n2,train," + 10_000 * "x" + "\n"
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(DataError, match=r"metrics.csv: line 3: cannot be read: 'xxx") as caught:
        read_curves(tmp_path / "metrics.csv")
    assert len(str(caught.value)) < 1000


def test_without_matplotlib_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'pip install "lockstep-train\[ufs\]"'):
        new_figure(1, 1, "")


@pytest.mark.slow
def test_the_default_run_learns_the_law(here: Any, tmp_path: Path) -> None:
    assert here("train", "ufs", "--run-dir", "run").returncode == 0
    done = here("eval", "run", "--report", "out")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["jacobian_error"]["at the ice edge"] < 0.10
    assert found["scores"]["aice"]["global"]["rmse"] < 0.01
    assert list(found["sensitivity"])[:2] == ["sst", "sss"]
    assert (tmp_path / "out" / "jacobian.png").is_file()
