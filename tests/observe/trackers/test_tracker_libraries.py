"""Runs in the libraries of trackers, read back by their own readers, where they are installed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launching.api.test_train import Line, config
from torch import nn

import lockstep as ls
from lockstep.observe import read_events


class Logs(Line):
    def after_step(self, model: nn.Module, step: int) -> None:
        ls.log("norms/w+b", model.get_parameter("weight").norm())
        if step % 4 == 0:
            ls.log("noise", torch.rand(3, 6, 6), kind="image")


def trained(folder: Path, tracker: str, task: type[Line] = Logs, **keys: Any) -> ls.Result:
    """A run of 8 steps in two sessions."""
    keys = {"epochs": 2, "log_every": 1, "trackers": (tracker,), **keys}
    for resume, more in ((False, {"stop_at_step": 5}), (True, {})):
        result = ls.train(task(), config(**keys, **more), run_dir=folder, resume=resume, quiet=True)
    warned = [r["message"] for r in read_events(folder / "events.jsonl") if r["event"] == "Warned"]
    assert not [message for message in warned if "tracker" in message]
    return result


def losses(folder: Path) -> dict[int, float]:
    rows = read_events(folder / "events.jsonl")
    return {r["step"]: r["loss"] for r in rows if r["event"] == "StepDone"}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without settings of trackers."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_DIR", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow  # importing it takes half a minute
@pytest.mark.usefixtures("plain")
def test_mlflow_has_one_run_with_curves_params_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    # In a process of its own: the library warns, and keeps threads.
    run_dir = tmp_path / "run"
    trained(run_dir, "mlflow")
    script = f"""
import json
from mlflow.tracking import MlflowClient
uri = "sqlite:///{run_dir}/trackers/mlflow/mlflow.db"
client = MlflowClient(tracking_uri=uri, registry_uri=uri)
(experiment,) = [e for e in client.search_experiments() if e.name != "Default"]
(run,) = client.search_runs([experiment.experiment_id])
history = lambda name: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, name)]
print(json.dumps({{
    "loss": history("train/loss"), "norm": history("log/norms/w_b"), "status": run.info.status,
    "lr": run.data.params["lr"], "name": run.info.run_name,
    "artifacts": [a.path for a in client.list_artifacts(run.info.run_id, "logged/noise")],
}}))
"""
    found = read_back(script)
    assert dict(found["loss"]) == losses(run_dir)
    assert [step for step, _ in found["norm"]] == [*range(1, 9)]
    assert (found["status"], found["lr"], found["name"]) == ("FINISHED", "0.1", "run")
    assert found["artifacts"] == ["logged/noise/00000004.png", "logged/noise/00000008.png"]


@pytest.mark.slow
@pytest.mark.usefixtures("plain")
def test_wandb_has_one_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    run_dir = tmp_path / "run"
    trained(run_dir, "wandb")
    files = sorted((run_dir / "trackers" / "wandb" / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1
    script = f"""
import json
import struct
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as pb

def records(path):
    # Of wandb's file: after 7 bytes, LevelDB's log format in blocks of 32 KiB.
    data, place, whole = Path(path).read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""

rows, params, images = {{}}, {{}}, 0
for path in {[str(file) for file in files]!r}:
    for data in records(path):
        record = pb.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {{(i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item}}
            images += any(key.startswith("log/noise") for key in items)
            if "train/loss" in items:
                step = record.history.step.num or int(items["_step"])
                rows[step] = json.loads(items["train/loss"])
        elif kind == "run":
            params |= {{i.key: json.loads(i.value_json) for i in record.run.config.update}}
print(json.dumps({{"loss": list(rows.items()), "lr": params["lr"], "images": images}}))
"""
    found = read_back(script)
    assert dict(found["loss"]) == losses(run_dir)
    assert (found["lr"], found["images"]) == (0.1, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("plain")
def test_trackio_has_one_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    run_dir = tmp_path / "run"
    trained(run_dir, "trackio")
    script = f"""
import json, os
os.environ["TRACKIO_DIR"] = "{run_dir}/trackers/trackio"
import trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("logs")
rows = SQLiteStorage.get_logs("logs", run.name)
print(json.dumps({{
    "loss": [[r["step"], r["train/loss"]] for r in rows if r.get("train/loss") is not None],
    "images": sum(bool(r.get("log/noise")) for r in rows), "lr": run.config["lr"],
}}, default=str))
"""
    found = read_back(script)
    assert dict(found["loss"]) == losses(run_dir)
    assert (found["lr"], found["images"]) == (0.1, 2)


def read_back(script: str) -> Any:
    """What a script prints last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.usefixtures("plain")
def test_a_library_that_cannot_start_leaves_the_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Something else that is called wandb is installed, and cannot be imported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text("raise RuntimeError('broken install')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    run_dir = tmp_path / "run"
    plain = ls.train(Line(), config(epochs=1), run_dir=tmp_path / "plain", quiet=True)
    result = ls.train(Line(), config(epochs=1, trackers=("wandb",)), run_dir=run_dir, quiet=True)
    assert result.params_sha256 == plain.params_sha256
    assert math.isfinite(result.metrics["val/loss"])
    output = (run_dir / "trackers" / "wandb" / "output.log").read_text()
    assert capfd.readouterr().out.count("tracker wandb: RuntimeError: broken install") == 1, output
