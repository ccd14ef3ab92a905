"""Reading external text: JSON, YAML and numbers that may be wrong, hostile or truncated.

Every function raises `ValueError` with a message of one line, whatever the text is, and takes time
and memory in proportion to its length. Callers add which file or variable it comes from; only
`option_numbers` knows that itself.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from lockstep.errors import ConfigError

MAX_DEPTH = 64
"""Levels of nesting. Nothing that is read has more than ten; Python itself gives up near 1,000."""

MAX_DIGITS = 300
"""Digits of a number: with fewer, every integer can be converted to a float."""

MAX_SHOWN = 400
"""Characters of a value in a message."""

MAX_YAML_CHARS = 256 << 10
"""About two seconds' work for PyYAML."""

T = TypeVar("T")


_SHORT = 60
"""Characters of a value that are shown where two of them differ late."""
_BEFORE = 20
"""Characters before the difference that are shown."""


def shown(value: Any) -> str:
    """`repr(value)` for a message, with the middle left out where it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 120
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = 8
    text = short.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 40]}...{text[-37:]}"


def shown_apart(one: Any, other: Any) -> tuple[str, str]:
    """Two values for a message that shows where they differ.

    Where their usual texts are equal, or long, the common beginning is left out.
    """
    texts = shown(one), shown(other)
    whole = repr(one), repr(other)
    if texts[0] != texts[1] and max(map(len, texts)) <= _SHORT:
        return texts
    apart = (i for i, (a, b) in enumerate(zip(*whole, strict=False)) if a != b)
    common = next(apart, min(map(len, whole)))
    if common <= _BEFORE:
        return texts
    first = common - _BEFORE
    parts = [text[first : first + _SHORT] for text in whole]
    cut = [first + _SHORT < len(text) for text in whole]
    shorts = [f"...{p}{'...' if c else ''}" for p, c in zip(parts, cut, strict=True)]
    return shorts[0], shorts[1]


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    NaN and infinities are accepted in the spelling that Python's `json` writes.

    Raises:
        ValueError: it is not JSON, names a key twice, or holds a number with more than
            `MAX_DIGITS` digits, a finite number that no float can hold, or more than `MAX_DEPTH`
            levels.
    """
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_int=lambda digits: int(_short(digits)),
            parse_float=_finite_float,
        )  # fmt: skip
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    _check_depth(value)
    return value


def parse_object(text: str | bytes) -> dict[str, Any]:
    """As `parse_json`, of a JSON object.

    Raises:
        ValueError: as `parse_json`, or it is no object.
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but a {type(value).__name__}")
    return value


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, of the part of YAML that configs need.

    Anchors, aliases and merge keys are refused, since a few bytes with them stand for gigabytes;
    so are tags.

    Raises:
        ValueError: it is not such YAML, names a key twice, is longer than `MAX_YAML_CHARS`, or
            holds a number with more than `MAX_DIGITS` digits or more than `MAX_DEPTH` levels.
    """
    if len(text) > MAX_YAML_CHARS:
        raise ValueError(f"longer than {MAX_YAML_CHARS:,} characters")
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem or error.context}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except OverflowError as error:  # of dates near the year 1
        raise ValueError(str(error)) from None


def flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """The values in nested dicts, by their keys joined by dots."""
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    return {
        k: v
        for key, value in values.items()
        for k, v in flattened(value, f"{prefix}{key}.").items()
    }


_MODULES = re.compile(r"\b(?:\w+\.)+(?=\w)")
"""Module names in front of the names of types."""


def as_type(kind: type[T], value: Any) -> T:
    """`value`, as returned by `parse_json`, as the type `kind`; only int is converted, to float.

    Args:
        kind: a dataclass, or a type built of lists, tuples, dicts, unions, literals, numbers and
            texts.
        value: value as JSON has it: objects for dataclasses, lists for tuples.

    Raises:
        ValueError: names the first field that is missing, unknown or does not fit.
    """
    fitted: T = _fit(kind, value, "")
    return fitted


def _fit(kind: Any, value: Any, place: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    inner = f"{place}." if place else ""
    if is_dataclass(kind) and isinstance(value, dict):
        return _fit_fields(kind, value, inner)
    if origin in (list, tuple) and isinstance(value, list):
        is_fixed = origin is tuple and args[-1] is not Ellipsis
        if not is_fixed or len(value) == len(args):
            kinds = args if is_fixed else [args[0]] * len(value)
            pairs = enumerate(zip(kinds, value, strict=True))
            return origin(_fit(k, item, f"{inner}{i}") for i, (k, item) in pairs)
    if origin is dict and isinstance(value, dict):
        return {
            key: _fit(args[1], item, f"{inner}{shown(key)[1:-1]}") for key, item in value.items()
        }
    if origin in (Union, UnionType):
        for option in args:
            with suppress(ValueError):
                return _fit(option, value, place)
    is_scalar = kind in (bool, int, str, NoneType) and type(value) is kind
    if kind is Any or is_scalar or (origin is Literal and value in args and type(value) is str):
        return value
    if kind is float and type(value) in (int, float):
        return float(value)
    name = getattr(kind, "__name__", "") if origin is None and not is_dataclass(kind) else str(kind)
    wanted = "an object" if is_dataclass(kind) else _MODULES.sub("", name)
    raise ValueError(f"{f'{place}=' if place else ''}{shown(value)}: must be {wanted}")


def _fit_fields(kind: Any, values: dict[str, Any], inner: str) -> Any:
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}
    for name in values:
        if name not in known:
            raise ValueError(f"field {shown(inner + name)}: is not known to this version")
    for name, field in known.items():
        if name not in values and field.default is field.default_factory is MISSING:
            raise ValueError(f"field {shown(inner + name)}: is missing")
    return kind(**{n: _fit(hints[n], item, f"{inner}{n}") for n, item in values.items()})


def parse_int(text: str, *, least: int = 0, most: int = 2**63 - 1) -> int:
    """A whole number in ASCII digits, perhaps with a sign.

    Raises:
        ValueError: the text is not one, or the number is not in [least, most].
    """
    text = text.strip()
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"{shown(text)} is not a whole number")
    value = int(text) if len(digits) <= MAX_DIGITS else math.inf
    if text.startswith("-") and value == math.inf:
        value = -math.inf
    if value < least:
        raise ValueError(f"{shown(text)} is less than {least}")
    if value > most:
        raise ValueError(f"{shown(text)} is more than {most}")
    return int(value)


def option_numbers(option: str, text: str, most: int) -> list[int]:
    """The different numbers of an option's text, with commas between them; ascending.

    Args:
        option: name of the option, such as `--ranks`.
        text: what is given.
        most: greatest number that there may be.

    Raises:
        ConfigError: one of them is no whole number from 1 to `most`.
    """
    try:
        return sorted({parse_int(part, least=1, most=most) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(
            f"{option} {shown(text)[1:-1]}: must be whole numbers from 1 to {most:,} with commas "
            f"between them: {error}"
        ) from None


def parse_float(text: str) -> float:
    """A finite number.

    Raises:
        ValueError: the text is not one.
    """
    try:
        value = float(text) if text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is not a finite number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} comes twice")
    return values


def _short(digits: str) -> str:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return digits


def _finite_float(text: str) -> float:
    value = float(_short(text))
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is more than any float can hold")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


class _PlainLoader(yaml.SafeLoader):
    """Maps, lists and scalars only."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._refused("anchors and aliases (& and *) are not supported", event)
        if event.tag is not None:
            raise self._refused(f"tags ({shown(event.tag)}) are not supported", event)
        if self._depth >= MAX_DEPTH:
            raise self._refused(f"nested more than {MAX_DEPTH} levels deep", event)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if node.tag.endswith((":int", ":float")) and len(value) > MAX_DIGITS:
            raise self._refused(f"a number of {len(value):,} characters", node)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise self._refused("merge keys (<<) are not supported", key)
            name = self.construct_object(key, deep=True)
            if not isinstance(name, Hashable):
                raise self._refused("a key that is a map or a list", key)
            if name in seen:
                raise self._refused(f"the key {shown(name)} comes twice", key)
            seen.add(name)
        return super().construct_mapping(node, deep)

    def construct_float(self, node: yaml.ScalarNode) -> float:
        value = self.construct_yaml_float(node)
        if math.isinf(value) and "inf" not in str(node.value).lower():
            raise self._refused(f"{str(node.value)[:40]} is more than any float can hold", node)
        return value

    @staticmethod
    def _refused(problem: str, place: Any) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


_PlainLoader.add_constructor("tag:yaml.org,2002:float", _PlainLoader.construct_float)
