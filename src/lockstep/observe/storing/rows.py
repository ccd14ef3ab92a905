"""Events as rows of plain data and back: what a line of `events.jsonl` holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lockstep.engine.events import Evaluated, Event, Logged, StepDone
from lockstep.errors import RunDirectoryError


def scalars_of(event: Event) -> dict[str, float]:
    """The values of a `StepDone`, an `Evaluated` or a `Logged` scalar, by name; else none."""
    if isinstance(event, StepDone):
        return {
            "train/loss": event.loss,
            **{f"train/{name}": value for name, value in event.metrics.items()},
            "train/lr": event.lr,
            "train/grad_norm": event.grad_norm,
            "time/samples_per_s": event.samples_per_s,
            "time/compute_efficiency": event.compute_efficiency,
        }
    if isinstance(event, Evaluated):
        return {f"{event.split}/{name}": value for name, value in event.metrics.items()}
    if isinstance(event, Logged) and event.kind == "scalar":
        return {f"log/{event.name}": event.value}
    return {}


def row_of(event: Event, time: float) -> dict[str, Any]:
    """The event's class name as `event`, `time` (Unix seconds), then its fields.

    That of a `StepDone` also has its derived `samples_per_s` and `compute_efficiency`. That of a
    `Logged` has `value` or `text`, but not the content of its picture.
    """
    row = {"event": type(event).__name__, "time": time, **vars(event)}
    if isinstance(event, StepDone):
        row["samples_per_s"] = event.samples_per_s
        row["compute_efficiency"] = event.compute_efficiency
    elif isinstance(event, Logged):
        del row["png"], row["value" if event.kind == "text" else "text"]
    return row


def event_from_row(row: Mapping[str, Any]) -> Event:
    """The event that a row was made of; keys that are not fields of it are ignored.

    Raises:
        RunDirectoryError: the row names no known event or lacks a field: another version
            wrote it.
    """
    name = row.get("event")
    kinds: dict[str, type] = {kind.__name__: kind for kind in _kinds(Event)}
    kind = kinds.get(str(name))
    if kind is None:
        raise RunDirectoryError(f"event {name!r} is not known to this version of lockstep")
    if "png" in row:
        raise RunDirectoryError(f"event {name}: png: a row must not hold a picture")
    values = {**row, **{key: _numbers(row[key]) for key in _OF_ANY_TYPE & row.keys()}}
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise RunDirectoryError(
            f"event {name}: field missing or wrong: {field}: {first['msg']}"
        ) from None


def _kinds(kind: type[Event]) -> Iterator[type[Event]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


_OF_ANY_TYPE = {"arrays", "value"}
"""Fields of events in which numbers that are not finite may be anywhere."""


def _numbers(value: Any) -> Any:
    """Nested lists and objects with numbers for the names of those that are not finite."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


@cache
def _adapter(kind: type) -> TypeAdapter[Event]:
    """Makes events of a kind; cached, since it takes milliseconds to build."""
    return TypeAdapter(kind)


def dumps(value: Any) -> str:
    """Strict JSON in ASCII, on one line.

    NaN and infinities, which JSON lacks, become the strings "NaN", "Infinity" and "-Infinity",
    which `float` reads. Dataclasses become objects of their fields.
    """
    try:
        return json.dumps(value, allow_nan=False, default=vars)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
