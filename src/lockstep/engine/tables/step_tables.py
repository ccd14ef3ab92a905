"""The tables of a run in a step: fetching rows for microbatches, summing and applying gradients.

The buddy of a rank receives the gradients of its rows too, and steps its copies of them itself.
Before any rank steps rows, all ranks have the gradients of the rows that they step. So there is no
moment at which the newest rows are on one rank only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.config import TrainConfig
from lockstep.engine.optimizer.schedule import lr_factor
from lockstep.engine.placement import Placement
from lockstep.engine.runtime import Raised, Runtime, everywhere, own_failure, shared_error
from lockstep.engine.tables import exchange as messages
from lockstep.engine.tables.exchange import SomeRankFailed
from lockstep.engine.tables.run_tables import TableStorage
from lockstep.engine.tables.table import plan
from lockstep.nn.sparse_embedding import Fetched, SparseEmbedding
from lockstep.parallel.layout import Assigned

Wanted = Mapping[str, torch.Tensor]
"""Rows that a batch looks up in each table, by the table's name: ascending, each once."""
AllFetched = dict[str, Fetched]
"""Rows of each table, by the table's name."""
T = TypeVar("T")
_AT_ONCE = 1023
"""Number of norms of rows that each rank sends in one message."""


class Tables(TableStorage):
    """The tables of a model in the present group of ranks, and the rows that were fetched."""

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        placement: Placement,
        tables: Mapping[str, SparseEmbedding],
        total_steps: int,
    ) -> None:
        """Distribute them with their initial rows; joining ranks have no rows yet.

        Args:
            runtime: the group of ranks.
            config: config of the run.
            placement: where each rank is on the mesh.
            tables: modules by name.
            total_steps: number of steps of the whole run.
        """
        super().__init__(runtime, config, placement, tables)
        self._total_steps = total_steps
        self._fetched: dict[int, AllFetched] = {}

    def use(self, microbatches: Sequence[Assigned]) -> None:
        """Take gradients of these microbatches of each rank from now on."""
        self._microbatches = list(microbatches)

    def fetch(self, step: int, find: Callable[[], Mapping[int, Wanted]]) -> None:
        """Fetch the rows for a step's microbatches; a collective.

        Args:
            step: number of the step.
            find: returns the rows that each microbatch of this rank looks up, by its number.

        Raises:
            LockstepError: it raised an exception on some rank; on all ranks.
        """
        wanted: Mapping[int, Wanted] = {}
        error: Raised | None = None
        try:
            wanted = find()
        except (Exception, SystemExit) as caught:
            error = caught
        world = self._placement.world
        self._runtime.at("lookup", step)
        for table in self.each:
            table.begin(self._microbatches[world.rank])
        try:
            fetched = self._fetched_by(list(wanted.values()), True, error is not None)
        except SomeRankFailed:
            failure = shared_error(world, error)
            assert failure is not None
            raise failure from None
        self._fetched = dict(zip(wanted, fetched, strict=True))

    def of(self, microbatch: int) -> AllFetched:
        """The rows for a microbatch of the step."""
        return self._fetched[microbatch]

    def add(self, microbatch: int) -> None:
        """Add the gradients of the next microbatch, which may have no samples."""
        fetched = self._fetched.pop(microbatch, {})
        for table in self.each:
            table.add(fetched.get(table.name))

    def reduce(self, step: int) -> None:
        """Sum gradients on the ranks that step their rows; a collective.

        Raises:
            GroupBroken: on all ranks; none of them commits this step.
        """
        world = self._placement.world
        self.take_back()
        self._runtime.at("rows", step)
        num = self._config.num_microbatches
        nodes = [plan(microbatches, num)[1] for microbatches in self._microbatches]
        messages.reduce(world, self.each, nodes)
        if self._runtime.transport.can_regroup:
            world.agree()
        self._runtime.at("rows_summed", step)

    def norm(self) -> float:
        """The norm of all summed gradients of rows; a collective."""
        own = torch.cat([table.norms() for table in self.each])
        world = self._placement.world
        # With the number of norms, since two small messages take longer than one larger one.
        first = torch.zeros(1 + _AT_ONCE, dtype=torch.float64)
        first[0], first[1 : 1 + len(own)] = len(own), own[:_AT_ONCE]
        everyone = world.gather_host(first, [len(first)] * world.size).view(world.size, -1)
        counts = [int(count) for count in everyone[:, 0].tolist()]
        norms = [
            norm
            for count, theirs in zip(counts, everyone, strict=True)
            for norm in theirs[1 : 1 + min(count, _AT_ONCE)].tolist()
        ]
        rest = [max(0, count - _AT_ONCE) for count in counts]
        if any(rest):
            norms += world.gather_host(own[_AT_ONCE:], rest).tolist()
        # An exactly rounded sum does not depend on the order of what is added.
        return math.sqrt(math.fsum(norm * norm for norm in norms))

    def summed(self) -> dict[str, Tensor]:
        """The summed gradients of the rows that this rank owns, by the name of the table."""
        return {table.name: table.summed() for table in self.each}

    def settle(self, step: int, decays: int, norm: float, unit: float) -> None:
        """Step rows, or skip the step, as the optimizer does; once for each step; not a collective.

        Args:
            step: number of the step.
            decays: number of decays of the learning rate so far.
            norm: norm of the step's gradient; not finite if fp16 skips the step.
            unit: factor of the summed gradients.
        """
        for table in self.each:
            schedule = table.module.schedule or self._config.schedule
            factor = lr_factor(schedule, step, self._total_steps, decays)
            if math.isfinite(norm):
                table.apply(unit, table.module.optimizer.lr * factor)
            else:
                table.skip()

    def take_back(self) -> None:
        """Forget the rows that were fetched."""
        self._fetched = {}
        for table in self.each:
            table.module.fetch(None)

    def serve(
        self,
        batches: Iterable[tuple[int, T]],
        wanted: Callable[[int, T], Wanted],
        use: Callable[[int, T, AllFetched], None],
    ) -> None:
        """Compute batches with the rows that they look up; a collective until all ranks are done.

        Args:
            batches: number and content of each batch of this rank.
            wanted: function of these that returns the rows to look up.
            use: function of these and the rows.

        Raises:
            LockstepError: a batch could not be fetched or computed on some rank; on all ranks.
        """
        world, waiting = self._placement.world, iter(batches)
        error: Raised | None = None
        while True:

            def following(failed: Raised | None = error) -> tuple[tuple[int, T], Wanted] | None:
                if failed is not None:
                    raise failed
                batch = next(waiting, None)
                return (batch, wanted(*batch)) if batch is not None else None

            found = everywhere(world, following)
            if not any(world.gather_json(found is not None)):
                break
            fetched = self._fetched_by([found[1]] if found is not None else [], trains=False)
            try:
                if found is not None:
                    use(*found[0], fetched[0])
                else:
                    self._placement.stage_order.skip_forward()
            except (Exception, SystemExit) as caught:
                if self._placement.are_coupled and not self._placement.can_wake:
                    # Others wait for this rank, and only its end wakes them.
                    raise own_failure(world, caught) from None
                # Not raised here: the other ranks are about to fetch rows, and would wait.
                error = caught
                self._placement.give_up()
        self.take_back()

    def _fetched_by(
        self, wanted: Sequence[Wanted], trains: bool, has_failed: bool = False
    ) -> list[AllFetched]:
        by_table = [[of[table.name] for of in wanted] for table in self.each]
        rows = messages.fetch(self._placement.world, self.each, by_table, trains, has_failed)
        names = [table.name for table in self.each]
        return [dict(zip(names, each, strict=True)) for each in zip(*rows, strict=True)]
