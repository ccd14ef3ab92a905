"""What a step comes to on all ranks: sums, headers, and errors that are the same everywhere."""

from __future__ import annotations

import math

import torch

from lockstep.engine.carry.group import DealtCarries
from lockstep.engine.flat.flat_tensors import FlatTensors
from lockstep.engine.passes.non_finite import non_finite_gradient, non_finite_loss
from lockstep.engine.passes.passes import Passes, fill
from lockstep.engine.passes.precision import LossScale
from lockstep.engine.passes.returned import check_weight
from lockstep.engine.places import Places
from lockstep.engine.runtime import Raised, Runtime, shared_error
from lockstep.engine.step.header import Header
from lockstep.engine.step.workspace import Workspace
from lockstep.engine.tables.group import Tables
from lockstep.engine.task.asked import Asked
from lockstep.engine.timing import Stopwatch
from lockstep.parallel.rounds import Rounds


class StepSums:
    """Sums a step's microbatches over all ranks, and makes sure that the step can be applied."""

    def __init__(
        self,
        runtime: Runtime,
        places: Places,
        passes: Passes,
        loss_scale: LossScale,
        watch: Stopwatch,
        carries: DealtCarries | None,
        tables: Tables | None,
        log_every: int,
        asked: Asked | None,
    ) -> None:
        self._runtime = runtime
        self._places = places
        self._passes = passes
        self._loss_scale = loss_scale
        self._watch = watch
        self._carries = carries
        self._tables = tables
        self._log_every = log_every
        self._asked = asked

    def reduce(
        self,
        step: int,
        workspace: Workspace,
        error: Raised | None,
        is_suspicious: bool = False,
        settings: int = 0,
        order: int = 0,
    ) -> list[Header]:
        """The canonical sum over all ranks, and every rank's header.

        Args:
            step: number of the step.
            workspace: has the sums of this rank's microbatches.
            error: what this rank's passes have raised, if anything.
            is_suspicious: whether they have changed state (`Header.is_suspicious`).
            settings: digest of the optimizer's settings (`Header.settings`).
            order: digest of the order of samples (`Header.order`).
        """
        runtime = self._runtime
        own = Header(
            has_failed=error is not None,
            stop_reason=runtime.stop_reason() or "",
            grows=runtime.transport.has_newcomer,
            times=self._watch.times(is_exact=(step + 1) % self._log_every == 0),
            counters=tuple(self._passes.counters),
            carry_length=self._carries.copy_length if self._carries and not error else 0,
            asked=self._asked.bits if self._asked is not None else 0,
            is_suspicious=is_suspicious,
            settings=settings,
            order=order,
        )
        headers, reduction = [own], workspace.reduction
        travels = runtime.transport.size > 1
        if self._places.are_coupled:
            headers = self._headers(own)
            # Nobody sums: a column that has no failed rank would, and the others would not.
            if any(h.has_failed for h in headers):
                return headers
            travels = False
        if not isinstance(reduction, Rounds):  # these have summed by now
            if travels:
                fill(reduction.header, own.pack())
            reduction.reduce()
            if travels:
                # One `tolist` for all: on a GPU each item would be a message and a wait.
                headers = [Header.unpack(values) for values in reduction.headers().tolist()]
        self._note_asked(own, headers)
        workspace.spread_scalars()
        self._watch.communication_s += self._watch.lap()
        return headers

    def _note_asked(self, own: Header, headers: list[Header]) -> None:
        """Know what code has asked for on any rank, also if that rank is lost afterwards."""
        bits = 0
        for header in headers:
            bits |= header.asked
        # Most have nothing to add in most steps, however many ranks there are.
        if bits != own.asked and self._asked is not None:
            self._asked.add_bits(bits)

    def _headers(self, own: Header) -> list[Header]:
        """The headers of all ranks, in a message of their own, which comes before the sums."""
        world, packed = self._places.world, own.pack()
        values = torch.empty(len(packed), dtype=torch.float64, device=self._runtime.device)
        fill(values, packed)
        everyone = values.new_empty(world.size * len(values))
        world.all_gather(values, everyone, [len(values)] * world.size)
        return [Header.unpack(values) for values in everyone.view(world.size, -1).tolist()]

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
            transport = self._runtime.transport
            tables = self._tables.summed() if self._tables is not None else {}
            raise non_finite_gradient(transport, step, flat, workspace.stepped, tables)
        return norm

    def check(
        self, step: int, error: Raised | None, headers: list[Header], scalars: list[float]
    ) -> None:
        """Turn what went wrong on any rank into the same error on all."""
        if any(h.has_failed for h in headers):
            # A backward pass that was broken off has left gradients and hooks' work half done.
            self._passes.restart()
            failure = shared_error(self._runtime.transport, error)
            assert failure is not None
            raise failure
        # The sum tells of any microbatch: NaN and infinity do not cancel in it.
        if not math.isfinite(scalars[0]):
            is_divided = self._places.is_split or self._places.in_slices
            losses = self._passes.losses
            raise non_finite_loss(self._runtime.transport, step, losses, is_divided)
        check_weight(scalars[1], step)
