"""Turns steps into events: sums between two reports, and the times of all ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

from lockstep.config import TrainConfig
from lockstep.engine.assembly import Parts
from lockstep.engine.call_history import losses
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.evaluation.batches import is_validation
from lockstep.engine.events import (
    ExchangeChosen,
    Joined,
    RankLost,
    RankTimes,
    Recovered,
    RunStarted,
    StepDone,
    Warned,
)
from lockstep.engine.recovery.leader import NOWHERE, Origin
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime
from lockstep.engine.step.memory import device_memory
from lockstep.engine.step.sums import StepResult
from lockstep.engine.timing import Times, counted_cores
from lockstep.parallel.reduction import Way

_COUNTS = (
    "faults", "preemptions", "peak_bytes", "swapped_bytes", "device_bytes", "device_retries",
    "num_calls", "sent_bytes", "received_bytes",
)  # fmt: skip
"""Fields of `Times` that are whole numbers."""


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
        self._metrics = parts.compute.metrics
        self._sums = [0.0] * (2 + 2 * len(self._metrics))
        self._num_steps = self._samples = 0
        self._slots: list[int] = []
        self._has_stored = False
        self._times = [Times()] * runtime.transport.size
        self._since = perf_counter()
        self._way: Way | None = None

    def own_row(self) -> dict[str, Any]:
        """The fields of this process's `Joined` event, but for its step and microbatches."""
        runtime = self._runtime
        return {
            "slot": runtime.slot,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "local_rank": runtime.local_rank,
            "device": str(runtime.device),
            "threads": self._config.threads,
            "cores": runtime.cores,
            "counted_cores": counted_cores(),
            "rounding": self._parts.rounding.digest,
            "machine": self._parts.rounding.machine,
            "device_bytes": device_memory(runtime.device)[1],
        }

    def state_dict(self) -> dict[str, Any]:
        """What a joining rank needs, as JSON."""
        return {
            "sums": self._sums,
            "num_steps": self._num_steps,
            "samples": self._samples,
            "times": self._times,
            "backlog": self._runtime.backlog.rows(),
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Go on from what `state_dict` said on another rank."""
        self._sums = values["sums"]
        self._num_steps, self._samples = values["num_steps"], values["samples"]
        self._times = [Times(*times) for times in values["times"]]
        self._runtime.backlog.take(values["backlog"])

    def regroup(
        self, progress: Progress, origin: Origin, copied: bool, seconds: float, reached: int
    ) -> None:
        """Go on in another group, and emit what has changed.

        Args:
            progress: position of the run.
            origin: former ranks of the members of the group.
            copied: whether ranks that were behind got the state from another.
            seconds: wall time since the loss was noticed.
            reached: number of steps that were done; more than `progress` has if it went back.
        """
        emit, step = self._runtime.emit, progress.step
        begins = self._directory.stores and not self._has_stored
        if origin.former[0] != 0 or begins:
            self._emit_plan(progress, continued=True)
        slots = [row["slot"] for row in origin.rows]
        for event in self._losses(reached, slots):
            emit(event)
        if reached > step:
            self._discard(progress, reached)
        # A joining rank knows of nobody; it may have to store this for rank 0, as others do.
        known = [s for s, f in zip(slots, origin.former, strict=True) if f != NOWHERE]
        self._emit_joined(progress, origin.rows, self._slots or known)
        self._slots = slots
        self._times = [Times() if r == NOWHERE else self._times[r] for r in origin.former]
        self._way = None  # to be emitted for the new group, too
        assigned = tuple(map(len, self._parts.placement.mesh.microbatches))
        emit(
            Recovered(
                step=step,
                world_size=len(slots),
                seconds=seconds,
                copied=copied,
                microbatches=assigned,
            )
        )

    def keep_calls(self, step: int) -> None:
        """Write down this process's newest calls, if one of them has failed.

        Args:
            step: committed steps.
        """
        calls = self._runtime.transport.call_ring
        if not calls.has_failed:  # the group is broken for a joining rank, not by a loss
            return
        try:
            self._directory.flight.keep(self._runtime.slot, calls.copy())
        except OSError as error:
            path = self._directory.flight.lost_file(self._runtime.slot)
            message = f"{path}: the newest calls cannot be written: {error.strerror}"
            self._runtime.emit(Warned(step=step, message=message))

    def _losses(self, step: int, left: Sequence[int]) -> list[RankLost]:
        """An event for each lost rank, with what is known of the cause.

        Args:
            step: committed steps.
            left: slots that are left.
        """
        lost = {slot: rank for rank, slot in enumerate(self._slots) if slot not in left}
        reasons = {slot: self._directory.hang_reason(slot) for slot in lost}
        flight, is_first = self._directory.flight, self._runtime.is_first
        # Of one rank only: it moves the files away next, and another one might come too late.
        logs = flight.present() if is_first and any(reasons.values()) else {}
        events = losses(step, lost, reasons, logs)
        if is_first:
            try:
                if lost:
                    flight.set_aside(lost)
                else:
                    flight.forget()
            except OSError as error:
                message = f"{error.filename}: cannot be moved or removed: {error.strerror}"
                self._runtime.emit(Warned(step=step, message=message))
        return events

    def _discard(self, progress: Progress, reached: int) -> None:
        """Discard the sums of steps that will be repeated from a checkpoint, and warn of it."""
        self._sums = [0.0] * len(self._sums)
        self._num_steps = self._samples = 0
        message = (
            "what some microbatches carry was lost with the ranks that had it; steps "
            f"{progress.step + 1} to {reached} are done again, from the checkpoint of step "
            f"{progress.step}"
        )
        self._runtime.emit(Warned(step=reached, message=message))
        self._emit_plan(progress)

    def _emit_joined(
        self, progress: Progress, rows: Sequence[dict[str, Any]], known: Sequence[int]
    ) -> None:
        """Emit `Joined` for the processes that are new."""
        ranges = self._parts.placement.mesh.microbatches
        self._parts.train_step.rounds_alike = len({row["rounding"] for row in rows}) == 1
        for rank, row in enumerate(rows):
            if row["slot"] not in known:
                own = tuple(ranges[rank])
                joined = Joined(step=progress.step, rank=rank, microbatches=own, **row)
                self._runtime.emit(joined)
                if row["rounding"] != rows[0]["rounding"]:
                    message = (
                        f"rank {rank} rounds otherwise than rank 0, so the bits of the result "
                        f"depend on what each of them computes: {row['machine']}, and "
                        f"{rows[0]['machine']}"
                    )
                    self._runtime.emit(Warned(step=progress.step, message=message))

    def start(self, progress: Progress, is_over: bool) -> None:
        """Say who takes part, what is planned, and what may not be expected; a collective."""
        rows = self._runtime.transport.gather_json(self.own_row())
        self._emit_joined(progress, rows, ())
        self._slots = [row["slot"] for row in rows]
        self._emit_plan(progress)
        for message in self._surprises(progress, is_over):
            self._runtime.emit(Warned(step=progress.step, message=message))
        self._since = perf_counter()

    def _surprises(self, progress: Progress, is_over: bool) -> Iterator[str]:
        """Warnings about what the user may not expect of this run."""
        transport, used = self._runtime.transport, self._config.num_microbatches
        if transport.name == "mpi" and not transport.can_regroup:
            yield (
                "recovery is off: a dead rank ends the job, to be resumed from its newest "
                "checkpoint; to go on without dead ranks start with `lockstep train -n N`, or with "
                "`mpirun --with-ft ulfm` of Open MPI 5"
            )
        mesh = self._parts.placement.mesh
        if mesh.incomplete:
            sizes = {"mesh.pp": mesh.pp, "mesh.tp": mesh.tp}
            keys = ", ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
            yield (
                f"{transport.size} ranks for replicas of {mesh.num_columns} ({keys}): the last "
                f"{len(mesh.incomplete)} fill none and are spares with nothing to compute; start "
                f"a multiple of {mesh.num_columns}"
            )
        elif mesh.num_spares:
            first, last = used * mesh.num_columns, transport.size - 1
            who = f"ranks {first} to {last} are spares" if last > first else f"rank {last} is spare"
            yield (
                f"{transport.size} ranks for {used} microbatches: {who} with nothing to compute; "
                "raise num_microbatches to use them"
            )
        steps, num_samples = self._config.local.steps, self._parts.sampler.step_size(0)
        if steps > 1 and num_samples < used * steps:
            yield (
                f"local.steps={steps}: {num_samples} samples of a step are less than one for each "
                f"step of each of {used} workers; who has fewer takes fewer steps"
            )
        if self._parts.sampler.steps_per_epoch is None:
            yield from self._without_epochs()
        if is_over and progress.finished:
            yield f"this run is already complete ({progress.finished}): nothing left to train"

    def _without_epochs(self) -> Iterator[str]:
        """What would happen at the end of an epoch, if there was one."""
        config, problem = self._config, "dataset('train') does not say its length, so no epoch ends"
        if not config.checkpoint.every:
            yield f"checkpoint.every=0: {problem}: the only checkpoint is the last; set the key"
        if not config.eval_every and any(map(is_validation, self._parts.evaluations)):
            yield f"eval_every=0: {problem}: the only evaluation is the last; set the key"

    def _emit_plan(self, progress: Progress, continued: bool = False) -> None:
        """Emit `RunStarted`, with what is planned."""
        self._has_stored = self._directory.stores
        runtime, config, transport, parts = (
            self._runtime, self._config, self._runtime.transport, self._parts,
        )  # fmt: skip
        runtime.emit(
            RunStarted(
                step=progress.step,
                task=self._task,
                run_dir=self._directory.name,
                config_hash=config.hash,
                total_steps=parts.total_steps,
                steps_per_epoch=parts.sampler.steps_per_epoch or 0,
                num_samples=parts.sampler.num_samples or 0,
                num_parameters=sum(p.numel() for p in parts.model.parameters()),
                world_size=transport.size,
                transport=transport.name,
                launcher=runtime.launcher,
                device=str(runtime.device),
                threads=config.threads,
                num_microbatches=config.num_microbatches,
                batch_size=parts.sampler.step_size(0),
                continued=continued,
            )
        )

    def add(self, progress: Progress, result: StepResult, flush: bool) -> None:
        """Add a step to the sums; emit them every `log_every` steps."""
        if self._way is None and self._runtime.transport.size > 1:
            self._emit_exchange(progress.step)
        self._sums = [a + b for a, b in zip(self._sums, result.scalars, strict=True)]
        self._num_steps += 1
        self._samples += self._parts.sampler.step_size(progress.step - 1)
        if flush or progress.step % self._config.log_every == 0:
            self._emit(progress, result)

    def _emit_exchange(self, step: int) -> None:
        """Emit how gradients are exchanged, once that is known for the group."""
        way = self._parts.train_step.workspace.way
        if way is not None:
            self._way = way
            self._runtime.emit(ExchangeChosen(step=step, way=way.name, reason=way.reason))

    def final_metrics(self, progress: Progress) -> dict[str, float]:
        """The newest training and evaluation metrics, by "split/name"."""
        return {f"train/{k}": v for k, v in progress.trained.items()} | progress.metrics

    def _emit(self, progress: Progress, result: StepResult) -> None:
        now = perf_counter()
        names = ("loss", *self._metrics)
        pairs = zip(names, self._sums[::2], self._sums[1::2], strict=True)
        # A phase that had no step since the last report has weights of 0.
        means = {name: total / weight for name, total, weight in pairs if weight}
        progress.trained = dict(means)
        times = result.rank_times()
        pairs_of_times = zip(times, self._times, strict=True)
        spent = [after.since(before) for after, before in pairs_of_times]
        self._runtime.emit(
            StepDone(
                step=progress.step,
                num_steps=self._num_steps,
                epoch=self._parts.sampler.epoch(progress.step - 1),
                loss=means.pop("loss"),
                metrics=means,
                lr=result.lr,
                grad_norm=result.grad_norm,
                loss_scale=self._parts.train_step.loss_scale.value,
                samples=self._samples,
                seconds=now - self._since,
                ranks=tuple(_rank_times(rank, times) for rank, times in enumerate(spent)),
            )
        )
        self._times = times
        self._sums = [0.0] * len(self._sums)
        self._num_steps = self._samples = 0
        self._since = now


def _rank_times(rank: int, times: Times) -> RankTimes:
    """What a rank has spent; numbers that count things have travelled as float64."""
    counts = {name: int(getattr(times, name)) for name in _COUNTS}
    return RankTimes(rank, **times._asdict() | counts)
