"""The points of a sweep, and the state of each point's run."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import TrainConfig, outcome
from lockstep.config.parsing import flattened, parse_yaml, shown
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.errors import ConfigError, RunDirectoryError
from lockstep.observe.reading.listing import Summary, is_run, summarise

MOST_POINTS = 10_000
_RANGE = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})", re.ASCII)
_UNSAFE = re.compile(r"[^\w.,=+-]")
_MOST_BYTES = 120
_CLOSING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Point:
    """One config of a sweep.

    Attributes:
        name: name of its run directory; depends on the values of the keys that vary, and on
            nothing else, so that a sweep with more points finds the runs of a smaller one.
        items: `key=value` items, of keys that vary and of the others.
    """

    name: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """All points of a sweep.

    Attributes:
        keys: keys that have several values.
        points: points in the order of the values, the last key varying first.
    """

    keys: tuple[str, ...]
    points: tuple[Point, ...]


def grid(items: Sequence[str]) -> Grid:
    """The points of `key=value` items, where a value may be several with commas between them.

    Commas in quotes and brackets belong to a value; `0..4` stands for 0,1,2,3,4.

    Raises:
        ConfigError: an item has no `=` or an empty value, a key comes twice, two points are the
            same, or there are too many.
    """
    values: dict[str, list[str]] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"{shown(item)} is not of the form key=value")
        if key in values:
            raise ConfigError(f"{key}: comes twice; give all its values at once, {key}=1,2")
        values[key] = _values(key, text)
    number = 1
    for key, texts in values.items():
        number *= len(texts)
        if number > MOST_POINTS:
            raise ConfigError(f"{key}: more than {MOST_POINTS:,} points; sweep over fewer values")
    keys = tuple(key for key, texts in values.items() if len(texts) > 1)
    points = []
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        varied = [f"{key}={chosen[key]}" for key in keys]
        points.append(Point(_name(varied), tuple(f"{k}={v}" for k, v in chosen.items())))
    return Grid(keys, tuple(points))


def _values(key: str, text: str) -> list[str]:
    """The values of a key, as texts.

    Raises:
        ConfigError: one is empty, is no YAML, or comes twice.
    """
    texts = [one for part in _parts(key, text) for one in _expanded(key, part)]
    if len(texts) == 1:
        return texts  # may be empty, which is YAML's null
    known: dict[str, str] = {}
    for one in texts:
        if not one:
            raise ConfigError(f"{key}={shown(text)[1:-1]}: a value is empty; write null or ''")
        try:
            canonical = json.dumps(parse_yaml(one), sort_keys=True, default=str)
        except ValueError as error:
            raise ConfigError(f"{key}: {shown(one)} is not a YAML value: {error}") from None
        if canonical in known:
            raise ConfigError(f"{key}: {one} comes twice (also as {known[canonical]})")
        known[canonical] = one
    return texts


def _expanded(key: str, text: str) -> list[str]:
    """The numbers of a range `FIRST..LAST`, or the text itself."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    first, last = int(match[1]), int(match[2])
    if not 0 <= last - first < MOST_POINTS:
        raise ConfigError(
            f"{key}={text}: must be FIRST..LAST with FIRST <= LAST, of at most {MOST_POINTS:,}"
        )
    return [str(number) for number in range(first, last + 1)]


def _parts(key: str, text: str) -> list[str]:
    """A text cut at the commas that are in no quotes and in no brackets, without outer spaces.

    Raises:
        ConfigError: a quote or bracket is not closed.
    """
    parts, closing, quote, is_escaped = [""], [""], "", False
    for char in text:
        if char == "," and not quote and len(closing) == 1:
            parts.append("")
            continue
        # As in YAML, an apostrophe in the middle of a word is no quote.
        is_first = not parts[-1].strip() or parts[-1].rstrip()[-1] in "[{(,:"
        parts[-1] += char
        if quote:
            is_end = char == quote and not is_escaped
            is_escaped = quote == '"' and char == "\\" and not is_escaped
            quote = "" if is_end else quote
        elif char in "'\"" and is_first:
            quote = char
        elif char in _CLOSING:
            closing.append(_CLOSING[char])
        elif char == closing[-1]:
            closing.pop()
    if quote or len(closing) > 1:
        raise ConfigError(f"{key}={shown(text)[1:-1]}: {quote or closing[-1]} is missing")
    return [part.strip() for part in parts]


def _name(varied: Sequence[str]) -> str:
    """A folder's name for the values of the keys that vary."""
    text = ",".join(varied) or "run"
    name = _UNSAFE.sub("_", text)
    short = name.encode()[:_MOST_BYTES].decode(errors="ignore")
    if short == text:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:10]
    return f"{short}-{digest}"


_LENGTH = ("epochs", "steps")
"""Keys by which a run may be extended."""
_RELEVANT = ("test_on", "weights_from.path", "weights_from.step")
"""Keys that cannot change the parameters, but are part of what the run is."""
_MOST_SHOWN = 5
_NOT_SET = "not set"


def state_of(path: Path, items: Sequence[str], config: TrainConfig | None) -> str:
    """The state of a point's run; `new` if there is none.

    Args:
        path: its run directory.
        items: `key=value` items of the point.
        config: config of the point; None for a script, which has a config only when it runs.

    Raises:
        RunDirectoryError: there is a run that has trained with other values.
    """
    if not is_run(path):
        return "new"
    run = summarise(path)
    if not run.step:  # perhaps its values made it fail
        return run.state
    there, here = _of_script(path, items) if config is None else _of_task(run, config)
    others = [k for k in {**there, **here} if there.get(k, _NOT_SET) != here.get(k, _NOT_SET)]
    free = {*_LENGTH, *_without_effect()}
    refused = [k for k in others if k not in free]
    if refused:
        differences = ", ".join(
            f"{k} is {_value_text(there, k)} there, {_value_text(here, k)} here"
            for k in refused[:_MOST_SHOWN]
        )
        raise RunDirectoryError(
            f"{path}: is a run with other values: {differences}; choose another with --dir"
        )
    if run.state == "completed" and not {*_LENGTH}.isdisjoint(others):
        return "of another length"
    return run.state


def _of_task(run: Summary, config: TrainConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of a run and of a point, of the keys that both have."""
    here = flattened(config.model_dump(mode="json"))
    both = run.config.keys() & here.keys()
    return {k: run.config[k] for k in here if k in both}, {k: here[k] for k in here if k in both}


def _of_script(path: Path, items: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values that a script's run was started with, and a point's; both empty if it is not known."""
    try:
        known = RunDirectory(path).identity().overrides
    except RunDirectoryError:
        return {}, {}
    return _values_of(known), _values_of(items)


def _values_of(items: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, _, text in (item.partition("=") for item in items):
        try:
            values[key] = parse_yaml(text)
        except ValueError:  # the script will say so
            values[key] = text
    return values


def _without_effect() -> set[str]:
    """Keys that only control how a run is computed and shown."""
    config = TrainConfig()
    every, relevant = flattened(config.model_dump()), flattened(outcome(config))
    return {*every} - {*relevant, *_RELEVANT}


def _value_text(values: Mapping[str, Any], key: str) -> str:
    return shown(values[key]) if key in values else _NOT_SET
