"""One training step, from the microbatches to the committed parameters.

Nothing of the committed state changes before `TrainStep._apply`: until then a step can be given up
and done again. With a sharded optimizer, ranks need each other once more after it. So before any
rank applies a step, all have what it takes to apply it: when one has, all of them can, and must.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.allocation import give_back_large
from lockstep.config import TrainConfig
from lockstep.data.random import Stream, random_key
from lockstep.engine.audit.constants import Constants
from lockstep.engine.carry.group import DealtCarries
from lockstep.engine.checkpoint.task_state import TaskState
from lockstep.engine.flat.flat_tensors import FlatTensors
from lockstep.engine.optimizer.flat_optimizer import FlatOptimizer
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.optimizer.schedule import Schedule
from lockstep.engine.passes.block_storage import BlockStorage
from lockstep.engine.passes.block_storage import Moment as StorageMoment
from lockstep.engine.passes.buffers import ForwardState
from lockstep.engine.passes.compute import Compute
from lockstep.engine.passes.passes import Passes
from lockstep.engine.passes.precision import LossScale
from lockstep.engine.places import Places
from lockstep.engine.runtime import Raised, Runtime
from lockstep.engine.step.header import STOP_REASONS, Header, num_values
from lockstep.engine.step.sliced_parameters import SlicedParameters
from lockstep.engine.step.step_result import StepResult, Summed
from lockstep.engine.step.sums import StepSums
from lockstep.engine.step.workspace import Workspace
from lockstep.engine.tables.group import Tables
from lockstep.engine.timing import Stopwatch
from lockstep.nn.cutting import keep
from lockstep.nn.pipeline import Pipeline
from lockstep.parallel.layout import Dealt


class TrainStep:
    """Everything a training step needs, bound together once.

    Attributes:
        task_state: state of the task whose step it is, and of its hooks.
        watched: generators that microbatches must not draw from.
        flat: trainable parameters in flat memory.
        state: buffers that forward passes change.
        flat_optimizer: optimizer of the flat parameters.
        schedule: learning rates of all steps.
        loss_scale: loss scale of fp16; 1 for other precisions.
        watch: stopwatch of compute, communication, data and checkpoints.
        parameters: parameters in slices, and all of them for a while.
        workspace: ranges, gradients and reduction of this rank in the present group.
        places: place of each rank on the mesh.
        sharded: whether the optimizer is sharded.
        with_buddy: whether each rank steps the slice of the rank before it too.
        carries: what microbatches carry from step to step; None if they carry nothing.
        tables: tables whose rows are dealt out; None if the model has none.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        model: nn.Module,
        task_state: TaskState,
        compute: Compute,
        flat: FlatTensors,
        state: ForwardState,
        constants: Constants,
        optimizer: torch.optim.Optimizer,
        places: Places,
        total_steps: int,
    ) -> None:
        self._runtime = runtime
        self.places = places
        self._config = config
        self._model = model
        self._compute = compute
        self.sharded = config.shards_optimizer
        self.with_buddy = self.sharded and config.optimizer.buddy and runtime.transport.can_regroup
        self.task_state = task_state
        self.watched = compute.watched
        self.flat = flat
        self.state = state
        self.loss_scale = LossScale(config.precision)
        self.watch = Stopwatch()
        self._constants = constants
        self._storage: BlockStorage | None = None
        if config.shards_gradients:
            give_back_large()
        if config.shards_gradients and isinstance(model, Pipeline):
            self._storage = BlockStorage(model, places, self._at)
        self.carries = DealtCarries(runtime, config, places) if compute.has_carry else None
        self.tables: Tables | None = None
        if compute.lookups.tables:
            self.tables = Tables(runtime, config, places, compute.lookups.tables, total_steps)
        self._passes = Passes(
            runtime,
            model,
            compute,
            flat,
            state,
            places,
            self.loss_scale,
            self.watch,
            self.carries,
            self.tables,
            self._storage,
        )
        self._sums = StepSums(
            runtime, places, self._passes, self.loss_scale, self.watch, self.carries, self.tables
        )
        self._summed: Summed | None = None
        self.parameters = SlicedParameters(model, places)
        if places.in_slices:
            flat.renew()
        self.workspace = self._lay_out(places.mesh.microbatches)
        self.flat_optimizer = FlatOptimizer(
            optimizer, flat, self.workspace.stepped, self.shares_state
        )
        self.parameters.close()
        self.schedule = Schedule(
            task_state.task, config.schedule, total_steps, self.flat_optimizer.num_groups
        )

    def give_up(self) -> None:
        """Forget what an interrupted step has changed beside the committed state.

        What this rank has applied stays.
        """
        self._passes.restart()
        if self.tables is not None:
            self.tables.take_back()
        if self.applied is not None:
            self.workspace.put_back()
        self.parameters.open()

    def _at(self, moment: StorageMoment) -> None:
        self._runtime.at(moment, self.places.step)

    def mend(self) -> None:
        """Go on in the same group after a failure that all ranks have noticed; a collective."""
        self._passes.restart()  # the failure may have been in an evaluation
        self.places.mend()
        self.workspace.use(self.places.storage)

    def deal_out(
        self,
        ranges: Sequence[Dealt],
        state: OptimizerState | None = None,
    ) -> None:
        """Go on with other microbatches, or in another group; an interrupted step is given up.

        Args:
            ranges: microbatches of each rank.
            state: whole state of the optimizer if it is sharded and the group is another one.
        """
        self._summed = None
        self.workspace = self._lay_out(ranges)
        if state is not None:
            self.flat_optimizer.own(self.workspace.stepped)
            self.flat_optimizer.load_state(state)
        self.flat_optimizer.bind(self.workspace.stepped)
        self.parameters.close()

    def begin_anew(self, ranges: Sequence[Dealt]) -> None:
        """Forget an interrupted step and all state of the optimizer; a checkpoint must be restored.

        Args:
            ranges: microbatches of each rank.
        """
        self.give_up()
        self._summed = None
        self.workspace = self._lay_out(ranges)
        self.flat_optimizer.own(self.workspace.stepped)
        self.flat_optimizer.bind(self.workspace.stepped)
        self.parameters.close()

    def take_place(self) -> None:
        """Hold the shards of this rank's place on the mesh; `deal_out` must follow.

        Parameters and optimizer state of shards that were not held have no content yet.
        """
        own = self.places.own
        self.flat = self.flat.restricted(own)
        keep(self._model, own)
        self._passes.use(self.flat)
        self._constants.watch_anew()
        self._summed = None
        self.workspace = self._lay_out(self.places.mesh.microbatches)
        self.flat_optimizer.move(self.flat, self.workspace.stepped)

    def _lay_out(self, ranges: Sequence[Dealt]) -> Workspace:
        workspace = Workspace(
            self._runtime,
            self._config,
            self.flat,
            self.state,
            self.places,
            ranges,
            num_scalars=self._passes.num_scalars,
            num_header=num_values(self.state.num_counters),
            with_buddy=self.with_buddy,
        )
        self.parameters.use(self.flat, workspace)
        if self.tables is not None:
            self.tables.use(self.places.of_column(ranges))
        if self._storage is not None:
            self._storage.use(self.flat, workspace)
        return workspace

    def run(self, step: int, decays: int, batches: Iterator[Any]) -> StepResult:
        """Compute this rank's microbatches, sum over all ranks, step the parameters.

        Args:
            step: number of the step, from 0.
            decays: number of decays of the learning rate so far (`Progress.decays`).
            batches: step, number and batch of each microbatch of this rank, in order.

        Raises:
            NonFiniteError: the loss or the gradient is NaN or infinite, on every rank.
            TaskFailure: the task's code raised an exception on some rank, on every rank.
        """
        watch = self.watch
        watch.start()
        self.workspace.reduction.restart()
        self._summed = None
        self._passes.begin(step)
        if self.carries is not None:
            self.carries.begin()
        if self.tables is not None:
            batches = self._look_up(step, batches, self.tables)
        factors: list[float] = []
        error: Raised | None = None
        try:
            # A task's own schedule may raise an exception: here, where all ranks hear of it.
            factors = self.schedule.factors(step, decays)
            self.places.refresh()
            self._constants.mark(step)
            leaves = self.workspace.leaves
            self._passes.run(step, self.workspace.microbatches, batches, leaves)
            self._constants.check(f"step {step}")
        except (Exception, SystemExit) as caught:
            # Not raised here: the other ranks are about to enter the reduction, and would wait in
            # it for this one. The header tells them, and all raise the same error.
            error = caught
            if self.places.are_coupled and not self._runtime.transport.can_regroup:
                raise  # others wait for this rank, and only its end wakes them
            self.places.give_up()  # or they would wait for this rank
        self._runtime.at("reduce", step)
        headers = self._sums.reduce(self.workspace, error)
        self._runtime.at("reduced", step)
        scalars = self.workspace.reduction.total.scalars.tolist()
        # Before anything is stepped: an error leaves parameters as after the step before.
        self._sums.check(step, error, headers, scalars)
        summed = Summed(scalars, headers)
        if self.sharded:
            self.workspace.exchange_slices()
        if self.carries is not None:
            self.carries.send_copies(step, [header.carry_length for header in headers])
            watch.communication_s += watch.lap()
        if self.tables is not None:
            self.tables.reduce(step)
            watch.communication_s += watch.lap()
        self.workspace.spread_buffers()
        if self.shares_state or self.tables is not None:
            # From here on each rank holds what it takes to apply this step. Should one die, the
            # others can follow (`follow`), whichever of them had applied it.
            self._summed = summed
        norm = self._sums.norm(step, scalars[1], self.workspace, self.flat)
        self._runtime.at("optimizer", step)
        result = self._apply(step, decays, factors, summed, norm)
        if self.sharded:
            self._runtime.at("gather", step)
            watch.compute_s += watch.lap()
            self.workspace.gather_parameters()
            self._runtime.at("gathered", step)
            watch.communication_s += watch.lap()
        self._summed = None
        watch.compute_s += watch.lap()
        return result

    @property
    def shares_state(self) -> bool:
        """Whether no rank alone has all parameters and all state of the optimizer."""
        return self.sharded or self.places.is_split

    @property
    def is_streamed(self) -> bool:
        """Whether whole tensors come together one at a time only, on all ranks of one column."""
        return self.places.are_coupled and not self.places.is_split

    @property
    def applied(self) -> StepResult | None:
        """The result of an interrupted step that this rank has applied, if it has; so all must."""
        return self._summed.result if self._summed else None

    def follow(self, step: int, decays: int, lead: StepResult) -> None:
        """Apply an interrupted step that another rank has applied, as far as this one has to.

        Where any rank alone has all parameters and all state, a copy of these is made later; but
        what microbatches carry is with the ranks that have computed them, and rows of tables are
        with those that own them.
        """
        if self.applied is not None:
            return
        if not self.shares_state:
            self._settle(step, decays, lead.grad_norm)
        else:
            assert self._summed is not None, "a rank has applied a step before all could"
            factors = self.schedule.factors(step, decays)
            self._apply(step, decays, factors, self._summed, lead.grad_norm)

    def _settle(self, step: int, decays: int, norm: float) -> None:
        """Go on from what the step has made of carries and rows; talks to nobody."""
        if self.carries is not None:
            self.carries.settle(norm)
        if self.tables is not None:
            assert self._summed is not None, "a rank has applied a step before all could"
            unit = self._unit(self._summed.scalars[1], norm)
            self.tables.settle(step, decays, norm, unit)

    def _unit(self, weight: float, norm: float) -> float:
        """What sums of gradients are multiplied with: mean, loss scale and clipping in one."""
        unit = 1.0 / (weight * self.loss_scale.value)
        clip_norm = self._config.clip_norm
        if clip_norm is not None and norm > clip_norm:
            # 1e-6 as in torch.nn.utils.clip_grad_norm_.
            unit *= clip_norm / (norm + 1e-6)
        return unit

    def _look_up(self, step: int, batches: Iterator[Any], tables: Tables) -> Iterator[Any]:
        """Have the rows that this rank's microbatches need; the same batches again."""
        num, ahead, watch = self._config.num_microbatches, [], self.watch

        def wanted() -> dict[int, dict[str, torch.Tensor]]:
            for number in range(*self.workspace.microbatches):
                if number < num:
                    batch = self._passes.fetched(step, number, batches)
                    ahead.append([step, number, batch])
            asked = {
                number: self._compute.wanted(step, number, batch, self.carries)
                for _, number, batch in ahead
                if batch is not None
            }
            watch.data_s += watch.lap()
            return asked

        tables.lend(step, wanted)
        watch.communication_s += watch.lap()
        return iter(ahead)

    def _apply(
        self, step: int, decays: int, factors: list[float], summed: Summed, norm: float
    ) -> StepResult:
        """Clip, step the optimizer, advance buffers; talks to nobody."""
        weight = summed.scalars[1]
        self._settle(step, decays, norm)
        unit = self._unit(weight, norm)
        # With fp16 an overflow skips the step and lowers the scale; every rank has the same norm.
        finite = math.isfinite(norm)
        self.loss_scale.update(finite)
        if finite:
            # One pass over memory, one rounding.
            for own in self.workspace.every_slice:
                own.gradient.mul_(unit)
            key = (
                random_key(self._config.seed, Stream.OPTIMIZER, step)
                if self.flat_optimizer.may_draw
                else 0
            )
            self.flat_optimizer.step(factors, key, self._compute.phases.at(step).name)
            self._commit_buffers(weight, summed.headers)
        # Before others can overwrite them: an interrupted all-gather may leave anything in place.
        self.workspace.keep_aside()
        # Set last: from here on this rank counts as one that has applied the step.
        summed.result = StepResult(
            summed.scalars,
            self.flat_optimizer.lr(factors, self._compute.phases.at(step).name),
            norm,
            # The most urgent reason of all ranks: all see the same headers, so all agree.
            max((h.stop_reason for h in summed.headers), key=STOP_REASONS.index),
            [h.times for h in summed.headers],
            any(h.grows for h in summed.headers),
        )
        return summed.result

    def _commit_buffers(self, weight: float, headers: list[Header]) -> None:
        if not self.state.flat.tensors and not self.state.num_counters:
            return
        sums = [
            self.state.flat.view(self.workspace.buffer_sums, e) for e in self.state.flat.entries
        ]
        counters = [int(max(column)) for column in zip(*(h.counters for h in headers), strict=True)]
        self.state.commit(sums, weight, counters)
