"""The runs in folders: tags, summaries without reading all events, choosing some, removing one."""

from __future__ import annotations

import json
import math
import operator
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.files import read_text, replacing
from lockstep.config.parsing import flattened, parse_json, parse_object, parse_yaml, shown
from lockstep.engine.checkpoint.listing import IDENTITY, own_entries
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.errors import ConfigError, LockstepError, RunDirectoryError
from lockstep.observe.reading.follow import (
    EVENTS,
    NewestRows,
    count,
    is_claimed,
    number,
    real,
    rows_at_both_ends,
)
from lockstep.observe.showing.live import Pace
from lockstep.observe.step_costs import Measured
from lockstep.observe.storing.jsonl import event_from_row
from lockstep.observe.storing.result import cost_of, read_result

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
    """Add tags to a run, and remove others.

    Returns:
        The tags that it has then.

    Raises:
        ConfigError: a tag is not a word of at most 64 characters.
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
"""The files of a run that its summary is made of."""
_DEPTH = 4
"""Levels of folders that are searched for runs."""
_NUM_TIMED = 40
"""The number of reports and evaluations that the remaining time is estimated from."""


@dataclass(frozen=True)
class Summary:
    """A run in a list.

    Attributes:
        path: run directory.
        task: name of the task; empty if it is not known.
        state: `running`, `completed`, `stopped`, `failed`, `killed` (it ended without a result), or
            `new` (it has not begun to train).
        step: number of committed steps.
        total_steps: number of steps of the whole run; 0 if unknown.
        ranks: number of ranks.
        started: Unix time of the first event; 0.0 if there is none.
        newest: Unix time of the newest event.
        seconds: time that the run has taken, without the pauses between its sessions.
        sha256: SHA-256 of the final parameters; empty if the run has not ended in order.
        metrics: newest metrics, by "split/name".
        tags: tags that users have added.
        problems: messages about what cannot be read.
        left_s: seconds to the last step, as of the newest event; None if unknown.
        config_hash: hash of all keys that can change the result; empty if unknown.
        cost: what the steps of the newest session have cost, and what was predicted; None while it
            is running, or if unknown.
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
        if key in _FIELDS:
            return getattr(self, key)
        match key:
            case "name":
                return self.path.name
            case "path":
                return str(self.path)
            case "step_s":
                return self.cost and self.cost.measured and self.cost.measured.step_s
            case "predicted_step_s":
                return self.cost and self.cost.predicted and self.cost.predicted.step_s
        return self.metrics[key] if key in self.metrics else self.config.get(key)


_FIELDS = (
    "task", "state", "step", "total_steps", "ranks", "started", "newest", "sha256", "tags",
    "seconds",
)  # fmt: skip
"""Fields that conditions can name."""


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Run directories: the folders themselves, or those in them; links are not followed.

    Raises:
        RunDirectoryError: a folder does not exist.
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
    """The summary of a run by its small files and both ends of its events; never raises."""
    problems: list[str] = []
    nothing: dict[str, Any] = {}
    identity_path, events_path = run_dir / IDENTITY, run_dir / EVENTS
    identity = _tried(problems, IDENTITY, lambda: parse_object(read_text(identity_path)), nothing)
    rows = _tried(problems, EVENTS, lambda: rows_at_both_ends(events_path), NewestRows())
    has_result = (run_dir / _RESULT).exists()
    result = _tried(problems, "", lambda: read_result(run_dir), nothing) if has_result else nothing
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
    """What `read` returns; `otherwise` and a problem if it fails."""
    try:
        return read()
    except OSError as error:
        problems.append(f"{name}: cannot be read: {error.strerror or error}")
    except (LockstepError, ValueError) as error:
        problems.append(f"{name}: {error}" if name else str(error))
    return otherwise


def _left_s(rows: NewestRows) -> float | None:
    """Seconds to the last step, estimated from the newest rows of a session."""
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


_CONDITION = re.compile(r"([^<>=!~]+?)\s*(<=|>=|!=|==|=|<|>|~)\s*(.*)", re.DOTALL)
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

_ORDERS = ("<", "<=", ">", ">=")


def chosen(runs: Iterable[Summary], conditions: Sequence[str], order: str = "") -> list[Summary]:
    """The runs that fulfil all conditions.

    Args:
        runs: all runs.
        conditions: such as `state=failed`, `val/loss<0.3`, `lr>=1e-3`, `tags=paper`, `name~sweep`.
            A missing value fulfils `!=` only.
        order: key to sort by, ascending, or descending after a `-`; runs without it come last. If
            empty, they are sorted by their start.

    Raises:
        ConfigError: a condition is malformed, or compares a number with a word.
    """
    tests = [_condition(text) for text in conditions]
    left = [run for run in runs if all(test(run) for test in tests)]
    key = order.removeprefix("-") or "started"
    with_value = [run for run in left if not _is_missing(run.value(key))]
    missing = [run for run in left if _is_missing(run.value(key))]
    with_value.sort(key=lambda run: _sort_key(run.value(key)), reverse=order.startswith("-"))
    return with_value + missing


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _sort_key(value: Any) -> tuple[bool, float, str]:
    """A key that sorts numbers before texts."""
    number = _as_number(value)
    return (False, number, "") if number is not None else (True, 0.0, str(value))


def _condition(text: str) -> Callable[[Summary], bool]:
    match = _CONDITION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--where {shown(text)}: must be a key, one of = != < <= > >= ~, and a value, such as "
            "val/loss<0.3"
        )
    key, sign, wanted = match.groups()
    sign = "=" if sign == "==" else sign

    def holds(run: Summary) -> bool:
        value = run.value(key)
        if isinstance(value, tuple | list):
            has = wanted in map(str, value)
            return has if sign in ("=", "~") else sign == "!=" and not has
        if value is None:
            return sign == "!="
        if sign == "~":
            return wanted in str(value)
        one, other = _as_number(value), _as_number(wanted)
        if one is not None and other is not None:
            return _COMPARED[sign](one, other)
        if one is not None and sign in _ORDERS:
            raise ConfigError(
                f"--where {shown(text)}: {key} is a number ({value} in {run.path}), and "
                f"{shown(wanted)} is none"
            )
        return _COMPARED[sign](str(value).lower(), wanted.lower())

    return holds


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def remove_run(run_dir: Path) -> list[str]:
    """Remove Lockstep's own files from a run directory, and the folder if it is empty then.

    Returns:
        Names of the other files in it, which stay.

    Raises:
        RunDirectoryError: it is not a run directory, is a link, is in use, or cannot be removed.
    """
    if run_dir.is_symlink():
        raise RunDirectoryError(f"{run_dir}: is a link; remove the run directory it points to")
    if not is_run(run_dir):
        raise RunDirectoryError(f"{run_dir}: is no run directory; nothing was removed")
    if summarise(run_dir).state == "running":
        raise RunDirectoryError(
            f"{run_dir}: is trained in, or was a moment ago on another host; nothing was removed"
        )
    run_dir = run_dir.resolve()
    directory = RunDirectory(run_dir)
    directory.lock()
    try:
        entries = {*own_entries(run_dir)}
        # The identity comes last: an interrupted removal leaves a run that can be removed.
        for path in sorted(entries, key=lambda p: (p.name in (IDENTITY, ".lock"), p.name)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        left = sorted(path.name for path in run_dir.iterdir())
        if not left:
            run_dir.rmdir()
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename or run_dir}: cannot be removed: {error.strerror or error}"
        ) from None
    finally:
        directory.close()
    return left
