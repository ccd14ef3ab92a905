"""One training step, from the microbatches to the committed parameters.

Nothing of the committed state changes before `Step._commit`: until then a step can be given up
and done again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.config import TrainConfig
from lockstep.errors import NonFiniteError
from lockstep.parallel.layout import Range
from lockstep.parallel.norm import global_norm, sharded_global_norm
from lockstep.parallel.reduction import OrderedReduction
from lockstep.train.buffers import ForwardState
from lockstep.train.compute import Backward, Compute, check_weight
from lockstep.train.flat import FlatTensors
from lockstep.train.optimizer import Scalars, Stepper
from lockstep.train.precision import LossScale
from lockstep.train.runtime import Raised, Runtime, shared_error
from lockstep.train.schedule import lr_factor
from lockstep.train.timing import Stopwatch

STOP_REASONS = ("", "interrupted", "terminated", "preempted")
_FAILED, _STOP, _TIMES = 0, 1, 2
_NUM_FIXED = 6


class StepResult(NamedTuple):
    """What a committed step leaves to report."""

    scalars: list[float]
    """Loss and metrics of the global batch: [sum, weight, sum, weight, …]."""
    lr: float
    grad_norm: float
    stop_reason: str
    """Why the run should end now, the same on all ranks; empty if it should not."""
    times: list[list[float]]
    """For each rank, the seconds of its stopwatch when it sent them."""


class Step:
    """Everything a training step needs, bound together once.

    Attributes:
        flat: the trainable parameters.
        state: the buffers that forward passes change.
        stepper: the optimizer.
        loss_scale: of fp16.
        watch: where the time goes.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: TrainConfig,
        compute: Compute,
        flat: FlatTensors,
        state: ForwardState,
        optimizer: torch.optim.Optimizer,
        ranges: Sequence[Range],
        total_steps: int,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._compute = compute
        self._total_steps = total_steps
        self._sharded = config.optimizer.sharded
        self.flat = flat
        self.state = state
        self.loss_scale = LossScale(config.precision)
        self.watch = Stopwatch()
        self._backward = Backward(flat.tensors, state)
        self._num_scalars = 2 + 2 * len(compute.metrics or ())
        self._lay_out(ranges)
        self.stepper = Stepper(optimizer, flat, self._gradients, self._owned)

    def deal_out(self, ranges: Sequence[Range]) -> None:
        """Go on with other microbatches, or in another group; an interrupted step is given up.

        Args:
            ranges: the microbatches of each rank.
        """
        self.state.restore()
        self._lay_out(ranges)
        self.stepper.bind(self._gradients)

    def _lay_out(self, ranges: Sequence[Range]) -> None:
        """Memory for gradients and their exchange, which depends on the group."""
        config, flat, state = self._config, self.flat, self.state
        self._microbatches = ranges[self._runtime.transport.rank]
        self._reduction = OrderedReduction(
            self._runtime.transport,
            [*flat.segments, *state.flat.segments],
            [*flat.places, *state.flat.places],
            num_scalars=self._num_scalars,
            num_header=_NUM_FIXED + state.num_counters,
            num_microbatches=config.num_microbatches,
            ranges=ranges,
            device=self._runtime.device,
            bucket_bytes=config.bucket_bytes,
            gather=not self._sharded,
        )
        num_parameter_segments = len(flat.segments)
        self._gradients = self._reduction.total.segments[:num_parameter_segments]
        self._buffer_sums = self._reduction.total.segments[num_parameter_segments:]
        self._owned = self._reduction.owned[:num_parameter_segments]
        if not self._sharded:
            self._owned = [Range(0, s.numel) for s in flat.segments]
        self._own_gradients = [
            g[o.first : o.last] for g, o in zip(self._gradients, self._owned, strict=True)
        ]

    def run(self, step: int, batches: Iterator[Any]) -> StepResult:
        """Compute this rank's microbatches, sum over all ranks, step the parameters.

        Raises:
            NonFiniteError: the loss or the gradient is NaN or infinite, on every rank.
            TaskFailure: the task's code raised an exception on some rank, on every rank.
        """
        watch = self.watch
        watch.start()
        self._reduction.restart()
        losses: dict[int, float] = {}
        counters = [-math.inf] * self.state.num_counters
        error: Raised | None = None
        try:
            for microbatch in range(*self._microbatches):
                batch = next(batches)
                watch.data_s += watch.lap()
                counters = self._fold(step, microbatch, batch, counters, losses)
                watch.compute_s += watch.lap()
                self._runtime.transport.pulse.beat()
                self._runtime.at("compute", step)
        except (Exception, SystemExit) as caught:
            error = caught
        self._runtime.at("reduce", step)
        headers = self._reduce(error, counters)
        self._runtime.at("reduced", step)
        scalars = self._reduction.total.scalars.tolist()
        self._check(step, error, headers, scalars, losses)
        lr, norm = self._commit(step, scalars[1], headers)
        watch.compute_s += watch.lap()
        reason = STOP_REASONS[int(max(h[_STOP] for h in headers))]
        return StepResult(scalars, lr, norm, reason, [h[_TIMES:_NUM_FIXED] for h in headers])

    def stepper_state(self) -> dict[str, list[Tensor]]:
        """Copies of all whole-tensor optimizer state as flats; a collective if sharded."""
        flats = self.stepper.state_flats()
        if self._sharded:
            transport = self._runtime.transport
            keys = sorted({k for keys in transport.gather_json(sorted(flats)) for k in keys})
            flats = {
                k: flats.get(k) or [torch.zeros_like(f) for f in self.flat.flats] for k in keys
            }
            for segments in flats.values():
                for segment, flat in enumerate(segments):
                    self._reduction.gather(segment, flat)
        return flats

    def stepper_scalars(self) -> Scalars:
        """All other optimizer state; a collective if sharded."""
        scalars = self.stepper.state_scalars()
        if self._sharded:
            # A slice need not hold a piece of every group.
            for theirs in self._runtime.transport.gather_json(scalars):
                scalars |= theirs
        return scalars

    def _fold(
        self,
        step: int,
        microbatch: int,
        batch: Any,
        counters: list[float],
        losses: dict[int, float],
    ) -> list[float]:
        """One microbatch: forward, backward, and its leaf into the tree."""
        if batch is None:
            leaf: list[Tensor | None] = [None] * (
                len(self.flat.tensors) + len(self.state.flat.tensors)
            )
            self._reduction.fold.add(
                leaf, _float64([0.0] * self._num_scalars).to(self._runtime.device)
            )
            return counters
        loss = self._compute.forward(step, microbatch, batch)
        scalars = self._compute.scalars(loss)
        losses[microbatch] = scalars[0]
        leaf, counted = self._backward.leaf(loss, scalars[1], self.loss_scale.value)
        self._reduction.fold.add(leaf, _float64(scalars).to(self._runtime.device))
        return [max(pair) for pair in zip(counters, counted, strict=True)]

    def _reduce(self, error: Raised | None, counters: list[float]) -> list[list[float]]:
        """The canonical sum over all ranks, and every rank's header."""
        reason = self._runtime.stop_reason()
        stop = STOP_REASONS.index(reason) if reason else 0
        header = [float(error is not None), stop, *self.watch.values(), *counters]
        self._reduction.header.copy_(_float64(header))
        self._reduction.reduce()
        headers: list[list[float]] = self._reduction.headers().tolist()
        self.watch.communication_s += self.watch.lap()
        return headers

    def _commit(self, step: int, weight: float, headers: list[list[float]]) -> tuple[float, float]:
        """Clip, step the optimizer, advance buffers: learning rate and gradient norm."""
        config = self._config
        unit = 1.0 / (weight * self.loss_scale.value)
        norm = self._norm() * unit
        finite = math.isfinite(norm)
        if not finite and not self.loss_scale.enabled:
            self._raise_non_finite_gradient(step)
        self.loss_scale.update(finite)
        factor = lr_factor(config.schedule, step, self._total_steps)
        self._runtime.at("optimizer", step)
        if finite:
            if config.clip_norm is not None and norm > config.clip_norm:
                unit *= config.clip_norm / (norm + 1e-6)
            for gradient in self._own_gradients:
                gradient.mul_(unit)
            self.stepper.step(factor)
            if self._sharded:
                self._gather_parameters()
            self._commit_buffers(weight, headers)
        return self.stepper.base_lr * factor, norm

    def _norm(self) -> float:
        if not self._sharded:
            return global_norm(self._gradients)
        slices = self._reduction.slices[: len(self._gradients)]
        return sharded_global_norm(self._runtime.transport, self._gradients, slices)

    def _gather_parameters(self) -> None:
        self.watch.compute_s += self.watch.lap()
        for segment, flat in enumerate(self.flat.flats):
            self._reduction.gather(segment, flat)
        for segment, sums in enumerate(self._buffer_sums, start=len(self.flat.flats)):
            self._reduction.gather(segment, sums)
        self.watch.communication_s += self.watch.lap()

    def _commit_buffers(self, weight: float, headers: list[list[float]]) -> None:
        if not self.state.flat.tensors and not self.state.num_counters:
            return
        sums = [self.state.flat.view(self._buffer_sums, e) for e in self.state.flat.entries]
        counters = [
            int(max(column)) for column in zip(*(h[_NUM_FIXED:] for h in headers), strict=True)
        ]
        self.state.commit(sums, weight, counters)

    def _check(
        self,
        step: int,
        error: Raised | None,
        headers: list[list[float]],
        scalars: list[float],
        losses: dict[int, float],
    ) -> None:
        """Turn what went wrong on any rank into the same error on all."""
        if any(h[_FAILED] for h in headers):
            self.state.restore()
            failure = shared_error(self._runtime.transport, error)
            assert failure is not None
            raise failure
        if not math.isfinite(scalars[0]):
            raise self._non_finite_loss(step, losses)
        check_weight(scalars[1], step)

    def _non_finite_loss(self, step: int, losses: dict[int, float]) -> NonFiniteError:
        bad = [[m, str(value)] for m, value in losses.items() if not math.isfinite(value)]
        everyone = self._runtime.transport.gather_json(bad)
        places = ", ".join(
            f"{value} in microbatch {m} (rank {rank})"
            for rank, found in enumerate(everyone)
            for m, value in found
        )
        return NonFiniteError(
            f"step {step}: the loss is {places}; parameters and checkpoints are as after the step "
            "before. Lower lr, set clip_norm, or look at the data of this step"
        )

    def _raise_non_finite_gradient(self, step: int) -> None:
        names = [
            entry.name
            for entry in self.flat.entries
            if not self.flat.view(self._gradients, entry).isfinite().all()
        ]
        found = sorted({n for part in self._runtime.transport.gather_json(names) for n in part})
        raise NonFiniteError(
            f"step {step}: the loss is finite, but not the gradient of {', '.join(found[:3])}"
            f"{' and others' if len(found) > 3 else ''}; parameters and checkpoints are as after "
            "the step before"
        )


def _float64(values: list[float]) -> Tensor:
    # Five times faster than torch.tensor(values).
    return torch.from_numpy(np.array(values, dtype=np.float64))
