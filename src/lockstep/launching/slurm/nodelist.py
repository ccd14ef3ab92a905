"""SLURM's compressed host lists, such as `rack[1-2]node[01-03,07],login`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.errors import EnvironError

_NUMBER = r"\d{1,18}"
_GROUP = rf"\[{_NUMBER}(?:-{_NUMBER})?(?:,{_NUMBER}(?:-{_NUMBER})?)*\]"
_HOST = rf"(?:[^][,\s]|{_GROUP})+"
_LIST = re.compile(rf"{_HOST}(?:,{_HOST})*", re.ASCII)
_SHOWN = 200


@dataclass(frozen=True)
class _Numbers:
    """The numbers `first` to `last`, each written with at least `width` digits."""

    first: int
    last: int
    width: int

    @property
    def size(self) -> int:
        """The number of numbers; may be more than `len` can return."""
        return self.last - self.first + 1

    def __getitem__(self, index: int) -> str:
        return f"{self.first + index:0{self.width}d}"


@dataclass(frozen=True)
class _Hosts:
    """One host of a list with its bracket groups, of which the last varies fastest.

    Attributes:
        texts: texts before, between and after the groups.
        groups: ranges of numbers in each pair of brackets.
    """

    texts: list[str]
    groups: list[list[_Numbers]]

    @property
    def size(self) -> int:
        """The number of hosts."""
        return math.prod(map(_size, self.groups))

    def __getitem__(self, index: int) -> str:
        chosen: list[str] = []
        for group in reversed(self.groups):
            index, place = divmod(index, _size(group))
            chosen.append(_at(group, place))
        pairs = zip(self.texts, [*reversed(chosen), ""], strict=True)
        return "".join(text + number for text, number in pairs)


def expand(nodelist: str) -> Iterator[str]:
    """The hosts of a list, in its order, one at a time (ranges may be long).

    Raises:
        EnvironError: the list is not well-formed.
    """
    for hosts in _parsed(nodelist):
        index = 0
        while index < hosts.size:
            yield hosts[index]
            index += 1


def num_hosts(nodelist: str) -> int:
    """The number of hosts of a list.

    Raises:
        EnvironError: the list is not well-formed.
    """
    return sum(hosts.size for hosts in _parsed(nodelist))


def first_host(nodelist: str) -> str:
    """The first host of a list.

    Raises:
        EnvironError: the list is not well-formed.
    """
    return next(expand(nodelist))


def _parsed(nodelist: str) -> list[_Hosts]:
    entries = []
    if _LIST.fullmatch(nodelist):
        for host in re.finditer(_HOST, nodelist, re.ASCII):
            texts = re.split(_GROUP, host[0], flags=re.ASCII)
            groups = [_group(g) for g in re.findall(_GROUP, host[0], re.ASCII)]
            entries.append(_Hosts(texts, groups))
    if not entries or any(r.size < 1 for hosts in entries for g in hosts.groups for r in g):
        shown = nodelist if len(nodelist) <= _SHOWN else f"{nodelist[:_SHOWN]}…"
        raise EnvironError(
            f"node list {shown!r} is malformed: expected hosts like n1 or n[01-03,07], "
            "separated by commas; set MASTER_ADDR to rank 0's host to do without it"
        )
    return entries


def _group(text: str) -> list[_Numbers]:
    """`[01-03,07]` as ranges: a range's numbers are as wide as its first one."""
    ranges = []
    for item in text[1:-1].split(","):
        first, _, last = item.partition("-")
        ranges.append(_Numbers(int(first), int(last or first), len(first)))
    return ranges


def _size(group: list[_Numbers]) -> int:
    return sum(numbers.size for numbers in group)


def _at(group: list[_Numbers], index: int) -> str:
    for numbers in group:
        if index < numbers.size:
            return numbers[index]
        index -= numbers.size
    raise IndexError(index)
