"""Which ranks measure together: those of a host, one of each host, or all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.comm.transport import Transport
from lockstep.planning.profile.profile import Scope


@dataclass(frozen=True)
class Group:
    """Groups of ranks that measure at the same time.

    Attributes:
        scope: what the profile calls them.
        parts: ranks of each group; each rank is in exactly one.
        idle: ranks that are in a group and take no part.
    """

    scope: Scope
    parts: tuple[tuple[int, ...], ...]
    idle: frozenset[int]

    @property
    def num_ranks(self) -> int:
        """The size of the largest group that takes part."""
        return max(len(part) for part in self.parts if not self.idle.issuperset(part))


def grouped(hosts: Sequence[str]) -> list[Group]:
    """The groups to measure.

    Args:
        hosts: name of each rank's host.
    """
    everyone = tuple(range(len(hosts)))
    by_host = [tuple(r for r in everyone if hosts[r] == host) for host in dict.fromkeys(hosts)]
    if len(by_host) == 1:
        return [Group("inside", (everyone,), frozenset())]
    groups = []
    alone = frozenset(part[0] for part in by_host if len(part) == 1)
    if len(alone) < len(by_host):
        groups.append(Group("inside", tuple(by_host), alone))
    first = tuple(part[0] for part in by_host)
    others = tuple(rank for rank in everyone if rank not in first)
    if not others:
        return [*groups, Group("between", (first,), frozenset())]
    between = Group("between", (first, others), frozenset(others))
    return [*groups, between, Group("all", (everyone,), frozenset())]


def joined(world: Transport, group: Group) -> Transport:
    """The transport of this rank's part of a group; a collective of all ranks."""
    return world if len(group.parts) == 1 else world.subgroup(group.parts)
