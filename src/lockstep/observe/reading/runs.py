"""Selecting and sorting runs by conditions, and removing a run."""

from __future__ import annotations

import math
import operator
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.parsing import shown
from lockstep.engine.checkpoint.listing import own_entries
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.observe.reading.listing import Summary, is_run, summarise

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
    there = [run for run in left if not _is_missing(run.value(key))]
    missing = [run for run in left if _is_missing(run.value(key))]
    there.sort(key=lambda run: _sort_key(run.value(key)), reverse=order.startswith("-"))
    return there + missing


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
        own = {*own_entries(run_dir)}
        # The identity comes last: an interrupted removal leaves a run that can be removed.
        for path in sorted(own, key=lambda p: (p.name in ("run.json", ".lock"), p.name)):
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
