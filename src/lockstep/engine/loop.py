"""The training loop: from the first step to the result."""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter
from typing import Any

from lockstep.comm.transport import GroupBroken
from lockstep.config import TrainConfig
from lockstep.engine.after_step import AfterStep
from lockstep.engine.assembly import assemble
from lockstep.engine.audit.hints import ignored_methods, mean_loss
from lockstep.engine.checkpoint.checkpointer import Checkpointer
from lockstep.engine.checkpoint.optimizer_state import OptimizerState
from lockstep.engine.checkpoint.restore import copy_state
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.events import Evaluated, Finished, Improved, Rebalanced, Warned
from lockstep.engine.progress import Progress
from lockstep.engine.recovery.balance import Balancer
from lockstep.engine.recovery.positions import (
    NOWHERE,
    Origin,
    find_lead,
    find_origin,
    refuse_strangers,
)
from lockstep.engine.recovery.sharded_state import collect
from lockstep.engine.reporter import Reporter
from lockstep.engine.runtime import Runtime, check_can_regroup, on_first
from lockstep.engine.step.flat import model_digest
from lockstep.engine.step.train_step import StepResult
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, TaskFailure, shared
from lockstep.parallel.layout import Range, split

TOO_FEW_RANKS = "too few ranks left"

EXIT_CODES = {"interrupted": 130, "terminated": 143, "preempted": 143, TOO_FEW_RANKS: 75}
"""What a process that stopped before the end exits with: 128 + the number of the usual signal, or
EX_TEMPFAIL, which asks for another try."""


class Trainer:
    """A run of a task on this group of ranks."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        runtime: Runtime,
        directory: RunDirectory,
        joins: bool = False,
    ) -> None:
        """Assemble everything, and restore the newest valid checkpoint if there is one.

        Args:
            task: what to train.
            config: how.
            runtime: this process's surroundings.
            directory: where files go.
            joins: whether others train already, and have the state.

        Raises:
            LockstepError: the task, config or checkpoint does not work; on all ranks.
            GroupBroken: a rank has died.
        """
        self._started = perf_counter()
        self._config = config
        self._runtime = runtime
        self._transport = runtime.transport
        if config.min_ranks > self._transport.size and not joins:
            raise shared(
                ConfigError(
                    f"min_ranks={config.min_ranks}: is more than the {self._transport.size} ranks "
                    "there are; start more ranks or lower it"
                )
            )
        if joins:
            runtime.at("join", 0)
        self._parts = assemble(task, config, runtime)
        parts = self._parts
        self._after_step = AfterStep(
            task,
            parts.model,
            parts.train_step.flat_optimizer.optimizer,
            parts.train_step.flat,
            parts.loader,
            config.seed,
        )
        self._reporter = Reporter(task.name, config, runtime, self._parts, directory)
        self._checkpointer = Checkpointer(config, runtime, self._parts, directory)
        self._progress = Progress() if joins else self._checkpointer.resume()
        self._result: StepResult | None = None
        ranges = split(config.num_microbatches, self._transport.size)
        self._balancer = Balancer(config.balance_every, ranges)
        self._batches = self._stream()
        self._stop_reason = ""
        self._failed_step = -1
        self._is_new = joins
        self._state_checked = False
        self._dealt = (NOWHERE, 0) if joins else (self._transport.rank, self._transport.size)
        if not joins:
            self._reporter.start(self._progress, is_over=self._is_over())
            if self._progress.step == 0:
                self._hint(task)

    def run(self) -> Finished:
        """Train to the end, or to where this sitting is to stop; through the loss of ranks.

        Raises:
            LockstepError: the task does not work, or the state was lost; on all ranks.
            RankFailure: a rank has died, and this transport cannot go on without it.
        """
        try:
            if self._is_new:
                self._recover()
            while True:
                try:
                    return self._run()
                except GroupBroken as loss:
                    check_can_regroup(self._transport, loss)
                    self._recover()
                except TaskFailure as failure:
                    self._try_again(failure)
        finally:
            self._batches.close()
            self._parts.loader.close()

    def _hint(self, task: Task) -> None:
        """Say what the task probably does not mean."""
        parts = self._parts
        means = mean_loss(parts.model, parts.compute, parts.loader)
        for hint in (*ignored_methods(type(task)), *means):
            self._runtime.emit(Warned(step=0, message=hint))

    def _run(self) -> Finished:
        self._follow_up()
        while not self._is_over():
            progress = self._progress
            result = self._parts.train_step.run(progress.step, progress.decays, self._batches)
            self._commit(result)
            if not self._state_checked:
                self._checkpointer.check_state()
                self._state_checked = True
            self._follow_up()
            self._balance(result)
            self._checkpointer.poll()
            if result.grows and not self._is_over():
                raise GroupBroken("a new process is to be taken in")
        return self._finish()

    def _commit(self, result: StepResult, with_task: bool = True) -> None:
        """Count in a step, which from now on is not done again.

        Args:
            result: of the step.
            with_task: whether what the task does after a step is still to be done.
        """
        self._result = result
        self._progress.step += 1
        if with_task:
            self._after_step.run(self._progress.step, self._parts.train_step.state)
        self._stop_reason = self._stop_reason or result.stop_reason
        flush = self._is_save_due() or self._is_evaluation_due()
        self._reporter.add(self._progress, result, flush)
        self._transport.pulse.arm()
        self._runtime.at("committed", self._progress.step)

    def _follow_up(self) -> None:
        """Evaluate, check and save what is due after the last step; may be done again."""
        progress = self._progress
        self._after_step.check(self._transport)
        if self._is_evaluation_due() and progress.evaluated < progress.step:
            self._evaluate("val")
        if self._is_digest_due():
            self._checkpointer.check_replicas(progress)
        improved = 0 < progress.step == progress.best_step
        if self._is_save_due() or improved:
            self._checkpointer.save(progress, improved)

    def _stream(self) -> Generator[Any, None, None]:
        """This rank's microbatches, from the present step on."""
        microbatches = self._balancer.ranges[self._transport.rank]
        return self._parts.loader.stream(microbatches, self._progress.step, self._parts.total_steps)

    def _is_over(self) -> bool:
        progress, stop = self._progress, self._config.stop_at_step
        if progress.step >= self._parts.total_steps and not progress.finished:
            progress.finished = "all steps done"
        if not progress.finished and stop is not None and progress.step >= stop:
            self._stop_reason = self._stop_reason or f"stop_at_step={stop}"
        return bool(progress.finished or self._stop_reason)

    def _is_due(self, every: int) -> bool:
        """Every so many steps, or, for 0, at the end of an epoch."""
        return self._progress.step % (every or self._parts.sampler.steps_per_epoch) == 0

    def _is_save_due(self) -> bool:
        due = self._progress.step > 0 and self._is_due(self._config.checkpoint.every)
        return due or self._is_over() or self._checkpointer.is_overdue

    def _is_evaluation_due(self) -> bool:
        if self._progress.step == 0:
            return False
        # Where a sitting ends must not matter, or an interrupted run would judge otherwise.
        last = self._progress.step == self._parts.total_steps
        return "val" in self._parts.evaluations and (last or self._is_due(self._config.eval_every))

    def _is_digest_due(self) -> bool:
        every = self._config.digest_every
        return every > 0 and self._progress.step > 0 and self._progress.step % every == 0

    def _evaluate(self, split_name: str) -> None:
        started = perf_counter()
        parts = self._parts
        self._runtime.at("evaluate", self._progress.step)
        metrics = parts.evaluations[split_name].run(self._transport, parts.model, parts.compute)
        self._commit_evaluation(split_name, metrics, perf_counter() - started)

    def _commit_evaluation(
        self, split_name: str, metrics: dict[str, float], seconds: float
    ) -> None:
        """Take note of an evaluation; that of the validation split may end training."""
        progress, config, runtime = self._progress, self._config, self._runtime
        progress.metrics |= {f"{split_name}/{key}": value for key, value in metrics.items()}
        runtime.emit(
            Evaluated(step=progress.step, split=split_name, metrics=metrics, seconds=seconds)
        )
        if split_name != "val":
            return
        if progress.judge(config, metrics):
            value = metrics[config.watch]
            runtime.emit(Improved(step=progress.step, metric=config.watch, value=value))
        progress.finished = progress.finished or progress.exhausted(config)

    def _balance(self, result: StepResult) -> None:
        """Deal out microbatches by measured speed, now and then."""
        found = self._balancer.propose(result.times)
        if found is not None:
            self._deal_out(found.ranges)
            counts = tuple(len(r) for r in found.ranges)
            self._runtime.emit(
                Rebalanced(
                    step=self._progress.step,
                    microbatches=counts,
                    slowest=found.slowest,
                    slowdown=found.slowdown,
                )
            )

    def _try_again(self, failure: TaskFailure) -> None:
        """Be ready to do a step again that the task's code failed in, once.

        Raises:
            TaskFailure: it is not the first time.
        """
        step = self._progress.step
        if self._failed_step == step or self._after_step.has_failed:
            raise failure
        self._failed_step = step
        self._runtime.emit(Warned(step=step, message=f"step {step} is done again: {failure}"))
        self._fetch_anew()

    def _fetch_anew(self) -> None:
        """Fetch from the present step on, with other worker processes if there are any."""
        self._batches.close()  # exceptions may refer to it for long, and so keep its workers alive
        self._batches = self._stream()

    def _recover(self) -> None:
        """Regroup, agree on the last committed step, and be ready to do the next one again."""
        started = perf_counter()
        rank = NOWHERE if self._is_new else self._transport.rank
        row = self._reporter.own_row()
        while True:
            try:
                self._runtime.at("regroup", self._progress.step)
                self._transport.regroup(takes_in=True)
                on_first(self._transport, self._runtime.take_over)
                self._runtime.at("catch_up", self._progress.step)
                facts = self._parts.facts
                origin = find_origin(self._transport, rank, *self._dealt, row, facts)
                refuse_strangers(self._runtime, origin, self._progress.step)
                copied, state = self._catch_up(origin)
                break
            except GroupBroken:
                continue
        ranges = split(self._config.num_microbatches, self._transport.size)
        self._balancer.restart(ranges)
        self._deal_out(ranges, state)
        self._dealt = (self._transport.rank, self._transport.size)
        self._is_new = self._state_checked = False  # newcomers have not checked theirs
        self._checkpointer.regroup(took_over=origin.former[0] != 0)
        self._reporter.regroup(self._progress, origin, copied, perf_counter() - started)
        if self._transport.size < self._config.min_ranks:
            self._stop_reason = TOO_FEW_RANKS

    def _catch_up(self, origin: Origin) -> tuple[bool, OptimizerState | None]:
        """Bring ranks that are behind, or new, to where the others are.

        Returns:
            Whether there were any; and the optimizer's state if it is sharded.
        """
        parts, transport = self._parts, self._transport
        parts.train_step.give_up()
        lead = find_lead(
            transport, self._progress, self._result, parts.train_step.applied, self._is_new
        )
        state = None
        to_do = self._progress.step < lead.step
        if self._config.optimizer.sharded:
            if lead.result is not None and not self._is_new and self._progress.step < lead.step:
                parts.train_step.follow(self._progress.step, self._progress.decays, lead.result)
            # Who has committed has whole parameters, changed by the task since they were stepped.
            state = collect(
                transport,
                parts.train_step,
                origin.members,
                origin.num_members,
                with_parameters=lead.committed < lead.step,
            )
        if lead.is_ahead:
            known = {"trainer": [self._stop_reason, self._failed_step, self._reporter.to_json()]}
            meta = copy_state(
                parts.train_step, parts.model, self._progress, known, transport, lead.rank
            )
            to_do = lead.committed < lead.step
            if self._is_new:
                self._progress = Progress.from_json(meta["progress"])
                self._stop_reason, self._failed_step, report = meta["trainer"]
                self._reporter.from_json(report)
        else:
            transport.agree()
        progress = self._progress
        if progress.step < lead.step:
            assert lead.result is not None
            self._commit(lead.result, to_do)
        if progress.evaluated < lead.evaluated:
            self._commit_evaluation("val", lead.metrics, 0.0)
        return lead.is_ahead, state

    def _deal_out(self, ranges: list[Range], state: OptimizerState | None = None) -> None:
        """Compute these microbatches from now on."""
        self._parts.train_step.deal_out(ranges, state)
        self._balancer.use(ranges)
        self._fetch_anew()

    def _finish(self) -> Finished:
        """Make sure the state is saved, evaluate the test split, and sum up."""
        progress = self._progress
        self._batches.close()
        folder = self._checkpointer.finish(progress)
        if progress.finished and "test" in self._parts.evaluations:
            self._evaluate("test")
        finished = Finished(
            step=progress.step,
            status="completed" if progress.finished else "stopped",
            reason=progress.finished or self._stop_reason,
            exit_code=0 if progress.finished else EXIT_CODES.get(self._stop_reason, 0),
            params_sha256=model_digest(self._parts.model, self._parts.train_step.state.unsaved),
            metrics=self._reporter.final_metrics(progress),
            world_size=self._transport.size,
            wall_s=perf_counter() - self._started,
            checkpoint=folder,
        )
        self._runtime.emit(finished)
        self._transport.agree()
        return finished
