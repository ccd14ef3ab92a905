"""`result.json`: how a run ended, in one small file that is written completely or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from lockstep.config.files import read_bytes, replacing
from lockstep.config.parsing import as_type, parse_object
from lockstep.engine.events import Event, Failed, Finished, RunStarted
from lockstep.errors import RunDirectoryError
from lockstep.observe.sink import Sink
from lockstep.observe.step_costs import Measured, StepCost
from lockstep.observe.storing.files import opening
from lockstep.observe.storing.jsonl import dumps, newest_rows

_ADVICE = "resume the run to have it written again"


@dataclass(frozen=True)
class _Predicted(StepCost):
    """What steps were predicted to cost, and by what."""

    by: str


@dataclass(frozen=True)
class _Checked:
    """The part of a result that others rely on; what older versions did not write has defaults."""

    status: Literal["completed", "stopped", "failed"]
    step: int
    params_sha256: str | None
    metrics: dict[str, float | Literal["NaN", "Infinity", "-Infinity"]]
    exit_code: int
    measured: StepCost | None = None
    predicted: _Predicted | None = None
    predicted_reason: str = ""


_KEYS = tuple(_Checked.__dataclass_fields__)
_NEEDED = _KEYS[: _KEYS.index("measured")]
_FIRST = ("status", "reason", "step", "params_sha256", "metrics", "world_size", "wall_s")
"""The keys at the beginning of the file."""


class ResultJson(Sink):
    """Writes the result when the run ends.

    The file of an earlier session is removed when a run starts: a run that is killed has none. A
    run that was complete before, with nothing left to do, keeps its result.
    Keys: `status` (completed, stopped, failed), `reason`, `step`, `params_sha256` (null when
    failed), `metrics`, `arrays` (metrics of more than one number), `world_size`, `wall_s`,
    `exit_code`, `error` (class name, null unless failed), `task`, `config_hash`, `run_dir`,
    `checkpoint`, `finished_at` (ISO 8601, UTC), `test_step` (whose parameters the test splits were
    evaluated with; null if there was none), `measured` (an object of `step_s` in seconds and
    `peak_bytes`: what the steps of this session have cost; null if it had too few reports),
    `predicted` (the same, and `by`: what has predicted it; null where nothing can be said),
    `predicted_reason` (why it is null, or not the plan's; empty if it is).

    Args:
        path: path of the file.
        clock: function that returns the Unix time in seconds.

    Raises:
        RunDirectoryError: the file's directory cannot be made.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        with opening(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._clock = clock
        self._started_at = clock()
        self._step = 0
        self._plan: RunStarted | None = None
        self._cost: Measured | None = None
        self._pending: dict[str, Any] | None = None
        self._before: dict[str, Any] = {}

    def __call__(self, event: Event) -> None:
        """Note the start of a run, and write the result at its end."""
        # An error may be reported with an earlier step than training had reached.
        self._step = max(self._step, event.step)
        if isinstance(event, RunStarted):
            self._plan, self._pending, self._started_at = event, None, self._clock()
            with suppress(RunDirectoryError):
                self._before = read_result(self._path)
            self._path.unlink(missing_ok=True)
        elif isinstance(event, Measured):
            self._cost = event
        elif isinstance(event, Finished):
            self._pending = self._kept(self._common() | _finished(event))
        elif isinstance(event, Failed):
            if self._plan is None:  # this process has not joined what others have trained
                with suppress(OSError, RunDirectoryError):
                    rows = newest_rows(self._path.with_name("events.jsonl"))
                    self._step = max(self._step, 0, *(row["step"] for row in rows))
            self._pending = self._common() | _failed(event, self._step)
        self._write()

    def close(self) -> None:
        """Write the result if that has failed so far."""
        self._write()

    def _kept(self, result: dict[str, Any]) -> dict[str, Any]:
        """The result of an earlier session, if this one had nothing left to do."""
        same = ("status", "step", "params_sha256", "config_hash", "test_step", "arrays")
        if any(self._before.get(key) != result[key] for key in same):
            return result
        if result["status"] != "completed" or not self._plan or self._plan.step != result["step"]:
            return result
        before = self._before["metrics"]
        if any(repr(before.get(name)) != repr(value) for name, value in result["metrics"].items()):
            return result
        return {**result, **self._before, **{key: result[key] for key in ("run_dir", "checkpoint")}}

    def _common(self) -> dict[str, Any]:
        now, plan, cost = self._clock(), self._plan, self._cost
        predicted = cost.predicted if cost else None
        return {
            "world_size": plan.world_size if plan else None,
            "wall_s": now - self._started_at,
            "task": plan.task if plan else None,
            "config_hash": plan.config_hash if plan else None,
            "run_dir": plan.run_dir if plan else str(self._path.parent),
            "finished_at": datetime.fromtimestamp(now, timezone.utc).isoformat(),
            "measured": cost.measured if cost else None,
            "predicted": vars(predicted) | {"by": cost.by} if cost and predicted else None,
            "predicted_reason": cost.reason if cost else "",
        }

    def _write(self) -> None:
        if self._pending is None:
            return
        result = {key: self._pending[key] for key in _FIRST} | self._pending
        lines = (f"  {dumps(key)}: {dumps(value)}" for key, value in result.items())
        with replacing(self._path) as file:
            file.write("{\n" + ",\n".join(lines) + "\n}\n")
        self._pending = None


def read_result(path: Path) -> dict[str, Any]:
    """The result in a file, or in a run directory's `result.json`.

    Raises:
        RunDirectoryError: there is none (the run goes on or was killed), or it is damaged.
    """
    if path.is_dir():
        path = path / "result.json"
    try:
        result = parse_object(read_bytes(path))
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{path}: no result: the run has not ended, or was killed"
        ) from None
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RunDirectoryError(f"{path}: is damaged: {error}; {_ADVICE}") from None
    missing = next((key for key in _NEEDED if key not in result), None)
    if missing is not None:
        raise RunDirectoryError(f"{path}: is not a result of lockstep: no key {missing!r}")
    try:
        checked = as_type(_Checked, {key: result[key] for key in _KEYS if key in result})
    except ValueError as error:
        raise RunDirectoryError(f"{path}: is damaged: {error}; {_ADVICE}") from None
    # Not-finite numbers are strings in JSON.
    return result | {"metrics": {name: float(value) for name, value in checked.metrics.items()}}


def cost_of(result: Mapping[str, Any]) -> Measured | None:
    """What the steps of a run have cost, in a result of `read_result`; None if it says nothing."""
    measured, predicted = result.get("measured"), result.get("predicted")
    if measured is None and predicted is None:
        return None
    predicted = _Predicted(**predicted) if predicted else None
    return Measured(
        step=result["step"],
        measured=StepCost(**measured) if measured else None,
        predicted=predicted,
        by=predicted.by if predicted else "",
        reason=result.get("predicted_reason", ""),
    )


def _finished(event: Finished) -> dict[str, Any]:
    optional = ("carry_sha256", "tables_sha256")
    return {k: v for k, v in vars(event).items() if v or k not in optional} | {"error": None}


def _failed(event: Failed, step: int) -> dict[str, Any]:
    return {
        "status": "failed",
        "reason": event.message,
        "step": step,
        "params_sha256": None,
        "metrics": {},
        "exit_code": event.exit_code,
        "error": event.error,
        "checkpoint": None,
        "test_step": None,
    }
