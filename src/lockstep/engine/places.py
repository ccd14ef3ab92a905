"""Where this rank is on the mesh, and the transports between the ranks of each axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import nn

from lockstep.config import TrainConfig
from lockstep.engine.runtime import Runtime
from lockstep.engine.step.flat import REPLICATED
from lockstep.errors import RankFailure, shared
from lockstep.nn.cutting import compute_in
from lockstep.nn.regions import Moment, Region
from lockstep.parallel.layout import Range, split
from lockstep.parallel.mesh import NEW, Mesh, rearranged
from lockstep.parallel.shard_axis import ShardAxis

T = TypeVar("T")


class Places:
    """The mesh of the present group.

    Attributes:
        world: transport between all ranks.
        data: transport between the ranks of this one's column, which hold the same parameters.
        features: transport between the ranks of this one's replica.
        mesh: place of every rank.
        num_shards: number of shards of each layer that is cut.
        step: number of the step that is computed, for faults.
    """

    def __init__(self, config: TrainConfig, runtime: Runtime, model: nn.Module) -> None:
        """Compute everything in this process, until `arrange` is called."""
        self.world = self.data = self.features = runtime.transport
        self._runtime = runtime
        self._model = model
        self._num_microbatches = config.num_microbatches
        self._tp = config.mesh.tp
        self.num_shards = config.num_shards
        self.mesh = Mesh.of(config.num_microbatches, self.world.size)
        self.step = 0

    @property
    def is_split(self) -> bool:
        """Whether the model is shared out over several ranks."""
        return self._tp > 1

    @property
    def column(self) -> int:
        """The column of this rank; `NEW` before it has one."""
        return self.mesh.columns[self.world.rank] if self.mesh.tp == self._tp else NEW

    @property
    def replica(self) -> int:
        """The number of this rank's replica; as many as there are for one that fills none."""
        for number, ranks in enumerate(self.mesh.replicas):
            if self.world.rank in ranks:
                return number
        return len(self.mesh.replicas)

    @property
    def own(self) -> Range:
        """The shards that this rank holds."""
        return self.shards(self.column) if self.column != NEW else Range(0, self.num_shards)

    def shards(self, column: int) -> Range:
        """The shards that the ranks of a column hold."""
        return split(self.num_shards, self._tp)[column]

    def holder(self, shard: int) -> int:
        """The rank among `features` that holds a shard."""
        return next(c for c in range(self._tp) if shard in range(*self.shards(c)))

    def holders(self) -> dict[int, int]:
        """The lowest rank that holds each shard; that of `REPLICATED` tensors is rank 0."""
        lowest = {REPLICATED: 0}
        for column in range(self._tp if self.mesh.tp == self._tp else 0):
            for shard in range(*self.shards(column)):
                lowest[shard] = self.mesh.members(column)[0]
        return lowest

    def arrange(self, kept: Sequence[int] | None = None) -> None:
        """Give every rank of the present group a place; a collective.

        Args:
            kept: column that each rank was in, `NEW` for newcomers; None if all begin.

        Raises:
            RankFailure: all ranks of a column are gone; on all ranks.
            GroupBroken: a rank was lost.
        """
        size = self.world.size
        if not self.is_split:
            self.mesh = Mesh.of(self._num_microbatches, size)
            return
        if kept is not None:
            self._check_columns(kept)
        columns = None if kept is None else rearranged(kept, self._tp)
        self.mesh = Mesh.of(self._num_microbatches, size, self._tp)
        if columns is not None:
            self.mesh = Mesh(self._num_microbatches, columns, self._tp)
        self.connect()

    def connect(self) -> None:
        """Make the transports of the axes, where they were given up too; a collective."""
        if not self.is_split:
            return
        mesh = self.mesh
        self.data = self.world.subgroup([mesh.members(column) for column in range(mesh.tp)])
        self.features = self.world.subgroup(
            [*map(list, mesh.replicas), *([rank] for rank in mesh.incomplete)]
        )
        if self.replica < len(mesh.replicas):
            region = Region(ShardAxis(self.num_shards, self.features), self._at)
            compute_in(self._model, region)

    def give_up(self) -> None:
        """Have the other ranks of the replica notice that this one has failed."""
        if self.is_split:
            self.features.give_up()

    def together(self, compute: Callable[[], T]) -> T:
        """The result of what the ranks of a replica compute together.

        Raises:
            Exception: what `compute` raises; the others then get `GroupBroken`.
        """
        try:
            return compute()
        except BaseException:
            self.give_up()
            raise

    def mend(self) -> None:
        """Go on in the same group after a failure that all ranks have noticed; a collective."""
        if self.is_split:
            self.connect()

    def of_column(self, of_ranks: Sequence[Range]) -> list[Range]:
        """Of ranges for all ranks, those of this rank's column."""
        if not self.is_split or self.column == NEW:
            return list(of_ranks)
        return [of_ranks[rank] for rank in self.mesh.members(self.column)]

    def _check_columns(self, kept: Sequence[int]) -> None:
        for column in range(self._tp):
            if column not in kept:
                first, last = self.shards(column)
                raise shared(
                    RankFailure(
                        f"all ranks that held shards {first} to {last - 1} of the model have died; "
                        "go on from the newest checkpoint with `lockstep resume` or --resume"
                    )
                )

    def _at(self, moment: Moment) -> None:
        self._runtime.at(moment, self.step)
