"""Applying a step: the sums of its microbatches become the committed state.

A rank has applied all of a step, or none: nothing communicates here, so no loss can interrupt it.
Only optimizers that evaluate the loss again do, at parameters that they try (L-BFGS, SAM); they
undo what they have begun. Each call of their closure is a pass over the whole batch of the step, on
all ranks together, with the samples and the random state of the first pass. Its value and gradient
are the canonical sums. So a line search takes the same turns on every rank, and on any number of
them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.comm.transport import GroupBroken
from lockstep.data.random import Stream, random_key
from lockstep.engine.optimizer.flat_optimizer import FlatOptimizer
from lockstep.engine.optimizer.learning_rates import LearningRates
from lockstep.engine.passes.passes import Passes, StepParts
from lockstep.engine.runtime import Raised, is_out_of_memory
from lockstep.engine.step.memory import held
from lockstep.engine.step.sums import Headers, StepResult, StepSums, Summed
from lockstep.engine.step.workspace import Workspace


class Apply:
    """Steps parameters, rows and buffers, and goes on from what microbatches carry.

    Attributes:
        summed: sums of the present step while all ranks can apply it but may not have; None before
            and after, and always where each rank has all state.
    """

    def __init__(
        self, parts: StepParts, flat_optimizer: FlatOptimizer, rates: LearningRates
    ) -> None:
        """Bind together what a step changes.

        Args:
            parts: what the step works on.
            flat_optimizer: optimizer of the flat parameters.
            rates: learning rates of each step, of the workers' optimizer too where there are some.
        """
        self._config, self._state, self._loss_scale = parts.config, parts.state, parts.loss_scale
        self._phases, self._local = parts.compute.phases, parts.compute.local
        self._carries, self._tables = parts.carries, parts.tables
        self._flat_optimizer, self._rates = flat_optimizer, rates
        self.summed: Summed | None = None

    @property
    def result(self) -> StepResult | None:
        """The result of the present step, if this rank has applied it; so all must."""
        return self.summed.result if self.summed else None

    def step(
        self,
        step: int,
        decays: int,
        summed: Summed,
        norm: float,
        workspace: Workspace,
        closure: Callable[[], float] | None = None,
    ) -> StepResult:
        """Clip, step the optimizer, advance buffers; no communication but that of a closure.

        Args:
            step: number of the step, from 0.
            decays: number of decays of the learning rate so far.
            summed: sums and headers of the step on all ranks.
            norm: norm of the mean gradient; not finite if fp16 skips the step.
            workspace: gradients and slices of this rank.
            closure: evaluates the batch again, for an optimizer that needs it. Should it raise an
                exception, nothing has changed.
        """
        weight = summed.scalars[1]
        self._settle(step, decays, norm)
        unit = self._unit(weight, norm)
        phase = self._phases.at(step).name
        # With fp16 an overflow skips the step and lowers the scale; every rank has the same norm.
        finite = math.isfinite(norm)
        self._loss_scale.update(finite)
        if finite:
            # One pass over memory, one rounding.
            for own in workspace.every_slice:
                own.gradient.mul_(unit)
            key = 0
            if self._flat_optimizer.may_draw:
                key = random_key(self._config.seed, Stream.OPTIMIZER, step)
            # Buffers advance by the step's first pass only, however often it is done again.
            buffers = [sums.clone() for sums in workspace.buffer_sums] if closure else []
            try:
                self._flat_optimizer.step(key, phase, closure, summed.scalars[0] / weight)
            except (MemoryError, RuntimeError) as error:
                self.explain(error, workspace)
                raise
            for sums, first in zip(workspace.buffer_sums, buffers, strict=False):
                sums.copy_(first)
            self._commit_buffers(weight, summed.headers, workspace)
        # Before the gather, which may leave arbitrary values here if it is interrupted.
        workspace.keep_aside()
        inner = self._local.optimizer.param_groups[0] if self._local else None
        self._rates.applied()
        lr = self._rates.of(inner or self._flat_optimizer.first_group(phase))
        # Set last: from here on this rank counts as one that has applied the step.
        summed.result = StepResult(
            summed.scalars,
            lr,
            norm,
            # All see the same headers, so all agree.
            summed.headers.stop_reason,
            summed.headers.times,
            summed.headers.grows,
        )
        return summed.result

    def follow(
        self, step: int, decays: int, lead: StepResult, workspace: Workspace, shares_state: bool
    ) -> None:
        """Apply an interrupted step that another rank has applied.

        Where each rank has all parameters and all state, these are copied later from that rank. But
        carries are on the ranks that have computed them, and rows of tables on their owners.

        Args:
            step: number of the step, from 0.
            decays: number of decays of the learning rate so far.
            lead: result of the step on the other rank.
            workspace: gradients and slices of this rank.
            shares_state: whether no rank alone has all parameters and all state.
        """
        if self.result is not None:
            return
        if not shares_state:
            self._settle(step, decays, lead.grad_norm)
        else:
            assert self.summed is not None, "a rank has applied a step before all could"
            self._rates.begin(step, decays)
            self.step(step, decays, self.summed, lead.grad_norm, workspace)

    def explain(self, error: Raised, workspace: Workspace) -> None:
        """Note in an error what holds memory, if that does not suffice."""
        if not is_out_of_memory(error):
            return
        parameters = [own.parameters for own in workspace.every_slice]
        kinds = {
            "parameters": parameters,
            "gradients and their sums": workspace.gradient_memory,
            "optimizer state": self._flat_optimizer.tensors,
        }
        vars(error)["__notes__"] = [held(parameters[0].device, kinds)]

    def _settle(self, step: int, decays: int, norm: float) -> None:
        """Commit the carries and rows of the step; no communication."""
        if self._carries is not None:
            self._carries.settle(norm)
        if self._tables is not None:
            assert self.summed is not None, "a rank has applied a step before all could"
            unit = self._unit(self.summed.scalars[1], norm)
            self._tables.settle(step, decays, norm, unit)

    def _unit(self, weight: float, norm: float) -> float:
        """The factor of summed gradients: mean, loss scale and clipping in one."""
        unit = 1.0 / (weight * self._loss_scale.value)
        # Workers clip their own gradients.
        clip_norm = self._config.clip_norm if self._config.local.steps == 1 else None
        if clip_norm is not None and norm > clip_norm:
            # 1e-6 as in torch.nn.utils.clip_grad_norm_.
            unit *= clip_norm / (norm + 1e-6)
        return unit

    def _commit_buffers(self, weight: float, headers: Headers, workspace: Workspace) -> None:
        flat = self._state.flat
        if not flat.tensors and not self._state.num_counters:
            return
        sums = [flat.view(workspace.buffer_sums, entry) for entry in flat.entries]
        self._state.commit(sums, weight, headers.counters)


class Reevaluation:
    """Passes over the batch of the present step, after the first one."""

    def __init__(self, parts: StepParts, passes: Passes, sums: StepSums) -> None:
        self._runtime, self._passes, self._sums = parts.runtime, passes, sums
        self._placement, self._guard = parts.placement, parts.compute.guard
        self._batches: list[list[Any]] = []

    def keep(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; copies of those that are taken are kept for `run`."""
        self._batches = []

        def each() -> Iterator[Any]:
            for step, microbatch, batch in batches:
                self._batches.append([step, microbatch, copy.deepcopy(batch)])
                yield [step, microbatch, batch]

        return each()

    def run(self, step: int, workspace: Workspace) -> float:
        """Compute the step's microbatches with the present parameters; a collective.

        The mean gradient is in the memory that the workspace has for the sums.

        Returns:
            The mean loss; it may be NaN or infinite, which a line search may step back from.

        Raises:
            TaskFailure: the task's code raised an exception on some rank; on all ranks.
            GroupBroken: a rank was lost.
        """
        self._runtime.at("search", step)
        self._passes.begin(step)
        workspace.reduction.restart()
        with self._placement.in_stream():
            error = self._compute(step, workspace)
        headers = self._sums.reduce(workspace, error)
        loss, weight = workspace.scalars()[:2]
        self._sums.check(step, error, headers, [0.0, weight])
        for own in workspace.every_slice:
            own.gradient.mul_(1.0 / weight)
        return float(loss / weight)

    def _compute(self, step: int, workspace: Workspace) -> Raised | None:
        """Compute this rank's microbatches; returns what was raised."""
        try:
            batches = iter(copy.deepcopy(self._batches))  # a loss may change its batch
            self._passes.run(step, workspace.passes, batches, workspace.leaves)
        except GroupBroken:
            raise  # a rank was lost while outputs were gathered (`Task.batch_loss`)
        except (Exception, SystemExit) as error:
            # No rank waits for this one in a pass: each has whole parameters (`is_elementwise`).
            return error  # all ranks learn of it by the header
        finally:
            self._guard.leave()  # what is set from here on is set between steps
        return None
