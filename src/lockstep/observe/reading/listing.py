"""Runs in folders with their tags, and what one can say of each without reading all of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.files import read_text, replacing
from lockstep.config.parsing import flattened, parse_json, parse_object, parse_yaml, shown
from lockstep.errors import ConfigError, LockstepError, RunDirectoryError
from lockstep.observe.reading.follow import (
    EVENTS,
    IDENTITY,
    NewestRows,
    count,
    is_claimed,
    number,
    real,
    rows_at_both_ends,
)
from lockstep.observe.showing.live import Pace
from lockstep.observe.step_costs import Measured, StepCost
from lockstep.observe.storing.result import cost_of, read_result
from lockstep.observe.storing.rows import event_from_row

TAGS = "tags.json"
_WORD = re.compile(r"[^\s,=<>!~\x00-\x1f\x7f-\x9f]{1,64}")


def read_tags(run_dir: Path) -> tuple[str, ...]:
    """The tags of a run, sorted; none if their file is missing or damaged."""
    try:
        tags = parse_json(read_text(run_dir / TAGS))
    except (OSError, ValueError):
        return ()
    there = tags if isinstance(tags, list) else []
    return tuple(sorted({tag for tag in there if isinstance(tag, str)}))


def change_tags(run_dir: Path, add: Iterable[str], remove: Iterable[str]) -> tuple[str, ...]:
    """Put tags on a run, and take others off.

    Returns:
        Those that it has now.

    Raises:
        ConfigError: one is no word of at most 64 characters.
        RunDirectoryError: the folder is not writable.
    """
    added, removed = list(add), set(remove)
    for tag in added:
        if not _WORD.fullmatch(tag):
            raise ConfigError(
                f"tag {shown(tag)}: must be a word of at most 64 characters without , = < > ! ~"
            )
    tags = sorted({*read_tags(run_dir), *added} - removed)
    try:
        with replacing(run_dir / TAGS) as file:
            file.write(json.dumps(tags) + "\n")
    except OSError as error:
        raise RunDirectoryError(f"{run_dir}: is not writable: {error.strerror}") from None
    return tuple(tags)


T = TypeVar("T")
_RESULT = "result.json"
SOURCES = (EVENTS, IDENTITY, _RESULT, TAGS)
"""Names of the files of a run that its summary is made of."""
_DEPTH = 4
"""Levels of folders in which runs are looked for."""
_NUM_TIMED = 40
"""The newest reports and evaluations that the time left is told by."""


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
        seconds: time that the run has taken, without the pauses between its sessions.
        sha256: of the final parameters; empty if it has not ended in order.
        metrics: newest ones, by "split/name".
        tags: words that people have put on it.
        problems: what cannot be read.
        left_s: seconds to the last step, as of the newest event; None if they are not known.
        config_hash: of what can change the result; empty if it is not known.
        cost: what the steps of the newest session have cost, and what was predicted; None while it
            goes on, or if it is not known.
    """

    path: Path
    task: str = ""
    state: str = "new"
    step: int = 0
    total_steps: int = 0
    ranks: int = 0
    started: float = 0.0
    newest: float = 0.0
    seconds: float = 0.0
    sha256: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    left_s: float | None = None
    config_hash: str = ""
    cost: Measured | None = None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The run's config by dotted keys; empty if it cannot be read."""
        return read_config(self.path)

    def value(self, key: str) -> Any:
        """A field of the summary, a metric, or a key of the config; None if there is none."""
        cost = self.cost
        own = {
            "name": self.path.name, "path": str(self.path), "task": self.task, "state": self.state,
            "step": self.step, "total_steps": self.total_steps, "ranks": self.ranks,
            "started": self.started, "newest": self.newest, "sha256": self.sha256,
            "tags": self.tags, "seconds": self.seconds,
            "step_s": _step_s(cost.measured if cost else None),
            "predicted_step_s": _step_s(cost.predicted if cost else None),
        }  # fmt: skip
        if key in own:
            return own[key]
        return self.metrics[key] if key in self.metrics else self.config.get(key)


def _step_s(cost: StepCost | None) -> float | None:
    return cost.step_s if cost else None


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Run directories: the folders themselves, or those in them; links are not followed.

    Raises:
        RunDirectoryError: a folder is not there.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not os.path.isdir(folder):
            raise RunDirectoryError(f"{folder}: is no folder")
        found |= dict.fromkeys(_runs_in(folder, _DEPTH))
    return list(found)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return any(os.path.isfile(folder / name) for name in (IDENTITY, EVENTS))


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
    identity = _tried(
        problems, IDENTITY, lambda: parse_object(read_text(run_dir / IDENTITY)), nothing
    )
    rows = _tried(problems, EVENTS, lambda: rows_at_both_ends(run_dir / EVENTS), NewestRows())
    result = _tried(problems, "", lambda: _result(run_dir), nothing)
    plan, done = rows.newest("RunStarted"), rows.newest("StepDone")
    if is_claimed(run_dir):
        state = "running" if plan else "new"
    elif result:
        state = str(result["status"])
    else:
        state = "new" if not plan else "running" if rows.may_go_on() else "killed"
    group = max((plan, rows.newest("Recovered")), key=lambda row: number(row.get("time")))
    return Summary(
        path=run_dir,
        task=str(identity.get("task") or plan.get("task") or ""),
        state=state,
        step=count(result.get("step") or done.get("step") or plan.get("step")),
        total_steps=count(plan.get("total_steps")),
        ranks=count(result.get("world_size") or group.get("world_size")),
        started=rows.first_time,
        newest=rows.last_time,
        seconds=rows.ran_s,
        sha256=str(result.get("params_sha256") or ""),
        metrics=_metrics(rows) | result.get("metrics", {}),
        tags=read_tags(run_dir),
        problems=tuple(problems),
        left_s=_left_s(rows) if state == "running" else None,
        config_hash=str(identity.get("config_hash") or ""),
        cost=cost_of(result) if result else None,
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


def _left_s(rows: NewestRows) -> float | None:
    """Seconds to the last step, by the newest rows of a session."""
    plan = rows.newest("RunStarted")
    both = rows.by_kind.get("StepDone", []) + rows.by_kind.get("Evaluated", [])
    timed = sorted((number(row.get("time")), n) for n, row in enumerate(both))
    since = number(plan.get("time"))
    newest = [both[n] for time, n in timed if time >= since][-_NUM_TIMED:]
    pace = Pace()
    try:
        for row in (plan, *newest):
            pace.take(event_from_row(row))
    except RunDirectoryError:
        return None
    return pace.left_s()


def _metrics(rows: NewestRows) -> dict[str, float]:
    """The newest metrics in some rows, by "split/name"."""
    metrics: dict[str, float] = {}
    for kind in ("StepDone", "Evaluated"):
        for row in rows.by_kind.get(kind, []):
            split = "train" if kind == "StepDone" else str(row.get("split"))
            values = row.get("metrics")
            named = values if isinstance(values, dict) else {}
            named = named | ({"loss": row.get("loss")} if kind == "StepDone" else {})
            metrics |= {f"{split}/{name}": real(value) for name, value in named.items()}
    return metrics
