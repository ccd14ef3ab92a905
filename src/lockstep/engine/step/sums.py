"""Sums of a step over all ranks, headers, and errors that are the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.ahead import host_memory
from lockstep.engine.checkpoint.run_directory import DIRECTORY_LOST
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.passes.loss_checks import check_weight, non_finite_gradient, non_finite_loss
from lockstep.engine.passes.passes import Passes, StepParts
from lockstep.engine.runtime import Raised, shared_error
from lockstep.engine.step.workspace import Workspace
from lockstep.engine.task_config import LengthReads
from lockstep.engine.timing import Times
from lockstep.parallel.rounds import Rounds

OUT_OF_TIME = "a rank has used up its processor time (ulimit -t)"
"""The reason to end for it."""
STOP_REASONS = (
    "", "interrupted", "hung up", "terminated", "preempted", OUT_OF_TIME, DIRECTORY_LOST
)  # fmt: skip
"""Why a run may be asked to end, by rising urgency; empty if it is not asked to."""

_Table: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

_STORED, _CARRY_LENGTH, _NUM_APART = 0, 1, 2
"""Places in a `header` of what counts for each rank apart; the rest is of all, but for times."""
_FAILED, _STOP, _GROWS, _ASKED, _SUSPICIOUS, _SETTINGS, _ORDER, _LOSS, _NUM_FIXED = range(9)
"""Places in that rest, before the counters."""
_NUM_TIMES = len(Times._fields)
_COUNTERS = slice(_NUM_APART + _NUM_FIXED, -_NUM_TIMES)
_FEW = 16
"""Rows that Python looks through sooner than numpy."""


def header(
    has_failed: bool,
    stop_reason: str,
    grows: bool,
    times: Times,
    counters: Iterable[float],
    carry_length: int = 0,
    asked: int = 0,
    is_suspicious: bool = False,
    settings: int = 0,
    order: int = 0,
    loss: int = 0,
    stored: int = -1,
) -> list[float]:
    """One rank's header; it travels with the sums, so it costs no message of its own.

    Args:
        has_failed: whether the task's code raised an exception on this rank.
        stop_reason: reason for which this rank was asked to end, one of `STOP_REASONS`.
        grows: whether this rank knows of a new process that waits to join.
        times: seconds that this rank has spent so far, by kind of work.
        counters: integer buffers after this rank's microbatches; -inf where it computed none.
        carry_length: number of elements of what this rank's microbatches carry, packed.
        asked: what code has asked of the run's length on this rank (`LengthReads.bits`).
        is_suspicious: whether this rank wants the step to be done again, to compare.
        settings: digest of the learning rates of this step and of the optimizer's other settings.
        order: digest of the order of the epoch's samples, if the task gives it; 0 where it was not
            used.
        loss: digest of the loss over the whole batch, which each rank computes; 0 if it is no such
            one.
        stored: step up to whose events this rank has stored all, as rank 0 does
            (`Backlog.stored`).

    Returns:
        Values for float64, `num_values` of them. No object: it is made in every step.
    """
    stop = STOP_REASONS.index(stop_reason) if stop_reason else 0
    return [
        *(stored, carry_length),
        *(has_failed, stop, grows, asked, is_suspicious, settings, order, loss),
        *counters,
        *times,
    ]


class Headers:
    """The headers of all ranks, seen as a table: one by one, many would take milliseconds.

    Attributes:
        has_failed: whether the task's code raised an exception on some rank.
        stop_reason: the most urgent of all ranks.
        grows: whether any rank knows of a new process that waits to join.
        is_suspicious: whether some rank's passes have changed state.
        asked: what code has asked of the run's length on any rank.
        stored: step up to whose events rank 0 has stored all; -1 if that is not known.
        are_alike: whether `settings`, `order` and `loss` are the same on all ranks.
        times: what each rank has spent, [ranks, kinds of `Times`].
    """

    def __init__(self, values: list[list[float]] | _Table) -> None:
        """Read them.

        Args:
            values: the `header` of each rank, [ranks, num_values]; copied.
        """
        self._rows: list[list[float]] | _Table
        self.times: list[list[float]] | _Table
        if len(values) > _FEW:
            table = self._rows = np.array(values)
            shared, self.times = table[:, _NUM_APART:-_NUM_TIMES], table[:, -_NUM_TIMES:]
            most, least = shared.max(axis=0).tolist(), shared.min(axis=0).tolist()
        else:
            rows = self._rows = values if isinstance(values, list) else values.tolist()
            self.times = [row[-_NUM_TIMES:] for row in rows]
            each = [row[_NUM_APART:-_NUM_TIMES] for row in rows]
            most = least = each[0]
            if each.count(most) < len(each):
                most, least = [*map(max, *each)], [*map(min, *each)]
        self._most: list[float] = most
        self.has_failed, self.grows = most[_FAILED] > 0, most[_GROWS] > 0
        self.is_suspicious, self.stop_reason = most[_SUSPICIOUS] > 0, STOP_REASONS[int(most[_STOP])]
        self.asked, self.stored = int(most[_ASKED]), int(self._rows[0][_STORED])
        if most[_ASKED] != least[_ASKED]:
            self.asked = int(np.bitwise_or.reduce(self._column(_NUM_APART + _ASKED).astype(int)))
        # Nearly always they are, so one comparison tells.
        self.are_alike = most[_SETTINGS:_NUM_FIXED] == least[_SETTINGS:_NUM_FIXED]

    @property
    def counters(self) -> list[int]:
        """The greatest value of each integer buffer."""
        return [int(value) for value in self._most[_NUM_FIXED:]]

    @property
    def carry_lengths(self) -> list[int]:
        """`carry_length` of each rank."""
        return [int(value) for value in self._column(_CARRY_LENGTH).tolist()]

    @property
    def have_same_settings(self) -> bool:
        """Whether `settings` is the same on all ranks."""
        return len(np.unique(self._column(_NUM_APART + _SETTINGS))) == 1

    @property
    def have_same_order(self) -> bool:
        """Whether `order` is the same on all ranks that give it."""
        return self._is_same(_ORDER)

    @property
    def have_same_loss(self) -> bool:
        """Whether `loss` is the same on all ranks that give it."""
        return self._is_same(_LOSS)

    def _is_same(self, place: int) -> bool:
        return bool(np.count_nonzero(np.unique(self._column(_NUM_APART + place))) < 2)

    def _column(self, column: int) -> _Table:
        return np.asarray(self._rows)[:, column]


def num_values(num_counters: int) -> int:
    """The number of float64 values of a header.

    Args:
        num_counters: number of integer buffers that forward passes change.
    """
    return _NUM_APART + _NUM_FIXED + num_counters + _NUM_TIMES


class StepResult(NamedTuple):
    """The result of a step, alike on all ranks."""

    scalars: list[float]
    """Loss and metrics of the global batch: [sum, weight, sum, weight, …]."""
    lr: float
    grad_norm: float
    stop_reason: str
    """Why the run should end now, the same on all ranks; empty if it should not."""
    times: Sequence[Sequence[float]] | _Table
    """For each rank, where its time had gone when it sent its header: the fields of `Times`."""
    grows: bool
    """Whether a new process waits to join, the same on all ranks."""

    def means(self, names: Sequence[str]) -> dict[str, float]:
        """Loss and metrics, means over the global batch, by name.

        Args:
            names: of all that `scalars` holds; those of other phases are left out.
        """
        pairs = zip(names, self.scalars[::2], self.scalars[1::2], strict=True)
        return {name: total / weight for name, total, weight in pairs if weight}

    def rank_times(self) -> list[Times]:
        """What each rank has spent; not for every step, for ranks may be many."""
        return [Times(*times) for times in np.asarray(self.times).tolist()]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; `StepResult(**values)` is the inverse."""
        return self._asdict() | {"times": np.asarray(self.times).tolist()}


@dataclass
class Summed:
    """A step of a sharded optimizer whose gradient has been summed.

    Attributes:
        scalars: sums and weights of loss and metrics over the global batch.
        headers: header of each rank.
        result: result of the step, once this rank has applied it.
    """

    scalars: list[float]
    headers: Headers
    result: StepResult | None = None


class StepSums:
    """Sums a step's microbatches over all ranks, and makes sure that the step can be applied."""

    def __init__(self, parts: StepParts, passes: Passes, asked: LengthReads | None) -> None:
        """Bind them together.

        Args:
            parts: what the step works on.
            passes: passes of the microbatches that are summed.
            asked: what code asks of the run's length; None if that is not watched.
        """
        self._runtime, self._placement, self._watch = parts.runtime, parts.placement, parts.watch
        self._loss_scale, self._carries, self._tables = (
            parts.loss_scale, parts.carries, parts.tables,
        )  # fmt: skip
        self._is_remote = not parts.runtime.is_on_cpu
        self._outgoing: Tensor | None = None
        self._passes, self._asked = passes, asked

    def reduce(
        self,
        workspace: Workspace,
        error: Raised | None,
        is_reported: bool = False,
        is_suspicious: bool = False,
        settings: int = 0,
        order: int = 0,
    ) -> Headers:
        """The canonical sum over all ranks, and every rank's header.

        Args:
            workspace: has the sums of this rank's microbatches.
            error: what this rank's passes have raised, if anything.
            is_reported: whether the header has the norm of this rank's own gradient.
            is_suspicious: whether they have changed state (`header`).
            settings: digest of the optimizer's settings (`header`).
            order: digest of the order of samples (`header`).
        """
        runtime, loss = self._runtime, self._passes.loss_digest
        asked = self._asked.bits if self._asked is not None else 0
        times = self._watch.times(is_exact=is_reported)
        if is_reported and error is None and not self._placement.is_split:
            times = times._replace(grad_norm=workspace.own_norm() / self._loss_scale.value)
        own = header(
            has_failed=error is not None,
            stop_reason=runtime.stop_reason() or "",
            grows=runtime.transport.has_joiner,
            times=times,
            counters=self._passes.counters,
            carry_length=self._carries.copy_length if self._carries and not error else 0,
            asked=asked,
            is_suspicious=is_suspicious,
            settings=settings,
            order=order,
            loss=0 if isinstance(loss, Tensor) else loss,
            stored=runtime.backlog.stored,
        )
        if self._is_remote or self._passes.leaves_numbers:
            headers = self._fetched(own, workspace)
        else:
            headers = self._summed(own, workspace)
            # No rank sums then, or a column without a failed rank would, and the others not.
            if self._placement.are_coupled and headers.has_failed:
                return headers
            workspace.spread_scalars()
        # Also where a rank is lost afterwards. In most steps there is nothing to add.
        if headers.asked != asked and self._asked is not None:
            self._asked.add_bits(headers.asked)
        runtime.backlog.keep_from(headers.stored)
        self._watch.communication_s += self._watch.lap()
        return headers

    def _summed(self, own: list[float], workspace: Workspace) -> Headers:
        """Sum in host memory, unless a rank has failed for which others wait in a step."""
        reduction = workspace.reduction
        if isinstance(reduction, Rounds) or self._placement.are_coupled:
            headers = self._headers(own)
            if not headers.has_failed and not isinstance(reduction, Rounds):
                reduction.reduce()  # rounds have summed by now
            return headers
        if self._runtime.transport.size == 1:
            reduction.reduce()
            return Headers([own])
        _fill(reduction.header, own)
        reduction.reduce()
        return Headers(reduction.headers().numpy())

    def _fetched(self, own: list[float], workspace: Workspace) -> Headers:
        """Sum on a device; everything that this process needs of it comes by one message."""
        transport, reduction = self._runtime.transport, workspace.reduction
        counted, loss = self._passes.counted, self._passes.loss_digest
        if transport.size == 1:
            if not isinstance(reduction, Rounds):
                reduction.reduce()
            fetched = workspace.fetch(reduction.total.scalars[:0] if counted is None else counted)
            if counted is not None:
                own[_COUNTERS] = fetched.tolist()
            return Headers([own])
        if self._outgoing is None:
            self._outgoing = host_memory(len(own), self._runtime.device)
        _fill(self._outgoing, own)
        sent = self._outgoing.to(self._runtime.device, non_blocking=True)
        if counted is not None:
            sent[_COUNTERS] = counted
        if isinstance(loss, Tensor):
            sent[_NUM_APART + _LOSS] = loss
        computed = torch.Event(self._runtime.device)
        computed.record()
        with transport.in_stream():
            everyone = self._sum_with(sent, workspace)
            # The device goes on to the sums without this process, which only has to know for what
            # it waits: this rank's GPU, which may hang, or other ranks.
            computed.synchronize()
            self._watch.compute_s += self._watch.lap()
            transport.observer.wait()
            return Headers(workspace.fetch(everyone))

    def _sum_with(self, own: Tensor, workspace: Workspace) -> Tensor:
        """Sum on a device, sending this rank's header; all ranks', [ranks, num_values]."""
        reduction, world = workspace.reduction, self._placement.world
        if isinstance(reduction, Rounds) or self._placement.are_coupled:
            everyone = own.new_empty(world.size * len(own))
            world.all_gather(own, everyone, [len(own)] * world.size)
            if not isinstance(reduction, Rounds):
                reduction.reduce()
            workspace.spread_scalars()
            return everyone.view(world.size, -1)
        reduction.header.copy_(own)
        reduction.reduce()
        return reduction.headers()

    def _headers(self, own: list[float]) -> Headers:
        """The headers of all ranks, in a message of their own, which comes before the sums."""
        world = self._placement.world
        values = torch.empty(len(own), dtype=torch.float64)
        _fill(values, own)
        everyone = values.new_empty(world.size * len(values))
        world.all_gather(values, everyone, [len(values)] * world.size)
        return Headers(everyone.view(world.size, -1).numpy())

    def norm(self, step: int, weight: float, workspace: Workspace, flat: FlatTensors) -> float:
        """The norm of the mean gradient.

        Raises:
            NonFiniteError: it is NaN or infinite, and no loss scale is to blame.
        """
        # The norm is homogeneous, so the division need not be done on the gradient first.
        norm = workspace.norm()
        if self._tables is not None:
            norm = math.hypot(norm, self._tables.norm())
        norm *= 1.0 / (weight * self._loss_scale.value)
        if not math.isfinite(norm) and not self._loss_scale.enabled:
            rows = {} if self._tables is None else self._tables.summed()
            raise non_finite_gradient(self._runtime.transport, step, flat, workspace.stepped, rows)
        return norm

    def check(
        self, step: int, error: Raised | None, headers: Headers, scalars: list[float]
    ) -> None:
        """Turn what went wrong on any rank into the same error on all."""
        if headers.has_failed:
            # An interrupted backward pass has left partial gradients and half-finished hooks.
            self._passes.restart()
            failure = shared_error(self._runtime.transport, error)
            assert failure is not None
            raise failure
        # One check of the sum covers all microbatches: NaN and infinity do not cancel.
        if not math.isfinite(scalars[0]):
            passes, transport = self._passes, self._runtime.transport
            is_divided = self._placement.is_split or self._placement.in_slices
            raise non_finite_loss(transport, step, passes.losses, is_divided, passes.is_over_batch)
        check_weight(scalars[1], step)


def _fill(tensor: Tensor, values: list[float]) -> None:
    """Overwrite a tensor of host memory, several times faster than `torch.tensor` would."""
    tensor.numpy()[:] = values
