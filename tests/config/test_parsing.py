from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.parsing import (
    MAX_DEPTH,
    as_type,
    parse_float,
    parse_int,
    parse_json,
    parse_object,
    parse_yaml,
    shown,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(VALUES)
@settings(deadline=None, max_examples=100)
def test_what_python_writes_as_json_comes_back(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested more than"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "nested more than"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than"),
        ("9" * 5000, "a number of 5,000 digits"),
        ("-" + "9" * 400, "a number of 401 digits"),
        ("1e999", "1e999 is more than any float can hold"),
        ("0." + "1" * 5000, "a number of"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' comes twice"),
        ("", "Expecting value"),
        (b"\xff", "can't decode byte"),
        ("\0", "Expecting value"),
        ("1 2", "Extra data"),
    ],
)
def test_bad_json_is_one_short_value_error(text: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_not_finite_numbers_of_python_are_json() -> None:
    assert parse_json("[Infinity, -Infinity]") == [math.inf, -math.inf]
    assert math.isnan(parse_json("NaN"))


def test_only_an_object_is_an_object() -> None:
    assert parse_object('{"a": 1}') == {"a": 1}
    with pytest.raises(ValueError, match="not a JSON object but a list"):
        parse_object("[]")


@given(VALUES)
@settings(deadline=None, max_examples=100)
def test_what_pyyaml_writes_comes_back(value: Any) -> None:
    assert parse_yaml(yaml.safe_dump(value)) == yaml.safe_load(yaml.safe_dump(value))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "anchors and aliases"),
        (MERGES, "anchors and aliases"),
        ("<<: {a: 1}", "merge keys"),
        ("a: 1\nb: 2\na: 3", "the key 'a' comes twice in line 3"),
        ("{1: a, 1.0: b}", "comes twice"),
        ("a: " + "9" * 5000, "a number of 5,000 characters"),
        ("a: 0x" + "f" * 5000, "a number of"),
        ("a: " + "1:" * 5000 + "1", "a number of"),
        ("a: " + "1:" * 5000 + "1.5", "a number of"),
        ("a: 1.0e+999", "more than any float"),
        ("[" * 100_000, "nested more than"),
        ("- " * 10_000, "nested more than"),
        ("? " * 10_000, "nested more than"),
        ("x" * 1_000_000, "longer than"),
        ("!!python/object/apply:os.system [ls]", "tags"),
        ("!!int ''", "tags"),
        ("a: !x y", "tags"),
        ("[a", "expected ',' or ']'"),
        ("a: 2024-99-99", "month must be in"),
        ("{[1]: 2}", "a key that is"),
        ("\x00", "special characters are not allowed"),
        ("a: =", "could not determine a constructor"),
        ("--- 1\n--- 2", "expected a single document|but found another document"),
    ],
)
def test_bad_yaml_is_one_short_value_error(text: str, reason: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ValueError, match=reason) as caught:
        parse_yaml(text)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - started < 5


def test_yaml_of_everyday_is_read() -> None:
    text = "a: [1, -2.5e-3, .inf, yes, null, 'x']\nb: {c: {d: 0x1f}}\ne: 2024-01-01\n"
    assert parse_yaml(text) == yaml.safe_load(text)


@dataclass(frozen=True)
class Point:
    x: int
    y: float = 0.0
    names: tuple[str, ...] = ()
    more: dict[str, list[float]] = field(default_factory=dict)


def test_a_type_is_filled_from_json() -> None:
    assert as_type(Point, {"x": 1, "y": 2, "names": ["a"], "more": {"b": [1.5]}}) == Point(
        1, 2.0, ("a",), {"b": [1.5]}
    )
    assert math.isinf(as_type(Point, {"x": 1, "y": math.inf}).y)
    assert as_type(int, 2**70) == 2**70


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "field 'x'"),
        ({"x": "1"}, "x='1': "),
        ({"x": 1.0}, "x=1.0: "),
        ({"x": True}, "x=True: "),
        ({"x": None}, "x=None: "),
        ({"x": 1, "names": ["a", 3]}, "names.1=3: "),
        ({"x": 1, "more": {"b": [[]]}}, r"more.b.0=\[\]: "),
        ([], "must be an object"),
    ],
)
def test_what_does_not_fit_a_type_is_named(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        as_type(Point, value)


@pytest.mark.parametrize("text", ["", "x", "1.5", "²", "١", "1_0", "0x1", "--1", "+", "9" * 5000])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a whole number|is more than") as caught:
        parse_int(text)
    assert len(str(caught.value)) < 300


def test_texts_that_are_no_unicode_come_back() -> None:
    """So do names of files that are not UTF-8."""
    name = b"r\xe9n".decode("utf-8", "surrogateescape")
    assert as_type(tuple[str, ...], parse_json(json.dumps([name]))) == (name,)


def test_whole_numbers_have_bounds() -> None:
    assert (parse_int(" 007 "), parse_int("-5", least=-5), parse_int("+3")) == (7, -5, 3)
    with pytest.raises(ValueError, match="'-1' is less than 0"):
        parse_int("-1")
    with pytest.raises(ValueError, match="is less than"):
        parse_int("-" + "9" * 5000, least=-(2**63))
    with pytest.raises(ValueError, match="'8' is more than 7"):
        parse_int("8", most=7)


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "1e999", "١"])
def test_what_is_no_finite_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a finite number"):
        parse_float(text)


def test_long_values_are_shown_short() -> None:
    assert shown("abc") == "'abc'"
    assert shown([1, "b"]) == "[1, 'b']"
    for value in ("x" * 10**7, [["y" * 1000] * 1000] * 1000, dict.fromkeys(range(999), "z" * 99)):
        assert len(shown(value)) <= 400
