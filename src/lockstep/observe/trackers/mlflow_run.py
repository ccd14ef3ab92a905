"""A run in MLflow: in an SQLite file in the run directory, or where `MLFLOW_TRACKING_URI` says."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.observe.trackers.tracker import Opening, Tracker

_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MOST_PARAMS = 100
"""The most that MLflow takes at once; a value has at most `_MOST_LETTERS`."""
_MOST_LETTERS = 500
_FOREIGN = re.compile(r"[^A-Za-z0-9_. /:-]")
"""Signs that names in MLflow cannot have."""


class MlflowRun(Tracker):
    """Keeps a run by MLflow's client, which has no state beside the run's number."""

    def __init__(self, opening: Opening) -> None:
        """Open the run, or make it."""
        # Else importing it sends usage statistics.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._entities: Any = importlib.import_module("mlflow.entities")
        client: Any = importlib.import_module("mlflow.tracking").MlflowClient
        elsewhere = os.environ.get("MLFLOW_TRACKING_URI")
        uri = elsewhere or f"sqlite:///{opening.folder.resolve() / 'mlflow.db'}"
        self._client = client(tracking_uri=uri, registry_uri=uri)
        if opening.run_id:
            self.run_id = opening.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            artifacts = None if elsewhere else (opening.folder.resolve() / "artifacts").as_uri()
            experiment = self._experiment(opening.task, artifacts)
            name = opening.run_dir.resolve().name
            self.run_id = self._client.create_run(experiment, run_name=name).info.run_id
            self._add_params(opening.params)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step, all at once."""
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(_FOREIGN.sub("_", name), value, now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Keep a picture as an artifact below `logged/`."""
        self._client.log_artifact(self.run_id, str(path), f"logged/{_FOREIGN.sub('_', name)}")

    def end(self, status: str) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self.run_id, _STATUS.get(status, "KILLED"))

    def _experiment(self, task: str, artifacts: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or task
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return str(known.experiment_id)
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def _add_params(self, params: Mapping[str, Any]) -> None:
        all_params = [
            self._entities.Param(key, str(value)[:_MOST_LETTERS]) for key, value in params.items()
        ]
        for first in range(0, len(all_params), _MOST_PARAMS):
            part = all_params[first : first + _MOST_PARAMS]
            self._client.log_batch(self.run_id, params=part)
