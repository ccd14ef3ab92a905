"""The training loop: from the first step to the result."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from lockstep.config import TrainConfig
from lockstep.parallel.layout import split
from lockstep.train.events import Evaluated, Finished, Improved, Warned
from lockstep.train.flat import model_digest
from lockstep.train.keeper import Keeper
from lockstep.train.report import Reporter
from lockstep.train.rundir import RunDirectory
from lockstep.train.runtime import Runtime
from lockstep.train.setup import assemble
from lockstep.train.task import Task

EXIT_CODES = {"interrupted": 130, "terminated": 143, "preempted": 143}
"""What a process stopped on request exits with: 128 + the number of the usual signal."""


class Trainer:
    """A run of a task on this group of ranks."""

    def __init__(
        self, task: Task, config: TrainConfig, runtime: Runtime, directory: RunDirectory
    ) -> None:
        """Assemble everything, and restore the newest valid checkpoint if there is one.

        Raises:
            LockstepError: the task, config or checkpoint does not work; on all ranks.
        """
        self._started = perf_counter()
        self._config = config
        self._runtime = runtime
        self._transport = runtime.transport
        self._parts = assemble(task, config, runtime)
        self._reporter = Reporter(task.name, config, runtime, self._parts, directory)
        self._keeper = Keeper(config, runtime, self._parts, directory)
        self._progress = self._keeper.resume()
        self._stop_reason = ""

    def run(self) -> Finished:
        """Train to the end, or to where this sitting is to stop."""
        progress = self._progress
        self._reporter.start(progress)
        self._warn()
        batches = self._batches()
        while not self._is_over():
            result = self._parts.step.run(progress.step, batches)
            progress.step += 1
            self._stop_reason = self._stop_reason or result.stop_reason
            to_save, to_evaluate = self._is_save_due(), self._is_evaluation_due()
            self._reporter.add(progress, result, flush=to_save or to_evaluate)
            improved = to_evaluate and self._evaluate_and_judge()
            if self._is_digest_due():
                self._keeper.check_replicas(progress)
            if to_save or improved or self._is_over():
                self._keeper.save(progress, improved)
            self._keeper.poll()
        return self._finish()

    def _batches(self) -> Iterator[Any]:
        """This rank's microbatches, from the present step on."""
        ranges = split(self._config.num_microbatches, self._transport.size)
        return self._parts.loader.stream(
            ranges[self._transport.rank], self._progress.step, self._parts.total_steps
        )

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
        return self._is_due(self._config.checkpoint.every) or self._is_over()

    def _is_evaluation_due(self) -> bool:
        # Where a sitting ends must not matter, or an interrupted run would judge otherwise.
        last = self._progress.step == self._parts.total_steps
        return "val" in self._parts.evaluations and (last or self._is_due(self._config.eval_every))

    def _is_digest_due(self) -> bool:
        every = self._config.digest_every
        return every > 0 and self._progress.step % every == 0

    def _evaluate_and_judge(self) -> bool:
        """Evaluate the validation split; whether the watched metric is the best so far."""
        progress, config = self._progress, self._config
        metrics = self._evaluate("val")
        improved = progress.judge(config, metrics)
        if improved:
            value = metrics[config.watch]
            self._runtime.emit(Improved(step=progress.step, metric=config.watch, value=value))
        if progress.exhausted(config) and not progress.finished:
            progress.finished = (
                f"early stopping: no better {config.watch} since step {progress.best_step}"
            )
        return improved

    def _evaluate(self, name: str) -> dict[str, float]:
        started = perf_counter()
        parts = self._parts
        metrics = parts.evaluations[name].run(self._transport, parts.model, parts.compute)
        self._progress.metrics |= {f"{name}/{key}": value for key, value in metrics.items()}
        seconds = perf_counter() - started
        self._runtime.emit(
            Evaluated(step=self._progress.step, split=name, metrics=metrics, seconds=seconds)
        )
        return metrics

    def _warn(self) -> None:
        """Say what the user may not expect of this run."""
        size, used = self._transport.size, self._config.num_microbatches
        if size > used:
            self._say(
                f"{size} ranks for {used} microbatches: ranks {used} to {size - 1} are spares with "
                "nothing to compute; raise num_microbatches to use them"
            )
        if self._is_over() and self._progress.finished:
            self._say(
                f"this run is already complete ({self._progress.finished}): nothing left to train"
            )

    def _say(self, message: str) -> None:
        self._runtime.emit(Warned(step=self._progress.step, message=message))

    def _finish(self) -> Finished:
        """Make sure the state is saved, evaluate the test split, and sum up."""
        progress = self._progress
        folder = self._keeper.finish(progress)
        if progress.finished and "test" in self._parts.evaluations:
            self._evaluate("test")
        return Finished(
            step=progress.step,
            status="completed" if progress.finished else "stopped",
            reason=progress.finished or self._stop_reason,
            exit_code=0 if progress.finished else EXIT_CODES.get(self._stop_reason, 0),
            params_sha256=model_digest(self._parts.model),
            metrics=self._reporter.final_metrics(progress),
            world_size=self._transport.size,
            wall_s=perf_counter() - self._started,
            checkpoint=folder,
        )
