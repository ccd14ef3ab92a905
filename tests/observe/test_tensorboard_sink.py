from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
from sample_events import Recorder, evaluated, finished, full_disk, run_started, step_done

from lockstep.engine.events import Warned
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.observe import Sinks, open_sinks
from lockstep.observe.trackers.tracker_sink import TensorBoard


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator: Any = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(directory))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_curves_are_keyed_by_step(tmp_path: Path) -> None:
    with open_sinks(tmp_path / "läufe", tensorboard=True, console=False) as sinks:
        for event in (step_done(10, loss=0.5), evaluated(10), step_done(20, loss=0.25)):
            sinks(event)
    curves = scalars(tmp_path / "läufe" / "tensorboard")
    assert curves["train/loss"] == [(10, 0.5), (20, 0.25)]
    assert curves["val/loss"] == [(10, 0.25)]
    assert set(curves) == {
        "train/loss",
        "train/accuracy",
        "train/lr",
        "train/grad_norm",
        "time/samples_per_s",
        "time/compute_efficiency",
        "val/loss",
        "val/accuracy",
    }


def test_steps_done_again_after_a_resume_are_there_once(tmp_path: Path) -> None:
    for resumed_step, loss in ((0, 1.0), (2, 2.0)):
        sink = TensorBoard(tmp_path)
        sink(run_started(step=resumed_step))
        for step in range(resumed_step + 1, 5):
            sink(step_done(step, loss=loss))
        sink.close()
        sink.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_a_resume_on_a_full_disk_hides_later_steps_too(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink(run_started())
    for step in (1, 2, 3):
        sink(step_done(step, loss=1.0))
    with full_disk(next(tmp_path.iterdir()).stat().st_size + 50):
        with pytest.raises(OSError, match="File too large"):
            sink(step_done(4, loss=1.0))
        with pytest.raises(OSError, match="File too large"):
            sink(run_started(step=1))
    sink(step_done(2, loss=2.0))
    sink.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0)]


def test_the_end_is_on_disk_before_closing(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink(step_done(1, loss=0.5))
    sink(finished(1))
    assert scalars(tmp_path)["train/loss"] == [(1, 0.5)]
    sink.close()


def test_a_full_disk_tears_and_loses_no_curve_and_prints_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(threading.enumerate())
    recorder = Recorder()
    sinks = Sinks([TensorBoard(tmp_path), recorder])
    sinks(run_started())
    sinks(step_done(1, loss=0.25))
    with full_disk(next(tmp_path.iterdir()).stat().st_size + 50):
        sinks(step_done(2, loss=0.5))
        sinks(finished(2))
    sinks(step_done(3, loss=0.75))
    sinks.close()
    assert set(threading.enumerate()) == before
    assert [e.step for e in recorder.events if isinstance(e, Warned)] == [2]
    assert scalars(tmp_path)["train/loss"] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert capfd.readouterr().err == ""


def test_a_missing_tensorboard_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r'pip install "lockstep-train\[tensorboard\]"'):
        TensorBoard(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(RunDirectoryError, match="tensorboard: cannot be opened"):
        TensorBoard(tmp_path / "tensorboard")
