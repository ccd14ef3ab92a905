"""Runs in folders, and what one can say of each without reading all of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import LockstepError, RunDirectoryError
from lockstep.files import open_to_read, read_text
from lockstep.observe import event_from_row, read_result
from lockstep.observe.pace import Pace
from lockstep.parsing import flattened, parse_object, parse_yaml
from lockstep.reading.follow import EVENTS, is_claimed
from lockstep.reading.tags import TAGS, read_tags

T = TypeVar("T")
_IDENTITY = "run.json"
_RESULT = "result.json"
SOURCES = (EVENTS, _IDENTITY, _RESULT, TAGS)
"""Names of the files of a run that its summary is made of."""
_DEPTH = 4
"""Levels of folders in which runs are looked for."""
_BLOCK = 1 << 17
"""Bytes at the beginning and at the end of a file of events that are read."""
_NUM_TIMED = 40
"""The newest reports and evaluations that the time left is told by."""
_FRESH_S = 30.0
"""A run that has written within this time goes on, though no lock can be seen: on another host."""


@dataclass(frozen=True)
class Summary:
    """What is shown of a run in a list.

    Attributes:
        path: run directory.
        task: name of the task; empty if it is not known.
        state: `running`, `completed`, `stopped`, `failed`, `killed` (it ended without a result), or
            `new` (it has not begun to train).
        step: steps that are committed.
        total_steps: steps of the whole run; 0 if they are not known.
        ranks: number of ranks.
        started: Unix time of the first event; 0.0 if there is none.
        newest: Unix time of the newest event.
        sha256: of the final parameters; empty if it has not ended in order.
        metrics: newest ones, by "split/name".
        tags: words that people have put on it.
        problems: what cannot be read.
        left_s: seconds to the last step, as of the newest event; None if they are not known.
        config_hash: of what can change the result; empty if it is not known.
    """

    path: Path
    task: str = ""
    state: str = "new"
    step: int = 0
    total_steps: int = 0
    ranks: int = 0
    started: float = 0.0
    newest: float = 0.0
    sha256: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    left_s: float | None = None
    config_hash: str = ""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The run's config by dotted keys; empty if it cannot be read."""
        return read_config(self.path)

    def value(self, key: str) -> Any:
        """A field of the summary, a metric, or a key of the config; None if there is none."""
        own = {
            "name": self.path.name, "path": str(self.path), "task": self.task, "state": self.state,
            "step": self.step, "total_steps": self.total_steps, "ranks": self.ranks,
            "started": self.started, "newest": self.newest, "sha256": self.sha256,
            "tags": self.tags, "seconds": max(0.0, self.newest - self.started),
        }  # fmt: skip
        if key in own:
            return own[key]
        return self.metrics[key] if key in self.metrics else self.config.get(key)


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Run directories: the folders themselves, or those in them; links are not followed.

    Raises:
        RunDirectoryError: a folder is not there.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RunDirectoryError(f"{folder}: is no folder")
        found |= dict.fromkeys(_runs_in(folder, _DEPTH))
    return list(found)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return (folder / _IDENTITY).is_file() or (folder / EVENTS).is_file()


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    try:
        inner = sorted(
            Path(entry) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
        )
    except OSError:
        return
    for path in inner if depth else ():
        if not path.name.startswith("."):
            yield from _runs_in(path, depth - 1)


def read_config(run_dir: Path) -> dict[str, Any]:
    """The config of a run by dotted keys; empty if it cannot be read."""
    try:
        values = parse_yaml(read_text(run_dir / "config.yaml"))
    except (OSError, ValueError):
        return {}
    return flattened(values) if isinstance(values, dict) else {}


def summarise(run_dir: Path) -> Summary:
    """What the small files of a run and both ends of its events tell; never raises."""
    problems: list[str] = []
    nothing: dict[str, Any] = {}
    no_rows: list[dict[str, Any]] = []
    identity = _tried(
        problems, _IDENTITY, lambda: parse_object(read_text(run_dir / _IDENTITY)), nothing
    )
    first, last = _tried(problems, EVENTS, lambda: _ends(run_dir / EVENTS), (no_rows, no_rows))
    result = _tried(problems, "", lambda: _result(run_dir), nothing)
    plan, done = _newest(first + last, "RunStarted"), _newest(last, "StepDone")
    if is_claimed(run_dir):
        state = "running" if plan else "new"
    elif result:
        state = str(result["status"])
    else:
        state = "new" if not plan else "running" if _is_fresh(run_dir) else "killed"
    return Summary(
        path=run_dir,
        task=str(identity.get("task") or plan.get("task") or ""),
        state=state,
        step=int(_number(result.get("step") or done.get("step") or plan.get("step"))),
        total_steps=int(_number(plan.get("total_steps"))),
        ranks=int(_number(result.get("world_size") or plan.get("world_size"))),
        started=_number(first[0].get("time")) if first else 0.0,
        newest=_number(last[-1].get("time")) if last else 0.0,
        sha256=str(result.get("params_sha256") or ""),
        metrics=_metrics(last) | result.get("metrics", {}),
        tags=read_tags(run_dir),
        problems=tuple(problems),
        left_s=_left_s(plan, last) if state == "running" else None,
        config_hash=str(identity.get("config_hash") or ""),
    )


def _tried(problems: list[str], name: str, read: Callable[[], T], otherwise: T) -> T:
    """What can be read, or something else and a problem."""
    try:
        return read()
    except OSError as error:
        problems.append(f"{name}: cannot be read: {error.strerror or error}")
    except (LockstepError, ValueError) as error:
        problems.append(f"{name}: {error}" if name else str(error))
    return otherwise


def _result(run_dir: Path) -> dict[str, Any]:
    return read_result(run_dir) if (run_dir / _RESULT).exists() else {}


def _is_fresh(run_dir: Path) -> bool:
    try:
        return time.time() - (run_dir / EVENTS).stat().st_mtime < _FRESH_S
    except OSError:
        return False


def _ends(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows at the beginning and at the end of a file of events; what is no row is left out."""
    try:
        with open_to_read(path) as file:
            head = file.read(_BLOCK)
            size = os.fstat(file.fileno()).st_size
            if size <= _BLOCK:
                return (rows := _rows(head)), rows
            file.seek(size - _BLOCK)
            tail = file.read(_BLOCK)
    except FileNotFoundError:
        return [], []
    return _rows(head), _rows(tail.partition(b"\n")[2])


def _rows(block: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in block.split(b"\n"):
        try:
            rows.append(parse_object(line))
        except ValueError:
            continue
    return rows


def _newest(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next((row for row in reversed(rows) if row.get("event") == kind), {})


def _left_s(plan: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Seconds to the last step, by the newest rows of a sitting."""
    first = max((n for n, row in enumerate(rows) if row.get("event") == "RunStarted"), default=0)
    timed = [row for row in rows[first:] if row.get("event") in ("StepDone", "Evaluated")]
    pace = Pace()
    try:
        for row in (plan, *timed[-_NUM_TIMED:]):
            pace.take(event_from_row(row))
    except RunDirectoryError:
        return None
    return pace.left_s()


def _metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The newest metrics in some rows, by "split/name"."""
    metrics: dict[str, float] = {}
    for row in rows:
        values = row.get("metrics")
        if row.get("event") == "StepDone":
            metrics["train/loss"] = _number(row.get("loss"))
            split = "train"
        elif row.get("event") == "Evaluated":
            split = str(row.get("split"))
        else:
            continue
        if isinstance(values, dict):
            metrics |= {f"{split}/{name}": _number(value) for name, value in values.items()}
    return metrics


def _number(value: Any) -> float:
    """A number of a row, of which some are strings; 0.0 for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0
