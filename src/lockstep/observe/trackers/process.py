"""The process of one tracker: lines of JSON in, calls of MLflow, Trackio or Weights & Biases out.

Started by `TrackerSink` as `python -m lockstep.observe.trackers.process NAME FOLDER`. It reads
messages from standard input until that ends, which it also does if the rank that started it is
killed, and reports each kind of error once, as a line on standard output. What the library prints
goes to standard error.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import secrets
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.files import open_regular, read_text, replacing
from lockstep.config.parsing import parse_object


@dataclass(frozen=True)
class Opening:
    """The run that a tracker is to open.

    Attributes:
        task: name of the task, which names the project or experiment.
        run_dir: path of the run directory.
        folder: folder for the library's files.
        params: keys of the config with their values.
        run_id: the tracker's id of the run, if an earlier session has opened it; else empty.
    """

    task: str
    run_dir: Path
    folder: Path
    params: Mapping[str, str | int | float | bool | None]
    run_id: str


class Tracker(ABC):
    """A run in a tracker. Its methods may raise anything, and may block.

    Attributes:
        run_id: the tracker's id of the run, by which it is opened again.
    """

    run_id: str

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a step; steps ascend, and one may come again with other names."""

    @abstractmethod
    def picture(self, step: int, name: str, path: Path) -> None:
        """Take a PNG file of the run directory."""

    @abstractmethod
    def end(self, status: str) -> None:
        """Complete and release the run.

        Args:
            status: `completed`, `stopped`, `failed`, or empty where the run was killed.
        """


_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_PARAMS = 100
"""The most parameters that MLflow takes at once."""
_MAX_VALUE = 500
"""The most characters of a parameter's value in MLflow."""
_FOREIGN = re.compile(r"[^A-Za-z0-9_. /:-]")
"""Characters that names in MLflow cannot have."""


class MlflowRun(Tracker):
    """A run in MLflow, by its client, which has no state but the run's id."""

    def __init__(self, opening: Opening) -> None:
        """Open the run, or make it."""
        # Else importing it sends usage statistics.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._entities: Any = importlib.import_module("mlflow.entities")
        client: Any = importlib.import_module("mlflow.tracking").MlflowClient
        server = os.environ.get("MLFLOW_TRACKING_URI")
        uri = server or f"sqlite:///{opening.folder.resolve() / 'mlflow.db'}"
        self._client = client(tracking_uri=uri, registry_uri=uri)
        if opening.run_id:
            self.run_id = opening.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            artifacts = None if server else (opening.folder.resolve() / "artifacts").as_uri()
            experiment = self._experiment(opening.task, artifacts)
            name = opening.run_dir.resolve().name
            self.run_id = self._client.create_run(experiment, run_name=name).info.run_id
            params = [
                self._entities.Param(key, str(value)[:_MAX_VALUE])
                for key, value in opening.params.items()
            ]
            for first in range(0, len(params), _MAX_PARAMS):
                part = params[first : first + _MAX_PARAMS]
                self._client.log_batch(self.run_id, params=part)

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


class _LoggingRun(Tracker):
    """A run of a library that has W&B's API."""

    _library: Any
    _run: Any

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Log a picture of a step."""
        self._run.log({f"log/{name}": self._library.Image(str(path))}, step=step)


class TrackioRun(_LoggingRun):
    """A run in Trackio, in an SQLite file; `trackio show` reads it."""

    def __init__(self, opening: Opening) -> None:
        """Open the run, or make it."""
        # The package reads it when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str(opening.folder.resolve()))
        self._library = importlib.import_module("trackio")
        # A run is resumed by its name, which must be unique in a shared folder.
        name = f"{opening.run_dir.resolve().name}-{secrets.token_hex(4)}"
        self.run_id = opening.run_id or name
        self._run = self._library.init(
            project=re.sub(r"[^A-Za-z0-9_-]", "_", opening.task) or "run",
            name=self.run_id,
            resume="allow",
            config=dict(opening.params),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def end(self, status: str) -> None:
        """Write what is in memory."""
        self._run.finish()


class WandbRun(_LoggingRun):
    """A run in Weights & Biases; `wandb sync` uploads offline sessions into one run."""

    def __init__(self, opening: Opening) -> None:
        """Open the run, or make it."""
        self._library = importlib.import_module("wandb")
        self.run_id = opening.run_id or secrets.token_hex(4)
        # Without what it would print and measure of this process: ranks are other processes.
        settings = self._library.Settings(
            silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False
        )
        self._run = self._library.init(
            project=os.environ.get("WANDB_PROJECT") or opening.task,
            id=self.run_id,
            name=opening.run_dir.resolve().name,
            dir=os.environ.get("WANDB_DIR") or str(opening.folder),
            mode=os.environ.get("WANDB_MODE") or "offline",
            config=dict(opening.params),
            resume="allow",
            settings=settings,
        )

    def end(self, status: str) -> None:
        """Complete the run's file."""
        self._run.finish(exit_code=0 if status in ("completed", "stopped") else 1)


_CLASSES: dict[str, Callable[[Opening], Tracker]] = {
    "mlflow": MlflowRun, "trackio": TrackioRun, "wandb": WandbRun,
}  # fmt: skip
_STATE = "state.json"
_SAVE_EVERY_S = 1.0
_OF_PICTURE = "picture: "
"""Prefix that tells a picture from a metric of the same name."""


class Work:
    """Executes messages; a tracker never receives a value of a step twice.

    Steps that are repeated after a resume have the same metrics as before, and of the steps before
    the newest one the tracker has received everything.

    Args:
        make: function that opens a run in a tracker.
        folder: folder of the tracker in the run directory.
    """

    def __init__(self, make: Callable[[Opening], Tracker], folder: Path) -> None:
        self._make = make
        self._folder = folder
        self._tracker: Tracker | None = None
        self._newest = self._known = -1
        self._had: set[str] = set()
        """Names of what the tracker has received of step `_newest`."""
        self._known_of_newest: set[str] = set()
        """Names of what it received of step `_known` from an earlier session."""
        self._saved_at = 0.0
        self._status = ""

    def do(self, message: dict[str, Any]) -> None:
        """Execute a message; without a successful `open` before it, it is dropped."""
        kind = message["do"]
        if kind == "open":
            self._open(message)
        elif kind == "end":
            self._status = message["status"]
        elif self._tracker is not None and message["step"] >= self._known:
            self._give(self._tracker, message)
            if time.monotonic() - self._saved_at > _SAVE_EVERY_S:
                self._save()

    def end(self) -> None:
        """Complete the run."""
        if self._tracker is not None:
            try:
                self._tracker.end(self._status)
            finally:
                self._save()

    def _give(self, tracker: Tracker, message: dict[str, Any]) -> None:
        """Give the tracker what it has not received of metrics or a picture."""
        step = message["step"]
        had = self._known_of_newest if step == self._known else set()
        if message["do"] == "picture":
            names = {_OF_PICTURE + message["name"]} - had
            if names:
                tracker.picture(step, message["name"], Path(message["path"]))
        else:
            names = message["values"].keys() - had
            if names:
                values = {name: v for name, v in message["values"].items() if name in names}
                tracker.metrics(step, values)
        if step > self._newest:
            self._newest, self._had = step, set()
        if step == self._newest:
            self._had |= names

    def _open(self, message: dict[str, Any]) -> None:
        state: dict[str, Any] = {}
        if (self._folder / _STATE).exists():
            state = parse_object(read_text(self._folder / _STATE))
        self._known = self._newest = int(state.get("newest", -1))
        self._had = {str(name) for name in state.get("had", ())}
        self._known_of_newest = {*self._had}
        run_dir, run_id = Path(message["run_dir"]), str(state.get("run_id", ""))
        opening = Opening(message["task"], run_dir, self._folder, message["params"], run_id)
        self._tracker = self._make(opening)
        self._save()

    def _save(self) -> None:
        assert self._tracker is not None
        with replacing(self._folder / _STATE) as file:
            state = {"run_id": self._tracker.run_id, "newest": self._newest}
            json.dump({**state, "had": sorted(self._had)}, file)
        self._saved_at = time.monotonic()


def serve(lines: Iterable[bytes], work: Work, report: Callable[[str], None]) -> None:
    """Execute messages to their end; errors of a kind of message are reported once.

    A last line without a line end was not finished by a rank that was killed: it is dropped.
    """
    failed: set[str] = set()

    def attempt(kind: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:
            if kind not in failed:
                report(f"{type(error).__name__}: {error}")
            failed.add(kind)

    for line in lines:
        if not line.endswith(b"\n"):
            break
        message = json.loads(line)
        attempt(message["do"], partial(work.do, message))
    attempt("close", work.end)


def main(name: str, folder: Path) -> None:
    """Serve one tracker, from standard input."""
    # Ctrl-C and a scheduler's notice reach the whole process group; this one ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(os.dup(0), "rb") as lines, os.fdopen(os.dup(1), "w") as reports:
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        lock = open_regular(folder / ".lock", os.O_RDWR | os.O_CREAT)
        # The process of a rank that was lost may still be writing.
        fcntl.flock(lock, fcntl.LOCK_EX)

        def report(problem: str) -> None:
            print(json.dumps({"problem": problem}), file=reports, flush=True)

        serve(lines, Work(_CLASSES[name], folder), report)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
