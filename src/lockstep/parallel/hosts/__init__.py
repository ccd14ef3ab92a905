"""Sums of gradients host by host: what ranks of a host add up among themselves does not travel.

The ranks of a host hold a contiguous range of microbatches, if ranks are numbered host by host. So
their nodes can be added up along the canonical tree as far as it allows, and what is left are the
nodes of the host's range: one if it is aligned, at most 2 log2 M. These alone go to other hosts.
The additions are those of the tree, operand by operand, so the bits are, too.

Every host has a place for each element, a rank of its own that adds up the host's nodes there. The
rank that owns the element gets one sum of each host from there, and gives the finished one back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from lockstep.comm.shared_memory import hosts_of
from lockstep.comm.transport import Transport
from lockstep.parallel.exchange import Exchange
from lockstep.parallel.fold import Row, split_blocks
from lockstep.parallel.layout import Node, Range, consecutive, merges


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
    return consecutive([num for _, num in runs])


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


def shares(slices: Sequence[Range], hosts: Sequence[Range], own: Range) -> list[list[Range]]:
    """The elements that each rank of a host works on for it.

    Args:
        slices: elements of a segment that each rank owns: whole blocks, in order.
        hosts: the ranks of each host.
        own: those of the host that is meant.

    Returns:
        For each of its ranks and each host, which of the elements that the ranks of that host own.
        Of its own host's, these are the elements that it owns itself.
    """
    parts = [split_blocks(_region(slices, host), len(own)) for host in hosts]
    return [[part[number] for part in parts] for number in range(len(own))]


def _region(slices: Sequence[Range], host: Range) -> Range:
    """The elements that the ranks of a host own."""
    return Range(slices[host.first].first, slices[host.last - 1].last)


class Cut(NamedTuple):
    """Elements of a segment that travel at a time.

    Attributes:
        worked: for each rank of this host, those that it works on, in order; no empty ranges.
        taken: those that this rank works on, by the rank that owns them.
        own: those that this rank owns.
        given: of these, those that each rank works on.
    """

    worked: list[list[Range]]
    taken: list[Range]
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
    own = next(ranks for ranks in hosts if rank in range(*ranks))
    by_rank = shares(slices, hosts, own)
    worked, taken = [], [_NOTHING]
    for number, of_hosts in enumerate(by_rank):
        by_owner = [
            _common(share, part)
            for ranks, share in zip(hosts, of_hosts, strict=True)
            for part in parts[ranks.slice]
        ]
        worked.append([part for part in by_owner if part is not _NOTHING])
        if number == rank - own.first:
            taken = by_owner
    # Of each other host, the parts of this one's region alone: all of them would be too many.
    region, mine = _region(slices, own), parts[rank]
    by_size = {num: split_blocks(region, num) for num in set(map(len, hosts))}
    given = [_common(share, mine) for ranks in hosts for share in by_size[len(ranks)]]
    return Cut(worked, taken, mine, given)


_NOTHING = Range(0, 0)
"""One for all: among many ranks, most have nothing for one another at a time."""


def _common(one: Range, other: Range) -> Range:
    first, last = max(one.first, other.first), min(one.last, other.last)
    return Range(first, last) if first < last else _NOTHING


@dataclass(frozen=True)
class Hosts:
    """On which hosts the ranks of a group are, and how those of a host reach each other.

    Attributes:
        ranges: ranks of each host.
        inside: transport between the ranks of this rank's host, of which the first one speaks for
            all of them.
    """

    ranges: Sequence[Range]
    inside: Transport

    @property
    def of_rank(self) -> list[int]:
        """Number of each rank's host."""
        return [number for number, ranks in enumerate(self.ranges) for _ in range(len(ranks))]

    def spread(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the host's first rank."""
        inside = self.inside
        if inside.why_messages == "":
            # Memory that they share has all-gathers only.
            counts = [len(tensor), *[0] * (inside.size - 1)]
            inside.all_gather(tensor[: counts[inside.rank]], tensor, counts)
        else:
            inside.broadcast(tensor, 0)


def meet(world: Transport) -> list[str]:
    """The host of each rank; empty where all are known to be on one. A collective."""
    # Memory that all ranks share is that of one host.
    return [] if world.size == 1 or world.why_messages == "" else hosts_of(world)


def are_apart(hosts: Sequence[str]) -> bool:
    """Whether each rank has a host of its own, by what `meet` gave."""
    return 0 < len(set(hosts)) == len(hosts)


def meet_hosts(
    world: Transport, columns: Sequence[Sequence[int]], hosts: Sequence[str]
) -> Hosts | str:
    """The hosts of this rank's column, or why there is no use in them; a collective.

    Args:
        world: transport between all ranks.
        columns: ranks that sum gradients with each other, in order; each rank is in one of them.
        hosts: what `meet` gave.

    Returns:
        If a string, it is empty where all ranks are on one host.
    """
    if not hosts:
        return ""
    found = [ranks_of_hosts([hosts[rank] for rank in column]) for column in columns]
    groups: list[Sequence[int]] = []
    for column, ranges in zip(columns, found, strict=True):
        parts = [Range(r, r + 1) for r in range(len(column))]
        kept = parts if isinstance(ranges, str) else ranges
        groups += [list(column[part.slice]) for part in kept]
    if len(groups) < world.size:
        inside = world.subgroup(groups)
        inside.share_memory()
    own = next(n for n, column in enumerate(columns) if world.rank in column)
    ranges = found[own]
    if isinstance(ranges, str):
        return f"not host by host: {ranges}" if ranges else ""
    return Hosts(ranges, inside)


TRIALS = 3
"""How often each way is tried; the first time it allocates, and meets others."""


class Tried(Exchange):
    """Takes the ways in turn in its first runs, then the one that took least.

    All give the same bits. A run counts as long as on the rank where it was longest, from a barrier
    on; of the runs of a way the shortest counts.

    Attributes:
        total: as for all.
        seconds: what a run of each way takes; empty until all are tried.
    """

    def __init__(self, transport: Transport, ways: Mapping[str, Exchange], total: Row) -> None:
        """Take nothing in advance; talks to nobody.

        Args:
            transport: transport between the ranks.
            ways: exchanges by name, which all fill `total`.
            total: the sum.
        """
        self.total = total
        self.seconds: dict[str, float] = {}
        self._transport, self._ways = transport, dict(ways)
        self._spent: list[float] = []
        self._newest = next(iter(self._ways.values()))

    @property
    def chosen(self) -> str:
        """Name of the way that takes least; empty until all are tried."""
        return min(self.seconds, key=self.seconds.__getitem__, default="")

    def run(self) -> None:
        """Fill `total`, in one of the ways."""
        names = list(self._ways)
        if not self.seconds and len(self._spent) == TRIALS * len(names):
            # The same numbers on all ranks, so they choose alike.
            everyone = self._transport.gather_json(self._spent)
            slowest = [max(spent) for spent in zip(*everyone, strict=True)]
            self.seconds = {name: min(slowest[i :: len(names)]) for i, name in enumerate(names)}
        if self.seconds:
            self._newest = self._ways[self.chosen]
            self._newest.run()
            return
        self._newest = self._ways[names[len(self._spent) % len(names)]]
        # So that nobody's wait for a slow microbatch counts.
        self._transport.barrier()
        start = perf_counter()
        self._newest.run()
        self._spent.append(perf_counter() - start)

    def headers(self) -> Tensor:
        """Those of the newest run."""
        return self._newest.headers()
