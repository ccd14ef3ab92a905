"""Runs in folders, and what one can say of each without reading all of it."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import LockstepError, RunDirectoryError
from lockstep.files import open_to_read, read_text
from lockstep.observe import read_result
from lockstep.parsing import flattened, parse_object, parse_yaml
from lockstep.reading.follow import EVENTS, IDENTITY, is_claimed
from lockstep.reading.tags import TAGS, read_tags

T = TypeVar("T")
_RESULT = "result.json"
SOURCES = (EVENTS, IDENTITY, _RESULT, TAGS)
"""Names of the files of a run that its summary is made of."""
_DEPTH = 4
"""Levels of folders in which runs are looked for."""
_BLOCK = 1 << 22
"""Bytes at the beginning and at the end of a file of events that are looked through."""
_MOST_ROWS = 64
"""So many of the newest rows of each kind are read."""
_KINDS = ("RunStarted", "Joined", "Recovered", "StepDone", "Evaluated")
_ROW = re.compile(rb'"event": "(\w+)"')
_NAMED_WITHIN = 200
"""The first bytes of a row, in which it says what it is."""
_FRESH_S = 30.0
"""A run on another host, whose lock may not be seen, goes on if it has written within this time."""
_BEYOND = 1e15
_GAPS = 4.0
"""Or within so many times the longest time between two of its reports."""


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
    rows = _tried(problems, EVENTS, lambda: _rows_at_both_ends(run_dir / EVENTS), _Rows())
    result = _tried(problems, "", lambda: _result(run_dir), nothing)
    plan, done = rows.newest("RunStarted"), rows.newest("StepDone")
    if is_claimed(run_dir):
        state = "running" if plan else "new"
    elif result:
        state = str(result["status"])
    else:
        state = "new" if not plan else "running" if rows.may_go_on() else "killed"
    group = max((plan, rows.newest("Recovered")), key=lambda row: _number(row.get("time")))
    return Summary(
        path=run_dir,
        task=str(identity.get("task") or plan.get("task") or ""),
        state=state,
        step=_count(result.get("step") or done.get("step") or plan.get("step")),
        total_steps=_count(plan.get("total_steps")),
        ranks=_count(result.get("world_size") or group.get("world_size")),
        started=rows.first_time,
        newest=rows.last_time,
        sha256=str(result.get("params_sha256") or ""),
        metrics=_metrics(rows) | result.get("metrics", {}),
        tags=read_tags(run_dir),
        problems=tuple(problems),
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


@dataclass
class _Rows:
    """Some rows of a file of events.

    Attributes:
        by_kind: the newest ones of each kind that a summary needs, in their order.
        first_time: Unix time of the first row; 0.0 if there is none.
        last_time: of the newest row.
    """

    by_kind: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    first_time: float = 0.0
    last_time: float = 0.0

    def newest(self, kind: str) -> dict[str, Any]:
        """The newest row of a kind; empty if there is none."""
        return self.by_kind.get(kind, [{}])[-1]

    def may_go_on(self) -> bool:
        """Whether a run that nobody here seems to have claimed may go on on another host."""
        if self.newest("Joined").get("host") == socket.gethostname():
            return False
        times = [_number(row.get("time")) for row in self.by_kind.get("StepDone", [])]
        gap = max((after - before for before, after in pairwise(times)), default=0.0)
        return time.time() - self.last_time < max(_FRESH_S, _GAPS * gap)


def _rows_at_both_ends(path: Path) -> _Rows:
    """What the first and the last rows of a file of events tell; what is no row is left out."""
    found = _Rows()
    try:
        with open_to_read(path) as file:
            head = file.read(_BLOCK)
            size = os.fstat(file.fileno()).st_size
            if size > _BLOCK:
                file.seek(max(_BLOCK, size - _BLOCK))
                tail = file.read(_BLOCK).partition(b"\n")[2]
            else:
                tail = b""
    except FileNotFoundError:
        return found
    lines = head.splitlines() + tail.splitlines()
    by_kind: dict[str, list[bytes]] = {kind: [] for kind in _KINDS}
    for line in lines:
        match = _ROW.search(line, 0, _NAMED_WITHIN)
        if match is not None:
            by_kind.get(match[1].decode(), []).append(line)
    for kind, some in by_kind.items():
        rows = [row for line in some[-_MOST_ROWS:] if (row := _row(line))]
        found.by_kind |= {kind: rows} if rows else {}
    found.first_time = next((t for line in lines if (t := _time(line))), 0.0)
    found.last_time = next((t for line in reversed(lines) if (t := _time(line))), 0.0)
    return found


def _row(line: bytes) -> dict[str, Any]:
    """The row of a line; empty if it is none."""
    try:
        return parse_object(line)
    except ValueError:
        return {}


def _time(line: bytes) -> float:
    return _number(_row(line).get("time"))


def _metrics(rows: _Rows) -> dict[str, float]:
    """The newest metrics in some rows, by "split/name"."""
    metrics: dict[str, float] = {}
    for kind in ("StepDone", "Evaluated"):
        for row in rows.by_kind.get(kind, []):
            split = "train" if kind == "StepDone" else str(row.get("split"))
            values = row.get("metrics")
            named = values if isinstance(values, dict) else {}
            named = named | ({"loss": row.get("loss")} if kind == "StepDone" else {})
            metrics |= {f"{split}/{name}": _real(value) for name, value in named.items()}
    return metrics


def _real(value: Any) -> float:
    """A number of a row, of which those that are not finite are strings; 0.0 for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _number(value: Any) -> float:
    """A finite number of a row that no clock or counter is beyond; 0.0 for anything else."""
    number = _real(value)
    return number if abs(number) < _BEYOND else 0.0


def _count(value: Any) -> int:
    return int(_number(value))
