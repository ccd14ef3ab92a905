"""The hosts of a group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.comm.shared_memory import hosts_of
from lockstep.comm.transport import Transport
from lockstep.parallel.hosts.layout import ranks_of_hosts
from lockstep.parallel.layout import Range


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


def meet_hosts(world: Transport, columns: Sequence[Sequence[int]]) -> Hosts | str:
    """The hosts of this rank's column, or why there is no use in them; a collective.

    Args:
        world: transport between all ranks.
        columns: ranks that sum gradients with each other, in order; each rank is in one of them.

    Returns:
        If a string, it is empty where all ranks are on one host.
    """
    if world.size == 1 or world.why_messages == "":
        return ""  # memory that all ranks share is that of one host
    hosts = hosts_of(world)
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
