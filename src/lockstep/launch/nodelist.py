"""SLURM's compressed host lists, such as `rack[1-2]node[01-03,07],login`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep.errors import EnvironError

_GROUP = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOST = rf"(?:[^][,\s]|{_GROUP})+"
_LIST = re.compile(rf"{_HOST}(?:,{_HOST})*", re.ASCII)


def expand(nodelist: str) -> Iterator[str]:
    """The hosts of a list, in its order, one at a time (ranges may be long).

    Raises:
        EnvironError: the list is not well-formed.
    """
    groups = "".join(re.findall(r"\[.*?\]", nodelist))
    ranges = re.findall(r"(\d+)-(\d+)", groups)
    if not _LIST.fullmatch(nodelist) or any(int(last) < int(first) for first, last in ranges):
        raise EnvironError(
            f"node list {nodelist!r} is malformed: expected hosts like n1 or n[01-03,07], "
            "separated by commas; set MASTER_ADDR to rank 0's host to do without it"
        )
    for host in re.finditer(_HOST, nodelist, re.ASCII):
        yield from _expand_host(host[0])


def first_host(nodelist: str) -> str:
    """The first host of a list.

    Raises:
        EnvironError: the list is not well-formed.
    """
    return next(expand(nodelist))


def _expand_host(host: str) -> Iterator[str]:
    """All combinations of the bracket groups of one host; the last group varies fastest."""
    before, bracket, rest = host.partition("[")
    if not bracket:
        yield host
        return
    group, _, after = rest.partition("]")
    for number in _numbers(group):
        for tail in _expand_host(after):
            yield before + number + tail


def _numbers(group: str) -> Iterator[str]:
    """`01-03,07` as 01, 02, 03, 07: a range's numbers are as wide as its first one."""
    for item in group.split(","):
        first, _, last = item.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"
