from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import EnvironError
from lockstep.launching.rank.environment import first_host, num_hosts


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("a1", ["a1"]),
        ("login.cluster.org", ["login.cluster.org"]),
        ("a1,b[1-2]", ["a1", "b1", "b2"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("n[01-03,07]", ["n01", "n02", "n03", "n07"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[5]", ["n5"]),
        ("n5-2,n5-1", ["n5-2", "n5-1"]),
        ("rack[1-2]node[3-4]", ["rack1node3", "rack1node4", "rack2node3", "rack2node4"]),
        ("r[1-2]n[3,5]-x,z", ["r1n3-x", "r1n5-x", "r2n3-x", "r2n5-x", "z"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_the_first_host_and_the_number_of_hosts(nodelist: str, hosts: list[str]) -> None:
    assert (first_host(nodelist), num_hosts(nodelist)) == (hosts[0], len(hosts))


@pytest.mark.parametrize(
    "nodelist",
    [
        "",
        ",",
        "a,",
        ",a",
        "a,,b",
        "n[",
        "n]",
        "n[]",
        "n[1",
        "n[1-]",
        "n[-1]",
        "n[2-1]",
        "n[a-b]",
        "n[1,]",
        "n[[1]]",
        "n[1]]",
        "a b",
        "n[1-2-3]",
        "n[٣]",
        "n[1 ]",
        "n[1-" + "9" * 5000 + "]",
        "n" + "[" * 5000 + "1" + "]" * 5000,
    ],
)
def test_refuses(nodelist: str) -> None:
    for ask in (first_host, num_hosts):
        with pytest.raises(EnvironError, match="malformed"):
            ask(nodelist)


def test_long_ranges_cost_nothing() -> None:
    assert first_host("n[1-999999999999],b") == "n1"
    assert num_hosts("a[1-99999999][1-3],b,c[7]") == 3 * 99_999_999 + 2
    assert num_hosts("n" + "[1-999999999999]" * 9) == 999_999_999_999**9


def test_many_groups_cost_no_recursion() -> None:
    nodelist = "n" + "[1-2]" * 2000
    assert first_host(nodelist) == "n" + "1" * 2000
    assert num_hosts(nodelist) == 2**2000


names = st.text("abcxyz-._", min_size=1, max_size=5)
ranges = st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(1, 4))
groups = st.lists(ranges, min_size=1, max_size=3)
hosts = st.lists(st.tuples(names, groups), max_size=2)


def write(first: int, length: int, width: int) -> str:
    return f"{first:0{width}d}-{first + length}" if length else f"{first:0{width}d}"


@given(st.lists(st.tuples(hosts, names), min_size=1, max_size=4))
def test_what_was_compressed_is_read(parts: list[tuple[list[tuple[str, list]], str]]) -> None:
    nodelist = ",".join(
        "".join(f"{name}[{','.join(write(*r) for r in group)}]" for name, group in host) + suffix
        for host, suffix in parts
    )
    expected = []
    for host, suffix in parts:
        choices = [
            [
                f"{name}{number:0{width}d}"
                for first, length, width in group
                for number in range(first, first + length + 1)
            ]
            for name, group in host
        ]
        expected += ["".join(choice) + suffix for choice in product(*choices)]
    assert (first_host(nodelist), num_hosts(nodelist)) == (expected[0], len(expected))


@given(st.text("ab1-[],٣ "))
def test_finds_hosts_or_refuses(nodelist: str) -> None:
    try:
        host = first_host(nodelist)
    except EnvironError:
        return
    assert host
    assert not set(host) & set("[], ")
    assert num_hosts(nodelist) >= 1
