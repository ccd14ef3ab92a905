"""The training loop: from the first step to the result."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from lockstep.config import TrainConfig
from lockstep.errors import CheckpointError
from lockstep.parallel.layout import split
from lockstep.train import checkpoint
from lockstep.train.events import Evaluated, Finished, Improved, Resumed, Warned
from lockstep.train.flat import model_digest
from lockstep.train.progress import Progress
from lockstep.train.replicas import check_replicas
from lockstep.train.report import Reporter
from lockstep.train.restore import capture, check_fits, restore
from lockstep.train.rundir import RunDirectory
from lockstep.train.runtime import Runtime, on_first
from lockstep.train.saver import Saver
from lockstep.train.setup import Parts, assemble
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
        self._config = config
        self._runtime = runtime
        self._transport = runtime.transport
        self._directory = directory
        self._started = perf_counter()
        self._parts: Parts = assemble(task, config, runtime)
        self._step = self._parts.step
        self._progress = Progress()
        self._stop_reason = ""
        self._saved_step = -1
        self._saver = Saver(
            directory.checkpoints, config.checkpoint.keep, config.checkpoint.background,
            runtime.emit,
        )  # fmt: skip
        self._reporter = Reporter(task.name, config, runtime, self._parts, directory)
        self._resume()

    def run(self) -> Finished:
        """Train to the end, or to where this sitting is to stop."""
        self._reporter.start(self._progress)
        self._name_spares()
        batches = self._batches()
        if self._is_over() and self._progress.finished:
            self._say_finished()
        while not self._is_over():
            result = self._step.run(self._progress.step, batches)
            self._progress.step += 1
            self._stop_reason = self._stop_reason or result.stop_reason
            self._reporter.add(self._progress, result, last=self._is_over())
            improved = self._evaluate_if_due()
            self._check_replicas_if_due()
            self._save_if_due(improved)
        return self._finish()

    def _name_spares(self) -> None:
        size, used = self._transport.size, self._config.num_microbatches
        if size > used:
            self._runtime.emit(
                Warned(
                    step=self._progress.step,
                    message=f"{size} ranks for {used} microbatches: ranks {used} to {size - 1} are "
                    "spares with nothing to compute; raise num_microbatches to use them",
                )
            )

    def _say_finished(self) -> None:
        progress = self._progress
        message = f"this run is already complete ({progress.finished}): nothing left to train"
        self._runtime.emit(Warned(step=progress.step, message=message))

    def _batches(self) -> Iterator[Any]:
        """This rank's microbatches, from the present step on."""
        ranges = split(self._config.num_microbatches, self._transport.size)
        return self._parts.loader.stream(
            ranges[self._transport.rank], self._progress.step, self._parts.total_steps
        )

    def _is_over(self) -> bool:
        progress = self._progress
        if progress.step >= self._parts.total_steps and not progress.finished:
            progress.finished = "all steps done"
        if not progress.finished and progress.step == self._config.stop_at_step:
            self._stop_reason = self._stop_reason or f"stop_at_step={progress.step}"
        return bool(progress.finished or self._stop_reason)

    def _is_due(self, every: int) -> bool:
        """Every so many steps, or, for 0, at the end of an epoch."""
        return self._progress.step % (every or self._parts.sampler.steps_per_epoch) == 0

    def _evaluate_if_due(self) -> bool:
        """Evaluate the validation split; whether the watched metric is the best so far."""
        progress = self._progress
        last = progress.step == self._parts.total_steps
        if "val" not in self._parts.evaluations or not (
            last or self._is_due(self._config.eval_every)
        ):
            return False
        metrics = self._evaluate("val")
        improved = progress.judge(self._config, metrics)
        if improved:
            value = metrics[self._config.watch]
            self._runtime.emit(Improved(step=progress.step, metric=self._config.watch, value=value))
        if progress.exhausted(self._config) and not progress.finished:
            progress.finished = (
                f"early stopping: no better {self._config.watch} since step {progress.best_step}"
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

    def _check_replicas_if_due(self) -> None:
        every = self._config.digest_every
        if every and self._progress.step % every == 0:
            self._check_replicas()

    def _check_replicas(self) -> None:
        if self._transport.size > 1:
            check_replicas(self._transport, self._parts.model, self._progress.step)

    def _save_if_due(self, improved: bool) -> None:
        if self._runtime.is_first:
            self._saver.poll()
        if improved or self._is_due(self._config.checkpoint.every) or self._is_over():
            self._save(improved)

    def _save(self, best: bool = False) -> None:
        started = perf_counter()
        self._check_replicas()
        is_first = self._runtime.is_first
        make = capture(self._step, self._parts.model, self._progress, self._meta(), is_first)
        if make is not None:
            self._saver.save(make, best, started)
        self._step.watch.checkpoint_s += perf_counter() - started
        self._saved_step = self._progress.step

    def _meta(self) -> dict[str, Any]:
        config, transport = self._config, self._transport
        return {
            "config": config.model_dump(mode="json"),
            "config_hash": config.hash,
            "sampler": {
                "num_samples": self._parts.sampler.num_samples,
                "data_digest": self._parts.data_digest,
                "epoch": self._parts.sampler.epoch(self._progress.step),
            },
            "layout": {"world_size": transport.size, "transport": transport.name},
            "versions": {
                "lockstep": _version(),
                "torch": str(torch.__version__),
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def _resume(self) -> None:
        """Continue from the newest valid checkpoint, if there is any."""
        snapshot: checkpoint.Snapshot | None = None
        folder: Path | None = None
        skipped: list[str] = []
        if self._runtime.is_first:
            snapshot, folder, skipped = checkpoint.newest_valid(self._directory.checkpoints)
        for reason in skipped:
            self._runtime.emit(Warned(step=0, message=f"{reason}; trying the one before"))

        def check() -> bool:
            if snapshot is None:
                return False
            check_fits(snapshot, self._parts.model, str(folder))
            self._check_data(snapshot, str(folder))
            return True

        if on_first(self._transport, check):
            self._progress = restore(snapshot, self._step, self._parts.model, self._transport)
            self._saved_step = self._progress.step
            self._runtime.emit(
                Resumed(step=self._progress.step, path=str(folder), skipped=tuple(skipped))
            )

    def _check_data(self, snapshot: checkpoint.Snapshot, where: str) -> None:
        there = snapshot.meta["sampler"]
        here = self._parts.sampler.num_samples
        if there["num_samples"] != here:
            raise CheckpointError(
                f"{where}: was trained on {there['num_samples']} samples, the dataset has {here} "
                "now; resume with the same data or start a new run"
            )
        if there["data_digest"] != self._parts.data_digest:
            raise CheckpointError(
                f"{where}: was trained on other data: the first microbatch of the dataset has "
                "changed; resume with the same data or start a new run"
            )

    def _finish(self) -> Finished:
        """Save, evaluate the test split, and sum up."""
        progress = self._progress
        if self._saved_step != progress.step:
            self._save()
        if progress.finished and "test" in self._parts.evaluations:
            self._evaluate("test")
        folder = on_first(self._transport, lambda: str(self._saver.finish(progress.step)))
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


def _version() -> str:
    from importlib.metadata import version

    return version("lockstep-train")
