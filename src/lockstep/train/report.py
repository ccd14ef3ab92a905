"""From steps to events: sums between two reports, and everyone's times."""

from __future__ import annotations

import os
import socket
from time import perf_counter

from lockstep.config import TrainConfig
from lockstep.parallel.layout import split
from lockstep.train.events import Joined, RankTimes, RunStarted, StepDone
from lockstep.train.progress import Progress
from lockstep.train.rundir import RunDirectory
from lockstep.train.runtime import Runtime
from lockstep.train.setup import Parts
from lockstep.train.step import StepResult


class Reporter:
    """Adds up what steps did, and emits it every `config.log_every` steps."""

    def __init__(
        self,
        task: str,
        config: TrainConfig,
        runtime: Runtime,
        parts: Parts,
        directory: RunDirectory,
    ) -> None:
        self._task = task
        self._config = config
        self._runtime = runtime
        self._parts = parts
        self._directory = directory
        self._metrics = parts.compute.metrics or ()
        self._sums = [0.0] * (2 + 2 * len(self._metrics))
        self._num_steps = self._samples = 0
        self._times = [[0.0] * 4 for _ in range(runtime.transport.size)]
        self._since = perf_counter()
        self._last: dict[str, float] = {}

    def regroup(self, former: list[int]) -> None:
        """Go on in another group.

        Args:
            former: for each rank, the one it had.
        """
        self._times = [self._times[rank] for rank in former]

    def start(self, progress: Progress) -> None:
        """Say who takes part and what is planned; a collective."""
        runtime, config, transport = self._runtime, self._config, self._runtime.transport
        ranges = split(config.num_microbatches, transport.size)
        mine = {
            "slot": runtime.slot,
            "rank": transport.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "local_rank": runtime.local_rank,
            "device": str(runtime.device),
            "threads": config.threads,
        }
        for row in transport.gather_json(mine):
            first, last = ranges[row["rank"]]
            runtime.emit(Joined(step=progress.step, microbatches=(first, last), **row))
        self.plan(progress)
        self._since = perf_counter()

    def plan(self, progress: Progress, continued: bool = False) -> None:
        """Say what is planned."""
        runtime, config, transport, parts = (
            self._runtime, self._config, self._runtime.transport, self._parts,
        )  # fmt: skip
        runtime.emit(
            RunStarted(
                step=progress.step,
                task=self._task,
                run_dir=str(self._directory.path),
                config_hash=config.hash,
                total_steps=parts.total_steps,
                steps_per_epoch=parts.sampler.steps_per_epoch,
                num_samples=parts.sampler.num_samples,
                num_parameters=sum(p.numel() for p in parts.model.parameters()),
                world_size=transport.size,
                transport=transport.name,
                launcher=runtime.launcher,
                device=str(runtime.device),
                threads=config.threads,
                num_microbatches=config.num_microbatches,
                batch_size=config.batch_size,
                continued=continued,
            )
        )

    def add(self, progress: Progress, result: StepResult, flush: bool) -> None:
        """Count a step in; emit if it is time to."""
        self._sums = [a + b for a, b in zip(self._sums, result.scalars, strict=True)]
        self._num_steps += 1
        self._samples += self._parts.sampler.step_size(progress.step - 1)
        if flush or progress.step % self._config.log_every == 0:
            self._emit(progress, result)

    def final_metrics(self, progress: Progress) -> dict[str, float]:
        """The newest training and evaluation metrics, by "split/name"."""
        return {f"train/{k}": v for k, v in self._last.items()} | progress.metrics

    def _emit(self, progress: Progress, result: StepResult) -> None:
        now = perf_counter()
        names = ("loss", *self._metrics)
        pairs = zip(names, self._sums[::2], self._sums[1::2], strict=True)
        means = {name: total / weight for name, total, weight in pairs}
        self._last = dict(means)
        differences = [
            [a - b for a, b in zip(after, before, strict=True)]
            for after, before in zip(result.times, self._times, strict=True)
        ]
        self._runtime.emit(
            StepDone(
                step=progress.step,
                num_steps=self._num_steps,
                epoch=self._parts.sampler.epoch(progress.step - 1),
                loss=means.pop("loss"),
                metrics=means,
                lr=result.lr,
                grad_norm=result.grad_norm,
                loss_scale=self._parts.step.loss_scale.value,
                samples=self._samples,
                seconds=now - self._since,
                ranks=tuple(RankTimes(rank, *times) for rank, times in enumerate(differences)),
            )
        )
        self._times = result.times
        self._sums = [0.0] * len(self._sums)
        self._num_steps = self._samples = 0
        self._since = now
