"""Optimizers that evaluate the loss again, at parameters that they try: L-BFGS, SAM.

Such an optimizer is given a closure. Each call of it is a pass over the step's whole batch, on all
ranks together, with the samples and the random state of the step's first pass. Its value and
gradient are the canonical sums. So a line search takes the same turns on every rank, and on any
number of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from lockstep.comm.transport import GroupBroken
from lockstep.engine.passes.passes import Passes, StepParts
from lockstep.engine.runtime import Raised
from lockstep.engine.step.sums import StepSums
from lockstep.engine.step.workspace import Workspace


class Reevaluation:
    """Passes over the batch of the present step, after the first one."""

    def __init__(self, parts: StepParts, passes: Passes, sums: StepSums) -> None:
        self._runtime, self._passes, self._sums = parts.runtime, passes, sums
        self._placement = parts.placement
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
        error: Raised | None = None
        self._passes.begin(step)
        workspace.reduction.restart()
        try:
            batches = iter(copy.deepcopy(self._batches))  # a loss may change its batch
            self._passes.run(step, workspace.passes, batches, workspace.leaves)
        except (Exception, SystemExit) as raised:
            if isinstance(raised, GroupBroken) and not self._placement.are_coupled:
                raise  # a rank was lost while outputs were gathered (`Task.batch_loss`)
            error = raised  # all ranks learn of it by the header
        headers = self._sums.reduce(step, workspace, error)
        loss, weight = workspace.reduction.total.scalars.tolist()[:2]
        self._sums.check(step, error, headers, [0.0, weight])
        for own in workspace.every_slice:
            own.gradient.mul_(1.0 / weight)
        return float(loss / weight)
