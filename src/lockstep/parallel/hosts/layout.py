"""Pure arithmetic: which ranks share a host, the nodes of a host, and who works on which elements.

Every host has a place for each element, a rank of its own that adds up the host's nodes there. The
rank that owns the element gets one sum of each host from there, and gives the finished one back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from lockstep.parallel.arena import BLOCK
from lockstep.parallel.layout import Node, Range, merges, split


def ranks_of_hosts(hosts: Sequence[str]) -> list[Range] | str:
    """The ranks of each host, or why sums are not made host by host; empty if there is one host.

    Args:
        hosts: what the host of each rank is called.
    """
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    if len(runs) == 1:
        return ""
    if len(runs) == len(hosts):
        return "no two ranks that follow each other share a host"
    if len(runs) > len(set(hosts)):
        return "ranks of one host do not follow each other"
    ranges, first = [], 0
    for _, num in runs:
        ranges.append(Range(first, first + num))
        first += num
    return ranges


class Merged(NamedTuple):
    """What the nodes of a host's ranks become.

    Attributes:
        nodes: nodes that are left.
        runs: for each of them, the range of the ranks' nodes that it is the sum of.
        plans: for each of them, how many additions follow each of those.
    """

    nodes: list[Node]
    runs: list[Range]
    plans: list[list[int]]


def host_nodes(nodes: Sequence[Node], num_leaves: int) -> Merged:
    """Add up the nodes of a host as far as the canonical tree allows.

    Args:
        nodes: nodes of the host's ranks, from left to right.
        num_leaves: number of leaves of the whole tree.
    """
    counts, left = merges(nodes, num_leaves)
    # Where those that are left begin: an addition ends the run of its right operand.
    starts: list[int] = []
    for number, count in enumerate(counts):
        starts.append(number)
        del starts[len(starts) - count :]
    runs = [Range(*pair) for pair in pairwise([*starts, len(counts)])]
    return Merged(left, runs, [counts[run.slice] for run in runs])


def shares(slices: Sequence[Range], hosts: Sequence[Range]) -> list[list[Range]]:
    """The elements that each rank works on for its host.

    Args:
        slices: elements of a segment that each rank owns: whole blocks, in order.
        hosts: the ranks of each host.

    Returns:
        For each rank and each host, which of the elements that the ranks of that host own. Of its
        own host's, these are the elements that it owns itself.
    """
    regions = [Range(slices[h.first].first, slices[h.last - 1].last) for h in hosts]
    found: list[list[Range]] = []
    for host in hosts:
        parts = [split(len(region) // BLOCK, len(host)) for region in regions]
        for number in range(len(host)):
            found.append(
                [
                    Range(region.first + own.first * BLOCK, region.first + own.last * BLOCK)
                    for region, own in zip(regions, (p[number] for p in parts), strict=True)
                ]
            )
    return found


def overlap(one: Range, other: Range) -> Range:
    """What two ranges have in common; where that is nothing, an empty range inside of the first."""
    first = min(max(one.first, other.first), one.last)
    return Range(first, max(first, min(one.last, other.last)))


def parts_of(slices: Sequence[Range], start: int, length: int) -> list[Range]:
    """Of each slice, the elements from `start` on, at most `length` of them."""
    return [
        Range(min(s.first + start, s.last), min(s.first + start + length, s.last)) for s in slices
    ]


class Cut(NamedTuple):
    """Elements of a segment that travel at a time.

    Attributes:
        worked: for each rank of this host, those that it works on, by the rank that owns them.
        own: those that this rank owns.
        given: of these, those that each rank works on.
    """

    worked: list[list[Range]]
    own: Range
    given: list[Range]


def cut(parts: Sequence[Range], hosts: Sequence[Range], slices: Sequence[Range], rank: int) -> Cut:
    """What a rank and those of its host have to do with parts of the ranks' slices.

    Args:
        parts: of each rank's slice, the elements that are meant.
        hosts: the ranks of each host.
        slices: elements that each rank owns.
        rank: the rank.
    """
    host_of = [number for number, ranks in enumerate(hosts) for _ in range(len(ranks))]
    by_rank = shares(slices, hosts)
    worked = [
        [overlap(by_rank[q][host_of[r]], part) for r, part in enumerate(parts)]
        for q in range(*hosts[host_of[rank]])
    ]
    given = [overlap(own[host_of[rank]], parts[rank]) for own in by_rank]
    return Cut(worked, parts[rank], given)
