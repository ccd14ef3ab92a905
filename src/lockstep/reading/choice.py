"""Which runs of a list, and in which order."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lockstep.errors import ConfigError
from lockstep.parsing import shown
from lockstep.reading.listing import Summary

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
            What a run does not have fulfils `!=` only.
        order: key that they are sorted by, ascending, or descending behind a `-`; those without it
            come last. Without, by when they were started.

    Raises:
        ConfigError: one is no condition, or compares a number with a word.
    """
    tests = [_condition(text) for text in conditions]
    left = [run for run in runs if all(test(run) for test in tests)]
    key = order.removeprefix("-") or "started"
    there = [run for run in left if not _is_missing(run.value(key))]
    missing = [run for run in left if _is_missing(run.value(key))]
    there.sort(key=lambda run: _place(run.value(key)), reverse=order.startswith("-"))
    return there + missing


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _place(value: Any) -> tuple[bool, float, str]:
    """Numbers by their size, before texts."""
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
