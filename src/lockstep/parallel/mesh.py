"""Where a run is computed: how many ranks there are, and what each of them holds.

The mesh never decides what is computed. It has three axes: that of the data, whose unit is the
microbatch; that of depth, whose unit is the block; and that of features, whose unit is the shard. A
column is the ranks that hold the same blocks and shards: they sum gradients. A replica has one rank
of each column: together they compute a microbatch. Ranks that fill no replica are spares: they hold
what their column holds, and step it as the others do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lockstep.parallel.layout import Assigned, Range, Strided, split

NEW = -1
"""The column of a rank that has none yet."""


@dataclass(frozen=True)
class Mesh:
    """The places of a group of ranks.

    Attributes:
        num_microbatches: of each step, 1 or more.
        columns: column of each rank, from 0: those of the first stage, then of the second, ….
        tp: number of ranks that share out the shards of a stage.
        pp: number of stages.
        in_rounds: whether in each round the replicas compute one microbatch each, and the next one
            has the next one, rather than each a range of them.
    """

    num_microbatches: int
    columns: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    in_rounds: bool = False

    @classmethod
    def of(
        cls, num_microbatches: int, size: int, tp: int = 1, pp: int = 1, in_rounds: bool = False
    ) -> Mesh:
        """The mesh of ranks that start together: neighbours, who share hosts, make a replica."""
        columns = tuple(rank % (tp * pp) for rank in range(size))
        return cls(num_microbatches, columns, tp, pp, in_rounds)

    @property
    def num_columns(self) -> int:
        """How many ranks a replica has."""
        return self.tp * self.pp

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.columns)

    def members(self, column: int) -> list[int]:
        """The ranks of a column."""
        return list(self._members[column])

    @cached_property
    def _members(self) -> list[list[int]]:
        """The ranks of each column."""
        found: list[list[int]] = [[] for _ in range(self.num_columns)]
        for rank, column in enumerate(self.columns):
            found[column].append(rank)
        return found

    @cached_property
    def replica_of(self) -> dict[int, int]:
        """The number of the replica of each rank that is in one."""
        return {rank: number for number, ranks in enumerate(self.replicas) for rank in ranks}

    @cached_property
    def replicas(self) -> list[tuple[int, ...]]:
        """The ranks of each replica, in the order of columns."""
        return list(zip(*map(self.members, range(self.num_columns)), strict=False))

    @property
    def incomplete(self) -> list[int]:
        """Ranks that fill no replica."""
        return [rank for rank in range(self.size) if rank not in self.replica_of]

    @property
    def num_spares(self) -> int:
        """How many ranks have nothing to compute."""
        idle = max(0, len(self.replicas) - self.num_microbatches) * self.num_columns
        return idle + len(self.incomplete)

    @property
    def microbatches(self) -> list[Assigned]:
        """For each rank, the microbatches it computes unless speeds are known to differ."""
        return self.of_ranks(self.of_each_replica)

    @property
    def of_each_replica(self) -> list[Assigned]:
        """For each replica, the microbatches it computes unless speeds are known to differ."""
        num = len(self.replicas)
        if self.in_rounds:
            return [Strided(number, self.num_microbatches, num) for number in range(num)]
        return list(split(self.num_microbatches, num))

    def rounds(self, own: Assigned) -> Assigned:
        """A microbatch for each round, of a rank; of those it has none in, a number too high.

        Args:
            own: microbatches of the rank.
        """
        if not self.in_rounds:
            return own
        num = len(self.replicas)
        num_rounds = -(-self.num_microbatches // num)
        return Strided(own.first, own.first + num_rounds * num, num)

    def of_ranks(self, of_replicas: Sequence[Assigned]) -> list[Assigned]:
        """For each rank, the microbatches of its replica; none for spares."""
        ranges: list[Assigned] = [Range(self.num_microbatches, self.num_microbatches)] * self.size
        for replica, own in zip(self.replicas, of_replicas, strict=True):
            for rank in replica:
                ranges[rank] = own
        return ranges


def fitting(size: int, pp: int, tp: int) -> tuple[int, int]:
    """Numbers of stages and of ranks of each, of a replica that so many ranks can fill.

    Neither is more than was asked for, most ranks are used, and of equal ways the one with the most
    ranks to a stage is taken: they share a host.

    Args:
        size: number of ranks, at least 1.
        pp: number of stages asked for.
        tp: number of ranks of each stage asked for.
    """
    pairs = [(p, t) for p in range(1, pp + 1) for t in range(1, tp + 1) if p * t <= size]
    return max(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]))


def sizes_of_replicas(size: int, num_shards: int) -> list[tuple[int, int]]:
    """Numbers of stages, and of ranks that share out the shards of each, that leave no spare.

    Args:
        size: number of ranks.
        num_shards: number of shards of each layer that is cut.
    """
    of_size = [n for n in range(1, size + 1) if size % n == 0]
    pairs = [(n // tp, tp) for n in of_size for tp in of_size if n % tp == 0]
    return [(pp, tp) for pp, tp in pairs if tp <= num_shards]


def rearranged(kept: Sequence[int], num_columns: int) -> tuple[int, ...]:
    """Columns for a group that has lost or gained ranks, such that few ranks change theirs.

    Joining ranks go where ranks are missing. A spare changes its column where that makes another
    replica complete.

    Args:
        kept: column that each rank was in; `NEW` for one that was in none.
        num_columns: number of columns, each of which some rank was in.
    """
    columns = list(kept)
    counts = [columns.count(column) for column in range(num_columns)]

    def place(rank: int) -> None:
        columns[rank] = counts.index(min(counts))
        counts[columns[rank]] += 1

    for rank, column in enumerate(columns):
        if column == NEW:
            place(rank)
    while max(counts) - min(counts) > 1:
        fullest = counts.index(max(counts))
        counts[fullest] -= 1
        place(max(rank for rank, column in enumerate(columns) if column == fullest))
    return tuple(columns)
