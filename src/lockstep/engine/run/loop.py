"""The training loop: from the first step to the result."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, TypeVar

from torch import nn

from lockstep.comm.transport import GroupBroken
from lockstep.config import TrainConfig
from lockstep.engine.assembly import assemble
from lockstep.engine.audit.hints import coupled_loss, ignored_methods, mean_loss
from lockstep.engine.audit.repetition import StepRepeated
from lockstep.engine.checkpoint.checkpointer import Checkpointer
from lockstep.engine.checkpoint.run_directory import DIRECTORY_LOST, RunDirectory
from lockstep.engine.evaluation.batches import Scores, is_validation
from lockstep.engine.evaluation.evaluation import EvaluationAudit
from lockstep.engine.events import Finished, Rebalanced, Warned
from lockstep.engine.hook_calls import Hooks
from lockstep.engine.recovery.procedure import TOO_FEW_RANKS, Recovery
from lockstep.engine.run.microbatches import Microbatches, check_size
from lockstep.engine.run.own_loop import OwnLoop, Step
from lockstep.engine.run.progress import Progress
from lockstep.engine.run.reporter import Reporter
from lockstep.engine.run.run_state import RunState
from lockstep.engine.runtime import Runtime, check_can_regroup, everywhere
from lockstep.engine.snapshot.capture import whole_digest
from lockstep.engine.snapshot.restore import temporary_state
from lockstep.engine.step.sums import OUT_OF_TIME, StepResult
from lockstep.engine.task import Task
from lockstep.errors import RunDirectoryError, TaskFailure, shared

T = TypeVar("T")

EXIT_CODES = {
    "interrupted": 130,
    "hung up": 129,
    "terminated": 143,
    "preempted": 143,
    OUT_OF_TIME: 75,
    TOO_FEW_RANKS: 75,
}
"""What a process that stopped before the end exits with: 128 + the number of the usual signal, or
EX_TEMPFAIL, which asks for another try."""


def exhausted(steps: Generator[Any, bool | None, T]) -> T:
    """What a generator returns, whatever it yields before."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


class Trainer:
    """A run of a task on this group of ranks."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        runtime: Runtime,
        directory: RunDirectory,
        joins: bool = False,
        is_driven: bool = False,
    ) -> None:
        """Assemble everything, and restore the newest valid checkpoint if there is one.

        Args:
            task: task to train.
            config: config of the run.
            runtime: transport, device and listeners of this process.
            directory: run directory, which rank 0 has claimed.
            joins: whether other ranks train already; their state is then received.
            is_driven: whether the body of a user's own loop gets each step.

        Raises:
            LockstepError: the task, config or checkpoint does not work; on all ranks.
            GroupBroken: a rank has died.
        """
        self._started = perf_counter()
        self._config = config
        self._directory = directory
        self._runtime = runtime
        self._transport = runtime.transport
        runtime.at("join" if joins else "met", 0)
        if not joins:
            check_size(config, runtime)
        parts = self._parts = assemble(task, config, runtime, is_driven)
        self._hooks = Hooks(config, runtime, parts, directory.path)
        self._reporter = Reporter(task.name, config, runtime, parts, directory)
        self._checkpointer = Checkpointer(config, runtime, parts, directory, self._on_written)
        progress = Progress() if joins else self._checkpointer.resume()
        self._state = RunState(config, runtime, parts, self._hooks, self._reporter, progress)
        self._microbatches = Microbatches(config, runtime, parts, progress)
        self._own_loop = OwnLoop(runtime, parts, self._hooks, self._state) if is_driven else None
        self._evaluation_audit = EvaluationAudit(self._transport, parts.pass_state)
        self._recovery = Recovery(
            config, runtime, parts, self._state, self._microbatches, self._checkpointer,
            self._reporter, is_new=joins,
        )  # fmt: skip
        self._is_state_checked = self._needs_repair = False
        if not joins:
            self._reporter.start(progress, is_over=self._state.is_over())
            if progress.step == 0:
                self._hint(task)
            runtime.at("ready", 0)

    def run(self) -> Finished:
        """As `steps`, without handing out anything."""
        return exhausted(self.steps())

    def steps(self) -> Generator[Step, bool | None, Finished]:
        """Train to the end of the run or of this session, and recover from the loss of ranks.

        Yields:
            Each step, if the loop is a user's own. It has to be sent whether that loop is left, and
            then ends in order; so the generator is not to be closed.

        Raises:
            LockstepError: the task does not work, or the state was lost; on all ranks.
            RankFailure: a rank has died, and this transport cannot go on without it.
        """
        self._parts.pass_state.open()
        try:
            if self._recovery.is_new:
                self._recover()
            while True:
                try:
                    return (yield from self._train())
                except GroupBroken as loss:
                    self._reporter.keep_calls(self._state.progress.step)
                    check_can_regroup(self._transport, loss)
                    self._recover()
                except TaskFailure as failure:
                    self._try_again(failure)
        finally:
            self._parts.pass_state.close()
            self._microbatches.close()
            self._parts.loader.close()

    @property
    def task(self) -> Task:
        """The task that is trained."""
        return self._parts.task_state.task

    @property
    def model(self) -> nn.Module:
        """The model, with the parameters of the newest step."""
        return self._parts.model

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self._state.progress

    def _train(self) -> Generator[Step, bool | None, Finished]:
        """Step until the run is over. A step counts once `RunState.commit` has it, not before."""
        state, train_step = self._state, self._parts.train_step
        if self._needs_repair:
            train_step.repair()
            self._needs_repair = False
        self._hooks.start(state.progress)
        self._parts.pass_state.note_start()
        self._hooks.check()
        if self._own_loop is not None:
            self._own_loop.settle()
        self._follow_up()  # of the step before: a loss may have interrupted it
        yield from self._hand_out()
        while not state.is_over():
            progress = state.progress
            result = self._step(progress)
            state.commit(result)
            self._check_state()
            self._follow_up()
            self._microbatches.share_places_if_due(state.progress.step)
            yield from self._hand_out()
            self._balance(result)
            self._checkpointer.poll()
            # A group grows between two steps only: then all ranks have the same state to copy.
            if result.grows and not state.is_over():
                raise GroupBroken("a new process is to join")
        return self._finish()

    def _step(self, progress: Progress) -> StepResult:
        """Do a step; twice, if the first time is to be compared with another one."""
        train_step = self._parts.train_step
        while True:
            try:
                return train_step.run(progress.step, progress.decays, self._microbatches.stream)
            except StepRepeated:
                train_step.repair()
                self._microbatches.refetch(progress.step)

    def _check_state(self) -> None:
        """Check once that all state can be saved: an optimizer has state only after a step."""
        if not self._is_state_checked:
            self._checkpointer.check_state()
            self._is_state_checked = True

    def _follow_up(self) -> None:
        """Evaluate, check and save what is due after the last step.

        After a loss all of this runs again, so each part must be safe to repeat.
        """
        state, progress = self._state, self._state.progress
        if state.stop_reason == DIRECTORY_LOST:
            self._rescue()
        # First, so that a half-finished change by a hook is neither evaluated nor saved.
        self._hooks.check_step()
        # Skipped if the evaluation was done and a loss interrupted what follows it.
        if state.is_evaluation_due() and progress.evaluated < progress.step:
            self._evaluate([name for name in self._parts.evaluations if is_validation(name)])
            self._hooks.check()
        if state.is_digest_due():
            self._checkpointer.check_replicas(progress)
        # From the progress, not from the evaluation just made: a checkpoint that a loss has
        # interrupted is still due when this runs again.
        improved = 0 < progress.step == progress.best_step
        if state.is_save_due() or improved:
            self._hooks.check_saved(progress.step)
            self._checkpointer.save(progress, improved)
            state.is_save_overdue = False

    def _hand_out(self) -> Generator[Step, bool | None, None]:
        """Let the body of a user's own loop have the step, and do what it asks for."""
        if self._own_loop is None:
            return
        if (yield from self._own_loop.hand_out()):
            # Saved before the body ran, the run would go on from there.
            self._checkpointer.forget()

    def _rescue(self) -> NoReturn:
        """Save the state next to a run directory that is gone, and end.

        Raises:
            RunDirectoryError: always; on all ranks.
        """
        path = self._checkpointer.rescue(self._state.progress)
        gone, step = self._directory.lost or path, self._state.progress.step
        raise shared(
            RunDirectoryError(
                f"{gone}: was deleted, moved or replaced while the run trained in it, so training "
                f"has stopped after step {step}. The state of that step is in {path}: go on with "
                f"`lockstep resume {path}`"
            )
        )

    def _on_written(self, folder: Path) -> None:
        self._hooks.after_checkpoint(self._state.progress, folder)

    def _test(self, splits: Sequence[str]) -> None:
        """Evaluate test splits, with the best parameters where `test_on` asks for them."""
        progress, parts = self._state.progress, self._parts
        last, best = progress.step, progress.best_step
        if self._config.test_on == "last" or best in (0, last):
            self._evaluate(splits)
            return
        root, runtime = self._directory.checkpoints, self._runtime
        with temporary_state(root, best, last, parts.train_step, runtime) as step:
            self._evaluate(splits, None if step == last else step)

    def _evaluate(self, splits: Sequence[str], model_step: int | None = None) -> None:
        """Evaluate splits. Results are committed together: a loss may interrupt any of them."""
        parts = self._parts
        scores: dict[str, Scores] = {}
        seconds: dict[str, float] = {}
        for name in splits:
            started = perf_counter()
            self._runtime.at("evaluate", self._state.progress.step)
            evaluate = partial(
                parts.evaluations[name].run,
                self._transport,
                parts.model,
                parts.compute,
                self._runtime.heartbeat.beat,
                parts.placement,
                parts.train_step.tables,
            )
            # Parameters of another step are those that were kept, so they are as they should be.
            is_own = model_step is None
            with parts.train_step.flat_optimizer.evaluating() if is_own else nullcontext():
                scores[name] = self._evaluation_audit.run(name, evaluate)
            seconds[name] = perf_counter() - started
        self._state.commit_evaluation(scores, seconds, model_step)

    def _balance(self, result: StepResult) -> None:
        """Reassign microbatches by measured speed, every `balance_every` steps."""
        step = self._state.progress.step
        proposal = self._microbatches.balance(step, result)
        if proposal is not None:
            self._runtime.emit(
                Rebalanced(
                    step=step,
                    microbatches=tuple(len(r) for r in proposal.ranges),
                    slowest=proposal.slowest,
                    slowdown=proposal.slowdown,
                )
            )

    def _recover(self) -> None:
        self._recovery.run()
        self._needs_repair = False
        self._is_state_checked = False  # joining ranks have not checked their state

    def _try_again(self, failure: TaskFailure) -> None:
        """Prepare to repeat, once, a step in which the task's code has failed.

        Raises:
            TaskFailure: it is not the first time, or other ranks do not know of it.
        """
        state, step = self._state, self._state.progress.step
        # What a task does after a step may be half done, and cannot be undone.
        if state.failed_step == step or self._hooks.has_failed or not failure.is_shared:
            raise failure
        state.failed_step = step
        self._runtime.emit(Warned(step=step, message=f"step {step} is done again: {failure}"))
        self._needs_repair = True
        self._microbatches.refetch(step)

    def _hint(self, task: Task) -> None:
        """Warn of likely mistakes in the task, and of what it says about its data."""
        parts = self._parts
        losses: list[str] = []
        # Only where each rank has a loss and can compute the model without the others.
        if not parts.placement.are_staged and not parts.placement.in_slices:
            losses = mean_loss(parts.model, parts.compute, parts.loader)
            if self._config.num_microbatches > 1 and parts.compute.batch_loss is None:
                losses += coupled_loss(parts.model, parts.compute, parts.loader)
        remarks = everywhere(self._transport, task.data_remarks)
        for hint in (*ignored_methods(type(task)), *losses, *remarks, *parts.loader.remarks):
            self._runtime.emit(Warned(step=0, message=hint))

    def _finish(self) -> Finished:
        """Make sure the state is saved, evaluate the test splits, and sum up."""
        state, progress, parts = self._state, self._state.progress, self._parts
        self._microbatches.close()
        if self._checkpointer.check_directory():
            self._rescue()
        # Before the test split is evaluated, since an error there must not cost the last steps.
        folder = self._checkpointer.finish(progress)
        tests = [name for name in parts.evaluations if not is_validation(name)]
        if progress.finished and tests:
            self._test(tests)
        carries, tables = parts.train_step.carries, parts.train_step.tables
        with parts.train_step.flat_optimizer.evaluating():
            digest = whole_digest(parts.train_step)
        finished = Finished(
            step=progress.step,
            status="completed" if progress.finished else "stopped",
            reason=progress.finished or state.stop_reason,
            exit_code=0 if progress.finished else EXIT_CODES.get(state.stop_reason, 0),
            params_sha256=digest,
            metrics=self._reporter.final_metrics(progress),
            world_size=self._transport.size,
            wall_s=perf_counter() - self._started,
            checkpoint=folder,
            test_step=state.test_step,
            arrays=progress.arrays,
            carry_sha256=carries.digest() if carries is not None else "",
            tables_sha256=tables.digest() if tables is not None else "",
        )
        self._hooks.end(progress, finished.status, finished.reason)
        self._runtime.emit(finished)
        # All leave together: a rank that leaves early looks dead, and the others would recover.
        self._transport.agree()
        # Last: had a rank been lost before, all of this would be done again.
        parts.train_step.flat_optimizer.end()
        return finished
