"""What a step does with a run's tables: rows are fetched by microbatches, summed up and stepped.

The buddy of a rank is sent the gradients of its rows too, and steps its copies of them itself.
Before any rank steps rows, all hold the gradients of the rows that they step. So there is no moment
at which the newest rows are in one place only.
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
from lockstep.engine.runtime import Raised, Runtime, everywhere, shared_error
from lockstep.engine.tables import exchange as messages
from lockstep.engine.tables.exchange import SomeRankFailed
from lockstep.engine.tables.run_tables import HeldTables
from lockstep.nn.sparse_embedding import Fetched, SparseEmbedding
from lockstep.parallel.fold import plan
from lockstep.parallel.layout import Assigned

Wanted = Mapping[str, torch.Tensor]
"""Rows that a batch looks up in each table, by the table's name: ascending, each once."""
AllFetched = dict[str, Fetched]
"""Rows of each table, by the table's name."""
T = TypeVar("T")
_AT_ONCE = 1023
"""Norms of rows that each rank sends in one message."""


class Tables(HeldTables):
    """The tables of a model, in the present group of ranks, and what of them has been fetched."""

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        placement: Placement,
        tables: Mapping[str, SparseEmbedding],
        total_steps: int,
    ) -> None:
        """Deal them out; their rows are as they are before the first step, but for joining ranks.

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
        """Have the rows for a step's microbatches; a collective.

        Args:
            step: number of the step.
            find: says what each microbatch of this rank looks up, by its number.

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
        for dealt in self.each:
            dealt.begin(self._microbatches[world.rank])
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
        """Take the gradients of the next microbatch, of which there may be no samples."""
        fetched = self._fetched.pop(microbatch, {})
        for dealt in self.each:
            dealt.add(fetched.get(dealt.name))

    def reduce(self, step: int) -> None:
        """Sum gradients on the ranks that step their rows; a collective.

        Raises:
            GroupBroken: on all ranks, none of which then goes on from this step.
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
        own = torch.cat([dealt.norms() for dealt in self.each])
        world = self._placement.world
        # Their number with the first ones, since more messages take longer than more bytes.
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
        return {dealt.name: dealt.summed() for dealt in self.each}

    def settle(self, step: int, decays: int, norm: float, unit: float) -> None:
        """Step rows, or skip it, as the optimizer does; once for each step; talks to nobody.

        Args:
            step: number of the step.
            decays: number of decays of the learning rate so far.
            norm: norm of the step's gradient; not finite if fp16 skips the step.
            unit: what summed gradients are multiplied with.
        """
        for dealt in self.each:
            schedule = dealt.table.schedule or self._config.schedule
            factor = lr_factor(schedule, step, self._total_steps, decays)
            if math.isfinite(norm):
                dealt.apply(unit, dealt.table.optimizer.lr * factor)
            else:
                dealt.skip()

    def take_back(self) -> None:
        """Lend nothing any more."""
        self._fetched = {}
        for dealt in self.each:
            dealt.table.fetch(None)

    def serve(
        self,
        batches: Iterable[tuple[int, T]],
        wanted: Callable[[int, T], Wanted],
        use: Callable[[int, T, AllFetched], None],
    ) -> None:
        """Use batches with the rows that they look up; a collective until all are through theirs.

        Args:
            batches: number and content of each batch of this rank.
            wanted: function from these to what a batch looks up.
            use: function of these and the rows.

        Raises:
            LockstepError: a batch could not be had or used on some rank; on all ranks.
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
                if self._placement.are_coupled and not self._runtime.transport.can_regroup:
                    raise  # others wait for this rank, and only its end wakes them
                # Not raised here: the others are about to lend, and would wait for this one.
                error = caught
                self._placement.give_up()
        self.take_back()

    def _fetched_by(
        self, wanted: Sequence[Wanted], trains: bool, has_failed: bool = False
    ) -> list[AllFetched]:
        by_table = [[of[dealt.name] for of in wanted] for dealt in self.each]
        rows = messages.fetch(self._placement.world, self.each, by_table, trains, has_failed)
        names = [dealt.name for dealt in self.each]
        return [dict(zip(names, each, strict=True)) for each in zip(*rows, strict=True)]
