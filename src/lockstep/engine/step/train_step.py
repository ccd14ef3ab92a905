"""One training step, from the microbatches to the committed parameters.

No committed state changes before `Apply.step`: until then a step can be given up and repeated. With
a sharded optimizer, ranks need each other once more after it. So before any rank applies a step,
all ranks have what they need to apply it: once one has applied it, all others can, and must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from lockstep.comm.host import give_back_large
from lockstep.comm.transport import GroupBroken
from lockstep.config import TrainConfig
from lockstep.engine.audit.reachable import optimizers_in
from lockstep.engine.audit.repetition import StepAudit
from lockstep.engine.carry.distributed_carries import distributed_carries
from lockstep.engine.optimizer.choice import needs_closure
from lockstep.engine.optimizer.flat_optimizer import FlatOptimizer
from lockstep.engine.optimizer.learning_rates import LearningRates, unequal_settings
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.optimizer.schedule import Schedule
from lockstep.engine.passes.block_storage import BlockStorage
from lockstep.engine.passes.compute import Compute
from lockstep.engine.passes.passes import Passes, StepParts
from lockstep.engine.passes.precision import LossScale
from lockstep.engine.placement import Placement
from lockstep.engine.runtime import Raised, Runtime, own_failure
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.step.apply import Apply, Reevaluation
from lockstep.engine.step.model import Optimization, SlicedParameters, StepChecks, TrainedModel
from lockstep.engine.step.sums import Headers, StepResult, StepSums, Summed, num_values
from lockstep.engine.step.workspace import Workspace
from lockstep.engine.tables.step_tables import Tables
from lockstep.engine.task_config import length_reads
from lockstep.engine.timing import Stopwatch
from lockstep.errors import TaskError, shared
from lockstep.nn.cutting import keep
from lockstep.nn.row import row_of
from lockstep.parallel.layout import Assigned


class TrainStep:
    """Everything a training step needs, bound together once.

    Attributes:
        model: model that is trained.
        task_state: state of the task whose step it is, and of its hooks.
        watched: generators that microbatches must not draw from.
        flat: trainable parameters in flat memory.
        state: buffers that forward passes change.
        flat_optimizer: optimizer of the flat parameters.
        schedule: the schedule of the config, or the task's own.
        rates: the learning rates of each step, whoever sets them.
        loss_scale: loss scale of fp16; 1 for other precisions.
        watch: stopwatch of compute, communication, data and checkpoints.
        parameters: parameters in slices, and all of them for a while.
        workspace: ranges, gradients and reduction of this rank in the present group.
        placement: where each rank is on the mesh.
        rounds_alike: whether the machines of all ranks round alike, as far as is known.
        sharded: whether the optimizer is sharded.
        with_buddy: whether each rank steps the slice of the rank before it too.
        carries: what microbatches carry from step to step; None if they carry nothing.
        tables: tables whose rows are distributed; None if the model has none.
        meanwhile: function that is called while a device computes the passes of a step.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        placement: Placement,
        trained: TrainedModel,
        compute: Compute,
        optimization: Optimization,
        task_state: TaskState,
        checks: StepChecks,
    ) -> None:
        model, flat, state = trained.model, trained.flat, trained.state
        optimizer, total_steps = optimization.optimizer, optimization.total_steps
        self._runtime, self.model = runtime, model
        self.meanwhile: Callable[[], None] | None = None
        self.placement, self.task_state, self.watched = placement, task_state, compute.watched
        self.sharded = config.shards_optimizer
        self.with_buddy = self.sharded and config.optimizer.buddy and runtime.transport.can_regroup
        self.flat, self.state, self._local = flat, state, compute.local
        self.loss_scale = LossScale(config.precision)
        self.watch = Stopwatch(placement.world.traffic, runtime.device)
        self._constants = checks.constants
        self._audit = StepAudit(runtime, checks.pass_state, self.watch)
        self.rounds_alike = True
        self._order_digest = checks.order_digest
        self._storage: BlockStorage | None = None
        if config.shards_gradients:
            give_back_large()
        row = row_of(model)
        if config.shards_gradients and row is not None:
            self._storage = BlockStorage(
                row, placement, lambda moment: runtime.at(moment, placement.step)
            )
        self.carries, self._leaf_states = distributed_carries(
            runtime, config, placement, flat, optimization.first_agreed, compute.has_carry
        )
        self.tables: Tables | None = None
        if compute.lookups.tables:
            self.tables = Tables(runtime, config, placement, compute.lookups.tables, total_steps)
        self._parts = parts = StepParts(
            runtime, config, model, compute, state, placement, self.loss_scale, self.watch,
            self.carries, self.tables, self._storage, task_state, checks.saves,
        )  # fmt: skip
        self._passes = Passes(parts, flat)
        self._sums = StepSums(parts, self._passes, length_reads(task_state.task.config))
        self.parameters = SlicedParameters(model, placement)
        if placement.in_slices:
            flat.renew()
        self.workspace = self._lay_out(placement.mesh.microbatches)
        self.flat_optimizer = FlatOptimizer(
            optimizer, flat, self.workspace.stepped, self.shares_state
        )
        self.parameters.close()
        self.schedule = Schedule(
            task_state.task, config.schedule, total_steps, self.flat_optimizer.num_groups
        )
        scheduled, fixed = self.flat_optimizer.groups, list[dict[str, Any]]()
        if self._local is not None:
            scheduled, fixed = self._local.optimizer.param_groups, scheduled
        self.rates = LearningRates(
            scheduled,
            fixed,
            self.schedule.factors,
            optimization.schedulers,
            task_state.may_change_optimizer,
            [*optimizers_in(optimizer).values(), *([self._local.optimizer] if self._local else [])],
            is_replicated=not self.flat_optimizer.elementwise,
        )
        self.flat_optimizer.leave_out(self.rates.written[-len(self.flat_optimizer.groups) :])
        self._again: Reevaluation | None = None
        if needs_closure(optimizer):
            self._again = Reevaluation(parts, self._passes, self._sums)
        self._apply = Apply(parts, self.flat_optimizer, self.rates)

    def run(self, step: int, decays: int, batches: Iterator[Any]) -> StepResult:
        """Compute this rank's microbatches, sum over all ranks, step the parameters.

        Args:
            step: number of the step, from 0.
            decays: number of decays of the learning rate so far (`Progress.decays`).
            batches: step, number and batch of each microbatch of this rank, in order.

        Raises:
            NonFiniteError: the loss or the gradient is NaN or infinite, on every rank.
            TaskFailure: the task's code raised an exception on some rank, on every rank.
            StepRepeated: the step is to be done again, on every rank, since its passes have changed
                state; nothing was applied.
        """
        watch, closure = self.watch, None
        watch.start()
        self._begin(step)
        if self._again is not None:
            batches = self._again.keep(batches)
            closure = partial(self._again.run, step, self.workspace)
        if self.tables is not None:
            batches = self._passes.look_up(step, self.workspace.microbatches, batches)
        with self.placement.in_stream():
            error = self._compute(step, decays, batches)
        if error is not None and self.placement.are_coupled and not self.placement.can_wake:
            # Others wait for this rank inside the step, and only its end wakes them.
            raise own_failure(self._runtime.transport, error)
        if self.meanwhile is not None and error is None:
            self.meanwhile()
        self._runtime.at("reduce", step)
        summed = self._sum(step, error)
        # What tables send, this process looks at before it goes on.
        with self.placement.in_stream() if self.tables is None else nullcontext():
            self._share(step, summed)
            norm = self._sums.norm(step, summed.scalars[1], self.workspace, self.flat)
        self._runtime.at("optimizer", step)
        result = self._apply.step(step, decays, summed, norm, self.workspace, closure)
        if self.sharded:
            self._runtime.at("gather", step)
            watch.compute_s += watch.lap()
            with self.placement.in_stream(waits=not self.placement.in_slices):
                self.workspace.gather_parameters()
            self._runtime.at("gathered", step)
            watch.communication_s += watch.lap()
        # All ranks have the step now, so none has to follow another one.
        self._apply.summed = None
        watch.compute_s += watch.lap()
        return result

    def _begin(self, step: int) -> None:
        """Forget what is left of the step before, or of another try of this one."""
        self._apply.summed = None
        self._passes.begin(step)
        self.workspace.reduction.restart()
        if self.carries is not None:
            self.carries.begin()

    def _compute(self, step: int, decays: int, batches: Iterator[Any]) -> Raised | None:
        """Compute this rank's microbatches; returns what was raised."""
        try:
            # A task's own schedule may raise an exception: here, where all ranks learn of it.
            self.rates.begin(step, decays)
            self.placement.refresh()
            self._constants.mark(step)
            self._passes.is_again = self._audit.begin(step)
            self._passes.run(step, self.workspace.passes, batches, self.workspace.leaves)
            self._audit.end()
            self._constants.check(f"step {step}")
            self.rates.check_passes()
        except (Exception, SystemExit) as error:
            self._apply.explain(error, self.workspace)
            self._audit.leave()
            if isinstance(error, GroupBroken) and not self.placement.are_coupled:
                raise  # a rank was lost while outputs were gathered (`Task.batch_loss`)
            # Not raised here: the other ranks are about to enter the reduction, and would wait in
            # it for this one. The header carries the error, and all ranks raise the same one.
            if self.placement.can_wake:
                self.placement.give_up()  # wakes those that wait for this rank inside the step
            return error
        return None

    def _sum(self, step: int, error: Raised | None) -> Summed:
        """Sum over all ranks, and make sure that the step may be applied; a collective.

        Nothing was stepped yet: an error leaves parameters as they are after the step before.
        """
        settings = order = 0
        if self._runtime.transport.size > 1:
            settings, order = self.rates.digest(), self._order_digest(step)
        headers = self._sums.reduce(
            self.workspace,
            error,
            is_reported=(step + 1) % self._parts.config.log_every == 0,
            is_suspicious=self._audit.is_suspicious,
            settings=settings,
            order=order,
        )
        self._runtime.at("reduced", step)
        scalars = self.workspace.scalars()
        if headers.has_failed:
            self._audit.check_failed()
        self._sums.check(step, error, headers, scalars)
        if not headers.are_alike:
            self._check_settings(step, headers)
        if headers.is_suspicious or self._passes.is_again:
            self._audit.check(scalars, self.workspace)
        return Summed(scalars, headers)

    def _share(self, step: int, summed: Summed) -> None:
        """Give every rank what it takes to apply the step, also without those that die now."""
        watch = self.watch
        if self.sharded:
            # A buddy steps its copy of the slice itself: a gradient is less to send than the
            # parameters and state of an optimizer, and no older version need be kept.
            self.workspace.exchange_slices()
        if self.carries is not None:
            self.carries.send_copies(step, summed.headers.carry_lengths)
            watch.communication_s += watch.lap()
        if self.tables is not None:
            self.tables.reduce(step)
            watch.communication_s += watch.lap()
        self.workspace.spread_buffers()
        if self.shares_state or self.tables is not None:
            # Should a rank die from here on, the others can apply the step (`follow`), whichever of
            # them had applied it.
            self._apply.summed = summed

    def _check_settings(self, step: int, headers: Headers) -> None:
        """Refuse to step with other learning rates, options or samples than other ranks."""
        if not headers.have_same_order:
            text = (
                f"step {step}: Task.epoch_indices gave other indices on other ranks; it must "
                "depend on the epoch and the generator that it is given, and on what "
                "Task.after_step has set"
            )
            raise shared(TaskError(text))
        if self.rounds_alike and not headers.have_same_loss:
            text = (
                f"step {step}: Task.batch_loss gave another loss on other ranks, of the same "
                "outputs; it must depend on what it is given, and on what Task.after_step has set"
            )
            raise shared(TaskError(text))
        if not headers.have_same_settings:
            everyone = self._runtime.transport.gather_json(self.rates.described())
            raise shared(TaskError(f"step {step}: {unequal_settings(everyone)}"))

    @property
    def applied(self) -> StepResult | None:
        """The result of an interrupted step that this rank has applied, if it has; so all must."""
        return self._apply.result

    def follow(self, step: int, decays: int, lead: StepResult) -> None:
        """Apply an interrupted step that another rank has applied, if this rank alone can."""
        self._apply.follow(step, decays, lead, self.workspace, self.shares_state)

    def give_up(self) -> None:
        """Undo what an interrupted step has changed beside the committed state.

        What this rank has applied stays.
        """
        self._passes.restart()
        self._audit.forget()
        self.rates.give_up()
        if self.tables is not None:
            self.tables.take_back()
        if self.applied is not None:
            self.workspace.put_back()
        self.parameters.open()

    def repair(self) -> None:
        """Go on in the same group after a failure that all ranks have noticed; a collective."""
        self._passes.restart()  # the failure may have been in an evaluation
        self.rates.give_up()
        self.placement.repair()
        self.workspace.use(self.placement.storage)

    def assign(self, ranges: Sequence[Assigned], state: OptimizerState | None = None) -> None:
        """Go on with other microbatches, or in another group; an interrupted step is given up.

        Args:
            ranges: microbatches of each rank.
            state: whole state of the optimizer if it is sharded and the group is another one.
        """
        self._audit.forget()
        self._rebind(ranges, is_reset=state is not None)
        if state is not None:
            self.flat_optimizer.load_state(state)
            self.rates.write_again()

    def reset(self, ranges: Sequence[Assigned]) -> None:
        """Forget an interrupted step and all state of the optimizer; a checkpoint must be restored.

        Args:
            ranges: microbatches of each rank.
        """
        self.give_up()
        self._rebind(ranges, is_reset=True)

    def _rebind(self, ranges: Sequence[Assigned], is_reset: bool) -> None:
        self._apply.summed = None
        self.workspace = self._lay_out(ranges)
        if is_reset:
            self.flat_optimizer.own(self.workspace.stepped)
        self.flat_optimizer.bind(self.workspace.stepped)
        self.rates.note_groups()
        self.parameters.close()

    def move(self) -> None:
        """Take the shards of this rank's position on the mesh; `assign` must follow.

        Parameters and optimizer state of shards that were not held have no content yet.
        """
        own = self.placement.own
        self.flat = self.flat.restricted(own)
        keep(self.model, own)
        self._passes.use(self.flat)
        self._constants.watch_again()
        self._apply.summed = None
        self.workspace = self._lay_out(self.placement.mesh.microbatches)
        self.flat_optimizer.move(self.flat, self.workspace.stepped)
        self.rates.note_groups()

    def _lay_out(self, ranges: Sequence[Assigned]) -> Workspace:
        workspace = Workspace(
            self._parts,
            self.flat,
            ranges,
            num_scalars=self._passes.num_scalars,
            num_header=num_values(self.state.num_counters),
            with_buddy=self.with_buddy,
            leaf_states=self._leaf_states,
        )
        self.parameters.use(self.flat, workspace)
        if self.tables is not None:
            self.tables.use(self.placement.of_column(ranges))
        if self._storage is not None:
            self._storage.use(self.flat, workspace)
        return workspace

    def check_modules(self) -> None:
        """Make sure that the model has the tensors that are trained and saved, and no others.

        Raises:
            TaskError: naming one that is another.
        """
        self._constants.check_identity(f"step {self.placement.step}")

    @property
    def optimizer_description(self) -> dict[str, Any]:
        """Optimizer, hyperparameters and schedulers of the run, by words for people."""
        return self.flat_optimizer.description | self.rates.schedulers.description

    @property
    def shares_state(self) -> bool:
        """Whether no rank alone has all parameters and all state of the optimizer."""
        return self.sharded or self.placement.is_split

    @property
    def is_streamed(self) -> bool:
        """Whether whole tensors come together one at a time only, on all ranks of one column."""
        return self.placement.are_coupled and not self.placement.is_split
