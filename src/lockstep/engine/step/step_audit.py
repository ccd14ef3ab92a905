"""Repeats steps whose passes may have read or changed state that they should not."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from lockstep.engine.audit.pass_state import PassState
from lockstep.engine.audit.repetition import Repetition, depends_on
from lockstep.engine.digests import checksum
from lockstep.engine.runtime import Runtime, everywhere
from lockstep.engine.step.sums import Header
from lockstep.engine.step.workspace import Workspace
from lockstep.errors import shared


class StepRepeated(Exception):
    """A step is to be done again, on all ranks; nothing of it was applied."""


class _Outcome(NamedTuple):
    """What a step's passes have come to: sums of losses and metrics, checksums of the gradient."""

    scalars: list[float]
    gradients: list[int]


class StepAudit:
    """Repeats a step and compares, if its passes have left suspicious state behind.

    Each rank looks at its own passes. All ranks learn from the headers that one of them has a
    suspicion, and all do the step again, this time without what earlier passes had left in
    attributes. A cache makes no difference then; state does. Some steps are done again in any case.
    """

    def __init__(self, runtime: Runtime, state: PassState) -> None:
        self._runtime = runtime
        self._state = state
        self._passes = Repetition(state)
        self._step = -1
        self._first: _Outcome | None = None
        self._suspects: list[str] = []
        self._is_given_up = self._is_sampled = False
        self._began = self._spent = 0.0

    def begin(self, step: int) -> None:
        """Before the passes of a step."""
        self._began = perf_counter()
        if step != self._step:
            if self._first is not None or self._is_given_up:
                self.forget()
            self._step = step
        is_due = not self._is_given_up and self._state.is_due(step)
        self._passes.begin(is_due, is_quick=(step + 1) & step != 0)

    def end(self) -> None:
        """After them."""
        self._passes.end()
        seconds = perf_counter() - self._began
        self._is_sampled = self._state.is_repeated(self._step, seconds, self._spent)

    def leave(self) -> None:
        """An exception has interrupted the passes."""
        self._passes.leave()

    def forget(self) -> None:
        """Have nothing to compare with: the step was given up, or ranks compute other parts."""
        self._passes.forget()
        self._step, self._first, self._suspects, self._is_given_up = -1, None, [], False

    @property
    def is_suspicious(self) -> bool:
        """Whether the step is to be done again."""
        is_first = not self._passes.is_second and not self._is_given_up
        return is_first and (self._is_sampled or self._passes.has_suspects)

    def check_failed(self, headers: Sequence[Header]) -> None:
        """See what it means that some rank's passes have failed the second time.

        An open file, say, cannot be had as it was before: what a dataset keeps is then taken for a
        cache.

        Raises:
            StepRepeated: the step has to be done once more, as it was the first time.
            TaskError: it needs what earlier passes had left.
        """
        if not self._passes.is_second or not any(header.has_failed for header in headers):
            return
        if not all(path.startswith("dataset(") for path in self._suspects):
            raise shared(depends_on(f"step {self._step}", self._suspects))
        self._passes.trust()
        self._first, self._is_given_up = None, True
        raise StepRepeated

    def check(self, headers: Sequence[Header], scalars: list[float], workspace: Workspace) -> None:
        """Have a suspicious step done again, and compare the second time with the first.

        Args:
            headers: of all ranks.
            scalars: sums of losses and metrics.
            workspace: has the sum of the gradients.

        Raises:
            StepRepeated: it is to be done again.
            TaskError: the second result is another one; on all ranks.
        """
        if self._passes.is_second:
            self._compare(_outcome(scalars, workspace))
        elif any(header.is_suspicious for header in headers):
            self._suspects = self._passes.suspects_of_all(self._runtime.transport)
            self._first = _outcome(scalars, workspace)
            self._passes.is_second = True
            raise StepRepeated

    def _compare(self, second: _Outcome) -> None:
        def check() -> None:
            if repr(second) != repr(self._first):
                suspects = self._suspects or self._state.caches.paths
                raise depends_on(f"step {self._step}", suspects)
            self._passes.check_unchanged()
            self._passes.trust()

        everywhere(self._runtime.transport, check)
        self._spent += perf_counter() - self._began
        self._first, self._is_given_up = None, True


def _outcome(scalars: list[float], workspace: Workspace) -> _Outcome:
    # Slices of this rank: of the others' it may have no sum.
    gradients = [checksum(own[0].gradient) for own in workspace.stepped if own]
    return _Outcome(list(scalars), gradients)
