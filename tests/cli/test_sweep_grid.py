"""The points of a sweep, from `key=value,value` items."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.start.sweep_grid import grid
from lockstep.errors import ConfigError


def items(*given: str) -> list[tuple[str, ...]]:
    return [point.items for point in grid(given).points]


def test_all_combinations_in_order() -> None:
    assert items("lr=1,2", "a=x", "w=3,4") == [
        ("lr=1", "a=x", "w=3"), ("lr=1", "a=x", "w=4"),
        ("lr=2", "a=x", "w=3"), ("lr=2", "a=x", "w=4"),
    ]  # fmt: skip
    assert grid(["lr=1,2", "a=x", "w=3,4"]).keys == ("lr", "w")
    assert [p.name for p in grid(["lr=1,2", "a=x"]).points] == ["lr=1", "lr=2"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0..3", ["0", "1", "2", "3"]),
        ("-1..1,7", ["-1", "0", "1", "7"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        (r'"a\",b",c', [r'"a\",b"', "c"]),
        ("{a: [1, 2], b: ')'},null", ["{a: [1, 2], b: ')'}", "null"]),
        ("it's,isn't", ["it's", "isn't"]),
        ("['x, y', z],w", ["['x, y', z]", "w"]),
        (" 1 , 2 ", ["1", "2"]),
        ("", [""]),
        ("a=b", ["a=b"]),
    ],
)
def test_values(text: str, values: list[str]) -> None:
    assert [item[0] for item in items(f"k={text}")] == [f"k={value}" for value in values]


@pytest.mark.parametrize(
    ("given_items", "message"),
    [
        (["lr"], "is not of the form key=value"),
        (["=1"], "is not of the form key=value"),
        (["lr=1,1"], "lr: 1 comes twice"),
        (["lr=1,'1',1.0e0,0x1"], "comes twice"),
        (["lr=1", "lr=2"], "lr: comes twice"),
        (["lr=1,,2"], "a value is empty"),
        (["lr=[1,2"], "] is missing"),
        (["lr='1,2"], "' is missing"),
        (["lr=3..1"], "FIRST <= LAST"),
        (["lr=0..99999999"], "FIRST <= LAST"),
        (["a=0..999", "b=0..99"], "more than 10,000 points"),
        (["a=1,[2}"], "is missing"),
    ],
)
def test_what_is_no_grid(given_items: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grid(given_items)
    assert message in str(caught.value)


@given(st.lists(st.text(), min_size=2, max_size=5))
def test_names_are_of_one_folder_and_differ(texts: list[str]) -> None:
    try:
        points = grid([f"key={','.join(texts)}"]).points
    except ConfigError:
        return
    names = [point.name for point in points]
    assert len({*names}) == len(names)
    for name in names:
        assert name.isprintable()
        assert "/" not in name
        assert len(name.encode()) <= 255
        assert name not in ("", ".", "..")


def test_a_point_keeps_its_name_when_the_grid_grows() -> None:
    small, large = grid(["lr=1,2"]), grid(["lr=0,1,2,3"])
    assert {p.name for p in small.points} < {p.name for p in large.points}


def test_a_long_name_fits_into_a_folder_in_bytes() -> None:
    for long in ("a" * 300, "や" * 100):
        names = [point.name for point in grid([f"key={long},b"]).points]
        assert names[1] == "key=b"
        assert len(f"{names[0]}.log".encode()) <= 255
        assert names[0].startswith("key=" + long[:30])
