"""The forward and backward passes of a step: a leaf of the canonical tree for each microbatch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.ahead import moved
from lockstep.config import TrainConfig
from lockstep.engine.audit.pass_state import ForeseenSaves
from lockstep.engine.carry.distributed_carries import DistributedCarries
from lockstep.engine.faults import FaultsInside
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.passes.backward import Backward, Forwarded, Leaf
from lockstep.engine.passes.batch_loss import BatchLoss, digest
from lockstep.engine.passes.block_storage import BlockStorage
from lockstep.engine.passes.buffers import ForwardState, same_bits
from lockstep.engine.passes.compute import Compute, numbers_on
from lockstep.engine.passes.graphs import whole_passes
from lockstep.engine.passes.loss_checks import late_gradient
from lockstep.engine.passes.precision import NOTHING, LossScale
from lockstep.engine.passes.rows import Rows, gather
from lockstep.engine.placement import Placement
from lockstep.engine.runtime import Raised, Runtime
from lockstep.engine.snapshot.task_state import TaskState
from lockstep.engine.tables.step_tables import Tables
from lockstep.engine.timing import Stopwatch
from lockstep.errors import TaskError
from lockstep.nn.row import StageDone
from lockstep.parallel.compression.reduction import LeafSums
from lockstep.parallel.fold import LateGradientError
from lockstep.parallel.layout import Assigned, Pass
from lockstep.parallel.overlapped import OverlappedSlices, waited_s
from lockstep.parallel.rounds import Rounds


@dataclass
class StepParts:
    """What the parts of a training step work on.

    Attributes:
        runtime: surroundings of this process.
        config: config of the run.
        model: model of this rank.
        compute: computes the task's losses.
        state: buffers that forward passes change.
        placement: where each rank is on the mesh.
        loss_scale: loss scale of fp16; 1 for other precisions.
        watch: stopwatch of compute, communication, data and checkpoints.
        carries: what microbatches carry from step to step; None if they carry nothing.
        tables: tables whose rows are distributed; None if the model has none.
        storage: where gradients, or parameters too, are while their block is not computed; None if
            they are whole in memory.
        task_state: the task and its hooks.
        saves: as of `StepChecks`.
    """

    runtime: Runtime
    config: TrainConfig
    model: nn.Module
    compute: Compute
    state: ForwardState
    placement: Placement
    loss_scale: LossScale
    watch: Stopwatch
    carries: DistributedCarries | None
    tables: Tables | None
    storage: BlockStorage | None
    task_state: TaskState
    saves: ForeseenSaves


@dataclass
class _Made:
    """What is kept of a microbatch until the loss over the whole batch is known.

    Attributes:
        rows: what it gives the loss.
        passed: what its forward pass has left; None if there will be a second one.
        batch: batch for the second one.
    """

    rows: Rows
    passed: Forwarded | None
    batch: Any


class Passes:
    """Computes the microbatches of this rank, and adds them up as far as it can alone.

    Attributes:
        num_scalars: number of a leaf's scalars: sum and weight of the loss and of each metric.
        loss_digest: `batch_loss.digest` of the step's; 0 if it has no such loss.
        counters: what the microbatches of the step have made of each counter; -inf if none has.
        is_again: whether the step is done again, to be compared.
        leaves_numbers: whether nothing is fetched from the device before the sums.
    """

    def __init__(self, parts: StepParts, flat: FlatTensors) -> None:
        self._runtime, self._placement, self._watch = parts.runtime, parts.placement, parts.watch
        self._model, self._compute, self._state = parts.model, parts.compute, parts.state
        self._loss_scale, self._storage = parts.loss_scale, parts.storage
        self._tables = parts.tables
        # Compression keeps carries of its own, which no microbatch sees.
        self._carries = parts.carries if parts.compute.has_carry else None
        self._recomputes, self.is_again = parts.config.batch_loss.recompute, False
        self._inside = FaultsInside(parts.model, parts.runtime.at)
        self._parts, self.num_scalars = parts, 2 + 2 * len(parts.compute.metrics)
        self._scalars = torch.zeros(self.num_scalars, dtype=torch.float64)
        self._numbers, self._is_on_host = self._scalars.numpy(), parts.runtime.is_on_cpu
        self.use(flat)

    @property
    def is_over_batch(self) -> bool:
        """Whether the loss is one of the whole batch, whose value is the first microbatch's."""
        return self._compute.batch_loss is not None

    def use(self, flat: FlatTensors) -> None:
        """Make gradients of these parameters from now on."""
        self._flat = flat
        parameters, device = list(flat.tensors), self._runtime.device
        self._backward = Backward(self._model, parameters, self._state, self._storage, device)
        self._num_tensors = len(flat.tensors) + len(self._state.flat.tensors)
        self._whole = whole_passes(self._parts, self._backward)
        self.leaves_numbers = self._whole is not None

    def begin(self, step: int) -> None:
        """Forget what is left of the step before, or of another try of this one."""
        # What an evaluation or a hook has left in `grad` would be added to the first leaf.
        self._backward.clear_gradients()
        self._inside.step = self._placement.step = step
        self._losses: dict[int, float] = {}
        self._there: dict[int, Tensor] = {}
        self.loss_digest: int | Tensor = 0
        self.counters = [-math.inf] * self._state.num_counters
        if self._whole is not None:
            self._whole.begin(step)

    @property
    def counted(self) -> Tensor | None:
        """What leaves on a device make `counters`, float64 [num_counters]; None without any."""
        there = self._there if self._state.num_counters else {}
        return torch.stack([*there.values()])[:, self.num_scalars :].amax(0) if there else None

    @property
    def losses(self) -> dict[int, float]:
        """The loss sum of each microbatch of the step, by its number."""
        rows = torch.stack([*self._there.values()]).tolist() if self._there else []
        return self._losses | {m: row[0] for m, row in zip(self._there, rows, strict=True)}

    def look_up(self, step: int, microbatches: Assigned, batches: Iterator[Any]) -> Iterator[Any]:
        """Have the rows of tables that a step's microbatches need; the same batches again.

        A collective. The arguments are those of `run`.

        Raises:
            LockstepError: a batch could not be had, or what it looks up, on some rank; on all.
        """
        num, ahead, watch = self._placement.mesh.num_microbatches, [], self._watch

        def wanted() -> dict[int, dict[str, Tensor]]:
            for number in range(*microbatches):
                if number < num:
                    ahead.append([step, number, self.fetched(step, number, batches)])
            asked = {
                number: self._compute.wanted(step, number, batch, self._carries)
                for _, number, batch in ahead
                if batch is not None
            }
            watch.data_s += watch.lap()
            return asked

        assert self._tables is not None, "there is something to look up in"
        self._tables.fetch(step, wanted)
        watch.communication_s += watch.lap()
        return iter(ahead)

    def run(
        self, step: int, passes: Sequence[Pass], batches: Iterator[Any], sums: LeafSums
    ) -> None:
        """Compute a step's microbatches.

        Args:
            step: number of the step.
            passes: passes of this rank; microbatches whose numbers are too high are rounds in
                which it has none.
            batches: step, number and batch of each microbatch, in order.
            sums: takes their leaves.
        """
        if self._compute.batch_loss is not None:
            numbers = [microbatch for kind, microbatch, _ in passes if kind == "forward"]
            self._run_over_batch(self._compute.batch_loss, step, numbers, batches, sums)
            return
        watch = self._watch
        passed: dict[tuple[int, int], Forwarded | Leaf | None] = {}
        # A loss may change its batch, and each stage computes it from the beginning.
        copies: dict[int, Any] = {}
        for kind, microbatch, stage in passes:
            if microbatch >= self._placement.mesh.num_microbatches:
                assert isinstance(sums, Rounds)
                self._stand_by(kind, sums)
                continue
            is_first, is_last = self._placement.stage_order.enter(stage)
            if kind == "forward":
                batch = self.fetched(step, microbatch, batches) if is_first else copies[microbatch]
                if is_last:
                    copies.pop(microbatch, None)
                else:
                    copies[microbatch] = copy.deepcopy(batch)
                watch.data_s += watch.lap()
                passed[microbatch, stage] = self._forward(step, microbatch, batch)
                continue
            self._backward_pass(step, microbatch, passed.pop((microbatch, stage)), sums, is_first)
            self._end_pass(step, sums)
        self._placement.stage_order.finish()

    def _run_over_batch(
        self,
        batch_loss: BatchLoss,
        step: int,
        numbers: Sequence[int],
        batches: Iterator[Any],
        sums: LeafSums,
    ) -> None:
        """Compute a step's microbatches, whose loss is over the whole batch; a collective."""
        watch = self._watch
        made: dict[int, _Made | None] = {}
        error: Raised | None = None
        try:
            for microbatch in numbers:
                batch = self.fetched(step, microbatch, batches)
                watch.data_s += watch.lap()
                made[microbatch] = self._rows(batch_loss, step, microbatch, batch)
                watch.compute_s += watch.lap()
                self._runtime.heartbeat.beat()
            self._runtime.at("outputs", step)
        except (Exception, SystemExit) as caught:
            error = caught  # the other ranks are about to gather, and would wait for this one
        rows = {m: one.rows if one else None for m, one in made.items()}
        gathered = gather(self._placement.data, self._runtime.device, batch_loss.names, rows, error)
        watch.communication_s += watch.lap()
        whole = self._compute.over_batch(batch_loss, step, gathered, self._loss_scale.value)
        values = numbers_on(self._runtime.device, self._compute.scalars(step, whole.loss))
        self.loss_digest = digest(values)
        weight = values[1]
        nothing = [0.0] * len(values)
        for microbatch in numbers:
            one, passed = made.pop(microbatch), None
            if one is not None:
                passed = one.passed or self._passed_again(batch_loss, step, microbatch, one)
                self._compute.enter_backward(step, microbatch)
                passed.take(
                    whole.of(microbatch, one.rows.outputs),
                    values if microbatch == whole.bearer else nothing,
                    weight * whole.share(microbatch),
                )
            self._backward_pass(step, microbatch, passed, sums, completes=True)
            self._end_pass(step, sums)

    def _rows(self, batch_loss: BatchLoss, step: int, microbatch: int, batch: Any) -> _Made | None:
        """The forward pass of a microbatch, whose backward pass needs the others' first."""
        if batch is None:
            return None
        kept = copy.deepcopy(batch) if self._recomputes else None
        self._backward.begin(is_backward_late=True)
        rows = self._compute.rows(batch_loss, step, microbatch, batch)
        passed = self._backward.forwarded(None, (), [0.0] * self.num_scalars)
        if self._recomputes:
            return _Made(rows.without_graph(), None, kept)
        return _Made(rows, passed, None)

    def _passed_again(
        self, batch_loss: BatchLoss, step: int, microbatch: int, made: _Made
    ) -> Forwarded:
        """The forward pass of a microbatch once more, for its activations.

        Raises:
            TaskError: it gave other outputs.
        """
        self._inside.is_second = True
        try:
            self._backward.begin()
            rows = self._compute.rows(batch_loss, step, microbatch, made.batch)
        finally:
            self._inside.is_second = False
        for name, first, second in zip(batch_loss.names, made.rows.all, rows.all, strict=True):
            if not same_bits(first, second):
                raise TaskError(
                    f"Task.outputs: gave other {name} in the second forward pass of a microbatch "
                    "(batch_loss.recompute), though samples, random state, parameters and buffers "
                    "were the same; keep no state between batches, or set "
                    "batch_loss.recompute=false"
                )
        made.rows = rows
        return self._backward.forwarded(None, (), [0.0] * self.num_scalars)

    def fetched(self, step: int, microbatch: int, batches: Iterator[Any]) -> Any:
        """The next batch, which must be this one; None if there is nothing in it."""
        of_step, number, batch = next(batches)
        # The stream of a rank that has caught up by a copy of the state may be one step behind.
        if of_step != step or number != microbatch:
            raise RuntimeError(f"got the data of {[of_step, number]} for {[step, microbatch]}")
        return batch

    def restart(self) -> None:
        """Forget what a pass has left half done: gradients, buffers, and work of hooks."""
        self._backward.restart()
        if self._storage is not None:
            self._storage.restart()

    def _forward(self, step: int, microbatch: int, batch: Any) -> Forwarded | Leaf | None:
        """The forward pass of a microbatch, or all of it; None if there is nothing in it."""
        if batch is None:
            if self._storage is not None:
                self._storage.skip_forward()
            if self._carries is not None:
                self._carries.make(microbatch, self._carries.of(microbatch))
            return None
        if self._whole is not None:
            self._whole.is_eager = self.is_again
            return self._whole.leaf(step, microbatch, batch)
        self._backward.begin()
        try:
            fetched = self._tables.of(microbatch) if self._tables is not None else None
            loss = self._compute.forward(step, microbatch, batch, self._carries, fetched)
        except StageDone as done:
            return self._backward.forwarded(None, done.outputs, [0.0] * self.num_scalars)
        return self._backward.forwarded(loss, (), self._compute.scalars(step, loss))

    def _stand_by(self, kind: str, rounds: Rounds) -> None:
        """Do for other ranks what a pass without a microbatch has to."""
        if kind == "forward":
            if self._storage is not None:
                self._storage.skip_forward()
            return
        if self._storage is not None:
            self._storage.begin_backward(has_leaf=False)
            self._storage.end_backward()
        rounds.add(None, self._staged([0.0] * self.num_scalars))

    def _backward_pass(
        self,
        step: int,
        microbatch: int,
        passed: Forwarded | Leaf | None,
        sums: LeafSums,
        completes: bool,
    ) -> None:
        """The backward pass of a stage, and if it completes a leaf, that into the tree."""
        if isinstance(passed, Leaf):
            self._add(microbatch, passed, sums)
            return
        if passed is None:
            if not completes:
                return
            if self._storage is not None:
                self._storage.begin_backward()
                self._storage.end_backward()
            # A leaf of zeros, really added: 0.0 turns -0.0 into 0.0, and the bits must not depend
            # on whether a rank has other leaves to add it to.
            sums.add([None] * self._num_tensors, self._staged([0.0] * self.num_scalars))
            if self._tables is not None:
                self._tables.add(microbatch)
            return
        targets = self._compute.targets(step)
        early = sums if isinstance(sums, OverlappedSlices) else None
        try:
            with early.watching(self._flat.tensors) if early is not None else NOTHING:
                made = self._backward.leaf(microbatch, passed, self._loss_scale.value, targets)
            if made is None:
                return
            if self._tables is not None:
                self._tables.add(microbatch)
            self._add(microbatch, made, sums)
        except LateGradientError as late:
            raise late_gradient(self._flat.entries[late.index].name, bool(early)) from None

    def _add(self, microbatch: int, leaf: Leaf, sums: LeafSums) -> None:
        """Add a leaf to the sums."""
        tensors, numbers = leaf
        if isinstance(numbers, Tensor):
            sums.add(tensors, numbers[: self.num_scalars])
            self._there[microbatch] = numbers.clone()  # the next replay of a graph overwrites it
            return
        self._losses[microbatch] = numbers[0]
        sums.add(tensors, self._staged(numbers[: self.num_scalars]))
        # Every microbatch counts on from the same committed value, so the greatest is what one of
        # them has come to; a sum would depend on their number.
        self.counters = [*map(max, self.counters, numbers[self.num_scalars :])]

    def _end_pass(self, step: int, sums: LeafSums) -> None:
        self._watch.end_pass(waited_s(sums))
        self._runtime.heartbeat.beat()
        self._runtime.at("compute", step)

    def _staged(self, values: list[float]) -> Tensor:
        """A leaf's scalars as a tensor, whose memory the next leaf's take."""
        self._numbers[:] = values
        return self._scalars if self._is_on_host else moved(self._scalars, self._runtime.device)
