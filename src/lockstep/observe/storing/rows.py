"""Events as plain data and back: what a line of `events.jsonl` means."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lockstep.config.parsing import shown
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

    `StepDone` has its derived values `samples_per_s` and `compute_efficiency` too. A `Logged` is
    without the content of its picture, and has `value` or `text`.
    """
    row = {"event": type(event).__name__, "time": time, **vars(event)}
    if isinstance(event, StepDone):
        row["samples_per_s"] = event.samples_per_s
        row["compute_efficiency"] = event.compute_efficiency
    elif isinstance(event, Logged):
        del row["png"], row["value" if event.kind == "text" else "text"]
    return row


def event_from_row(row: Mapping[str, Any]) -> Event:
    """The event a row was made of; keys that are no fields of it are passed over.

    Raises:
        RunDirectoryError: the row names no known event or lacks a field: another version
            wrote it.
    """
    name = row.get("event")
    kind = next((kind for kind in _kinds(Event) if kind.__name__ == name), None)
    if kind is None:
        raise RunDirectoryError(f"event {name!r} is not known to this version of lockstep")
    try:
        return _decode(kind, row)  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunDirectoryError(f"event {name}: field missing or wrong: {error}") from None


def dumps(value: Any) -> str:
    """Strict JSON in ASCII, on one line.

    JSON has no NaN and no infinity: they are the strings "NaN", "Infinity" and "-Infinity",
    which `float` reads back. Dataclasses are objects of their fields.
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


def _kinds(kind: type[Event]) -> Iterator[type[Event]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


def _decode(hint: Any, value: Any) -> Any:
    """`value`, as JSON gives it, as the type `hint`.

    Raises:
        KeyError: a field is missing.
        TypeError: a value is of another type.
        ValueError: a text is no number.
    """
    origin, args, form, is_plain = _parts(hint)
    if is_plain:
        if not isinstance(value, form):
            raise TypeError(f"{shown(value)} is not a {getattr(hint, '__name__', hint)}")
        return hint(value) if hint in (float, int) else value
    if isinstance(hint, type) and is_dataclass(hint):
        given = {
            field.name: _decode(kind, value[field.name])
            for field, kind in _fields(hint)
            if field.name in value or field.default is field.default_factory is MISSING
        }
        return hint(**given)
    if hint is Any:
        return _numbers(value)
    if form is not None and not isinstance(value, form):
        raise TypeError(f"{shown(value)} is not a {getattr(hint, '__name__', hint)}")
    if origin is tuple:
        inner = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(_decode(kind, item) for kind, item in zip(inner, value, strict=True))
    if origin is dict:
        return {_decode(args[0], key): _decode(args[1], item) for key, item in value.items()}
    if origin in (Union, UnionType) and value is not None:
        return _decode(next(kind for kind in args if kind is not type(None)), value)
    return hint(value) if hint in (float, int) else value


def _numbers(value: Any) -> Any:
    """Nested lists and objects of numbers, with those that are not finite back from their names."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


_FORMS: Mapping[Any, Any] = MappingProxyType(
    {
        tuple: (list, tuple),
        dict: Mapping,
        str: str,
        bytes: bytes,
        bool: bool,
        int: (int, str),
        float: (int, float, str),
    }
)
"""The types that JSON has for a type, none for bytes; numbers that are not finite are strings."""


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...], Any, bool]:
    """What a type is made of, what JSON has for it, and whether it is a single value.

    Cached, for most of the time of reading a row goes into this.
    """
    origin, form = get_origin(hint), _FORMS.get(get_origin(hint) or hint)
    return origin, get_args(hint), form, origin is None and hint in (str, bool, int, float)


@cache
def _fields(kind: type) -> list[tuple[Field[Any], Any]]:
    """A dataclass's fields and their types; cached, for it takes longer than all the rest."""
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in fields(kind)]
