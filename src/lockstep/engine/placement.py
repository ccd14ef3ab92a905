"""The place of this rank on the mesh, and the transports between the ranks of each axis."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import TypeVar

import torch
from torch import nn

from lockstep.comm.transport import Transport
from lockstep.config import TrainConfig
from lockstep.engine.passes.precision import NOTHING
from lockstep.engine.runtime import Runtime
from lockstep.errors import RankFailure, shared
from lockstep.nn.cutting import compute_in
from lockstep.nn.holding import Holding, Unit
from lockstep.nn.row import row_of
from lockstep.nn.sharded.regions import Moment, Region
from lockstep.parallel.axes import DepthAxis, ShardAxis
from lockstep.parallel.axes import Moment as PipelineMoment
from lockstep.parallel.hosts import Hosts, are_apart, meet, meet_hosts
from lockstep.parallel.layout import Assigned, Pass, Range, one_forward_one_backward, split
from lockstep.parallel.mesh import NEW, Mesh, rearranged

T = TypeVar("T")


class StageOrder:
    """Enters the stages of a rank one after another, and serves other ranks in between."""

    def __init__(self, model: nn.Module, num_depths: int) -> None:
        """Compute the whole model at once, until its `axis` says otherwise.

        Args:
            model: model of the run; one that is no pipeline has a single stage.
            num_depths: number of ranks that a microbatch goes through (`mesh.pp`).
        """
        self._row = row_of(model)
        self._num_depths = num_depths

    def of(self, batches: Iterable[T], storage: Transport) -> Iterator[T]:
        """The batches, each once for each stage of this rank, which computes that stage then.

        While only other ranks have some left, this one takes part in their collectives. With
        parameters in slices a collective of the column, also between any two batches.

        Args:
            batches: batches of an evaluation.
            storage: transport between the ranks of this one's column.
        """
        if self._row is None or self._row.storage is None:
            yield from self._through_stages(batches)
            return
        left = iter(batches)
        counts = [1] * storage.size
        while True:
            item = next(left, None)
            own = torch.tensor([item is not None])
            if not storage.gather_host(own, counts).any():
                return
            if item is not None:
                yield item
                self.finish()
            else:
                self.skip_forward()

    def _through_stages(self, batches: Iterable[T]) -> Iterator[T]:
        stages = range(1)
        if self._row is not None and self._row.axis is not None:
            stages = self._row.axis.own_stages
        left = iter(batches)
        while group := list(islice(left, self._num_depths if len(stages) > 1 else 1)):
            for stage in stages:
                _, is_last = self.enter(stage)
                for item in group:
                    # A stage may change its batch, and the next one needs it unchanged.
                    yield item if is_last else copy.deepcopy(item)
            self.finish()

    def skip_forward(self) -> None:
        """Take part in the collectives of a forward pass of other ranks in an evaluation."""
        if self._row is not None and self._row.storage is not None:
            with torch.no_grad():
                self._row.storage.skip_forward()

    def enter(self, stage: int) -> tuple[bool, bool]:
        """Begin a stage of this rank; returns whether it is its first one, and its last one."""
        axis = self._row.axis if self._row is not None else None
        if axis is None:
            return True, True
        axis.enter(stage)
        return stage == axis.own_stages[0], stage == axis.own_stages[-1]

    def finish(self) -> None:
        """Wait until everything that this rank sends to other stages is sent."""
        if self._row is not None and self._row.axis is not None:
            self._row.axis.finish()


class Placement:
    """Where each rank is on the mesh of the present group, and the transports of its axes.

    Attributes:
        world: transport between all ranks.
        data: transport between the ranks of this one's column, which own the same parameters.
        replica: transport between the ranks of this one's replica, in the order of columns.
        features: transport between those of them that are of the same stage.
        depth: transport between those of them that hold the same shards.
        storage: transport between the ranks of this one's column for collectives inside a step.
        hosts: hosts of the ranks of this one's column, or why gradients are not summed host by
            host; empty where that is no option.
        are_apart: whether each rank has a host of its own, where gradients may be sent early.
        mesh: column of every rank, and the replicas.
        num_shards: number of shards of each layer that is cut.
        stages: range of blocks of each stage; of a model that is no pipeline a single one.
        stage_order: enters the stages of this rank one after another.
        in_slices: whether a rank has whole parameters of a block only while it computes it.
        is_split: whether each rank has only a part of the model.
        are_staged: whether a replica has several stages.
        are_coupled: whether ranks wait for one another within a step, not only at its end.
        can_wake: whether a rank that fails can wake those that wait for it within a step: not out
            of a collective in a device's queue. Where it cannot, its end has to.
        step: number of the step that is computed, for faults.
    """

    def __init__(
        self, config: TrainConfig, runtime: Runtime, model: nn.Module, stages: Sequence[Range]
    ) -> None:
        """Begin with all of the model on this rank, until `arrange` is called."""
        self.world = self.data = self.replica = runtime.transport
        self.features = self.depth = self.storage = runtime.transport
        self._runtime = runtime
        self._model, self._row = model, row_of(model)
        self._num_microbatches = config.num_microbatches
        self._tp, self._pp = config.mesh.tp, config.mesh.pp
        self._interleave = config.mesh.num_stages // self._pp
        self._num_columns = self._tp * self._pp
        self.stages = list(stages)
        self.stage_order = StageOrder(model, self._pp)
        self._axes: list[DepthAxis] = []
        self.num_shards = config.num_shards
        self._in_rounds = config.shards_gradients
        self.in_slices = config.shards_parameters
        self.is_split, self.are_staged = self._num_columns > 1, self._pp > 1
        self.are_coupled = self.is_split or self._in_rounds
        is_cpu = self._is_cpu = runtime.is_on_cpu
        self.can_wake = is_cpu and runtime.transport.can_regroup
        self._shares_memory = config.exchange != "messages" and is_cpu
        # Reductions in rounds have no nodes of ranks, and compressed gradients have other sums.
        self._sums_by_host = (
            config.exchange in ("auto", "hierarchical")
            and is_cpu
            and not config.shards_gradients
            and config.compression.name == "none"
        )
        self._overlaps = config.overlap and is_cpu and not config.shards_optimizer
        self.are_apart = False
        self.hosts: Hosts | str = ""
        if config.exchange == "hierarchical" and not is_cpu:
            self.hosts = f"not host by host: the tensors are on {runtime.device.type}"
        self.mesh = self._begun(self.world.size, 1, 1)
        self.step = 0

    @property
    def late_blocks(self) -> set[int]:
        """Blocks whose gradients are complete only at the end of a backward pass."""
        return self._row.late_blocks if self._row is not None else set()

    @property
    def column(self) -> int:
        """The column of this rank; `NEW` before it has one."""
        is_placed = self.mesh.num_columns == self._num_columns
        return self.mesh.columns[self.world.rank] if is_placed else NEW

    @property
    def replica_number(self) -> int:
        """The number of this rank's replica; the number of replicas for a spare rank."""
        return self.mesh.replica_of.get(self.world.rank, len(self.mesh.replicas))

    @property
    def own(self) -> Holding:
        """The blocks and shards that this rank owns."""
        if self.column == NEW:
            return Holding((Range(0, self.stages[-1].last),), Range(0, self.num_shards))
        return self.held_by(self.column)

    def held_by(self, column: int) -> Holding:
        """The blocks and shards that the ranks of a column own."""
        depth, place = divmod(column, self._tp)
        blocks = tuple(self.stages[depth :: self._pp])
        return Holding(blocks, split(self.num_shards, self._tp)[place])

    def unit_of(self, name: str) -> Unit:
        """The unit of a buffer, by its name."""
        return Unit(self._row.block_of(name)) if self._row is not None else Unit()

    def owner_column(self, unit: Unit) -> int:
        """The first column that owns a unit; also its rank in `replica`."""
        return next(c for c in range(self._num_columns) if self.held_by(c).has(unit))

    def lowest_rank(self, unit: Unit) -> int:
        """The lowest rank of the column that `owner_column` returns."""
        return 0 if self.column == NEW else self.mesh.members(self.owner_column(unit))[0]

    @property
    def are_scored(self) -> bool:
        """Whether this rank, if it computes microbatches, computes their losses."""
        return self.column // self._tp == self._pp - 1

    @property
    def scoring(self) -> int:
        """The lowest rank of the last stage, which computes losses."""
        return self.mesh.members(self._num_columns - 1)[0]

    def arrange(self) -> None:
        """Place and connect all ranks at the start; a collective."""
        self.mesh = self._begun(self.world.size, self._tp, self._pp)
        self.connect()

    def _begun(self, size: int, tp: int, pp: int) -> Mesh:
        return Mesh.of(self._num_microbatches, size, tp, pp, self._in_rounds)

    def assign(self, kept: Sequence[int]) -> None:
        """Place every rank of a new group on the mesh; `connect` must follow.

        Args:
            kept: column that each rank was in, `NEW` for joining ranks.

        Raises:
            RankFailure: all ranks of a column are gone; on all ranks.
        """
        self._check_columns(kept)
        columns = rearranged(kept, self._num_columns)
        num = self._num_microbatches
        self.mesh = Mesh(num, columns, self._tp, self._pp, self._in_rounds)

    def connect(self) -> None:
        """Make the transports of the axes and of hosts; a collective."""
        if self._shares_memory:
            self.world.share_memory()
        hosts = meet(self.world) if self._sums_by_host or self._overlaps else []
        if self._sums_by_host:
            columns = [self.mesh.members(column) for column in range(self.mesh.num_columns)]
            self.hosts = meet_hosts(self.world, columns, hosts)
        self.are_apart = self._overlaps and are_apart(hosts)
        self._connect_axes()

    def _connect_axes(self) -> None:
        """Make the transports of the axes, also after they were given up; a collective."""
        mesh = self.mesh
        columns = [mesh.members(column) for column in range(mesh.num_columns)]
        if self._in_rounds:
            self.storage = self.world.subgroup(columns)
        if not self.is_split:
            return
        alone = [[rank] for rank in mesh.incomplete]
        stages = [r[i : i + mesh.tp] for r in mesh.replicas for i in range(0, len(r), mesh.tp)]
        rows = [r[place :: mesh.tp] for r in mesh.replicas for place in range(mesh.tp)]
        self.data = self.world.subgroup(columns)
        if not self._in_rounds:
            self.storage = self.data
        self.replica = self.world.subgroup([*mesh.replicas, *alone])
        self.features = self.depth = self.replica
        if mesh.pp > 1:
            self.features = self.world.subgroup([*stages, *alone])
        if mesh.tp > 1:
            self.depth = self.world.subgroup([*rows, *alone])
        if self._row is not None:
            self._row.axis = DepthAxis([Range(0, self._row.num_blocks)])
        if self.replica_number < len(mesh.replicas):
            self._compute_here()

    def _compute_here(self) -> None:
        """Make the model compute the blocks and shards of this rank."""
        axis = ShardAxis(self.num_shards, self.features if self._tp > 1 else None)
        if self.num_shards > 1:
            compute_in(self._model, Region(axis, self._at))
        if self._row is not None and self._pp > 1:
            device = self._runtime.device
            self._row.axis = DepthAxis(self.stages, self.depth, device, self._at)
            # Kept alive: messages of a step that was given up may still be read from their memory.
            self._axes.append(self._row.axis)

    def refresh(self) -> None:
        """Update the copies of parameters that are tied to other stages; a collective."""
        if self._row is None or not self.are_staged:
            return
        axis, ties, storage = self._row.axis, self._row.ties, self._row.storage
        if self.replica_number < len(self.mesh.replicas):
            assert axis is not None, "there is one in a run"
            ties.refresh(axis, storage)
        elif storage is not None:
            ties.skip_refresh(self.stages, self.column // self._tp, storage)

    def passes(self, microbatches: Assigned) -> Sequence[Pass]:
        """The forward and backward passes of this rank, of its replica's microbatches."""
        # Spares have passes too, in which they do what other ranks of their stage need.
        place = 0 if self.column == NEW else self.column // self._tp
        return one_forward_one_backward(microbatches, place, self._pp, self._interleave)

    def give_up(self) -> None:
        """Make ranks that wait for this one inside a step notice that it has failed."""
        waiting = [self.replica, self.features, self.depth] if self.is_split else []
        if self._in_rounds:
            waiting.append(self.storage)
        for transport in {id(t): t for t in waiting}.values():
            transport.give_up()

    def in_stream(self, waits: bool = False) -> AbstractContextManager[None]:
        """`Transport.in_stream` of all ranks, where they compute on devices."""
        return NOTHING if self._is_cpu else self.world.in_stream(waits)

    def together(self, compute: Callable[[], T]) -> T:
        """The result of what the ranks of a replica compute together.

        Raises:
            Exception: raised by `compute`; the other ranks then get `GroupBroken`.
        """
        try:
            return compute()
        except BaseException:
            self.give_up()
            raise

    def repair(self) -> None:
        """Go on in the same group after a failure that all ranks have noticed; a collective."""
        if self.are_coupled:
            self._connect_axes()

    def of_column(self, of_ranks: Sequence[Assigned]) -> list[Assigned]:
        """Those of all ranks' ranges that belong to this rank's column."""
        if not self.is_split or self.column == NEW:
            return list(of_ranks)
        return [of_ranks[rank] for rank in self.mesh.members(self.column)]

    def _check_columns(self, kept: Sequence[int]) -> None:
        for column in range(self._num_columns):
            if column not in kept:
                raise shared(
                    RankFailure(
                        f"all ranks that held {self._described(column)} of the model have died; "
                        "go on from the newest checkpoint with `lockstep resume` or --resume"
                    )
                )

    def _described(self, column: int) -> str:
        parts = []
        held = self.held_by(column)
        if self._pp > 1:
            ranges = ", ".join(f"{own.first} to {own.last - 1}" for own in held.blocks)
            parts.append(f"blocks {ranges}")
        if self._tp > 1:
            parts.append(f"shards {held.shards.first} to {held.shards.last - 1}")
        return " and ".join(parts)

    def _at(self, moment: Moment | PipelineMoment) -> None:
        self._runtime.at(moment, self.step)
