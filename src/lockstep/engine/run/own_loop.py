"""A loop of the user's own over a run's steps: what its body gets, and how it ends the run."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping

from torch import nn

from lockstep.engine.assembly import Parts
from lockstep.engine.evaluation.batches import is_validation
from lockstep.engine.hook_calls import Hooks
from lockstep.engine.run.progress import ALL_STEPS
from lockstep.engine.run.run_state import RunState
from lockstep.engine.runtime import Runtime
from lockstep.engine.step.sums import StepResult
from lockstep.errors import TaskError, shared

LEFT = "the loop was left"
"""Why a session stops whose loop was left on every rank."""


class Step:
    """A step that is done, as the body of a loop over `lockstep.steps` sees it.

    All values but `is_first` are the same on every rank.

    Attributes:
        number: number of optimizer steps that have been done, 1 after the first.
        epoch: the epoch, from 0, of this step.
        metrics: loss and metrics of this step, means over the global batch, by name.
        evaluated: metrics of the evaluation after this step, by "split/name"; empty where there
            was none.
        lr: learning rate of the first parameter group in this step.
        model: the model, in training mode, with the parameters after this step. It may be read and
            called, but not changed; a model over several ranks may not be called either.
        is_first: whether this is rank 0, which prints and writes.
    """

    def __init__(
        self,
        number: int,
        epoch: int,
        metrics: dict[str, float],
        evaluated: dict[str, float],
        lr: float,
        model: nn.Module,
        is_first: bool,
    ) -> None:
        self.number = number
        self.epoch = epoch
        self.metrics = metrics
        self.evaluated = evaluated
        self.lr = lr
        self.model = model
        self.is_first = is_first
        self._is_over = False
        self._reason = ""

    def __repr__(self) -> str:
        return f"Step(number={self.number}, metrics={self.metrics})"

    def stop(self, reason: str = "stopped by the loop") -> None:
        """End the run after this step: it is then complete, with this reason.

        Every rank must do the same. To stop a run that is to go on later, leave the loop.

        Raises:
            TaskError: the next step is done already, or the reason is empty.
        """
        if self._is_over:
            raise TaskError(f"step.stop: step {self.number} is over; call it on the newest step")
        if not reason:
            raise TaskError("step.stop: reason='': must say why the run is complete")
        self._reason = self._reason or reason

    def end(self) -> str:
        """Take no more calls of `stop`; why the run ends, or empty. The engine calls this."""
        self._is_over = True
        return self._reason


class OwnLoop:
    """Hands out each step once, and makes all ranks go on, stop or end alike after it.

    A loss may interrupt any of its collectives when some ranks know their result and others do not.
    So what is said stays, and is said again. A rank that joins gets no step that others have had
    before it came.
    """

    def __init__(self, runtime: Runtime, parts: Parts, hooks: Hooks, state: RunState) -> None:
        self._runtime, self._parts, self._hooks, self._state = runtime, parts, hooks, state
        self._newest = 0
        self._is_left = False
        self._reason = ""

    def settle(self) -> None:
        """Let all ranks know how the run ends, if some know it before a loss; a collective."""
        state, progress = self._state, self._state.progress
        own = [progress.finished, progress.ended_by_loop, state.stop_reason]
        known = [json.loads(text) for text in self._hooks.agree(json.dumps(own))]
        over = max(known, key=lambda said: bool(said[0]))
        progress.finished, progress.ended_by_loop = over[:2]
        state.stop_reason = next(filter(None, (stop for *_, stop in known)), "")

    def hand_out(self) -> Generator[Step, bool | None, bool]:
        """Hand out the newest step, unless it was, and agree on what follows; a collective.

        The generator is sent whether the loop is left.

        Returns:
            Whether the body has made the run complete, which no checkpoint says yet.

        Raises:
            LockstepError: the body has changed what it must not, or ends the run on some ranks
                only; on all ranks.
        """
        state = self._state
        number = state.progress.step
        if state.result is not None and number > self._newest and not self._is_left:
            self._newest, step = number, self._step(state.result)
            with self._hooks.around_body(number):
                self._is_left = bool((yield step))
            self._reason = step.end()
        has_had = self._newest == number
        own = [has_had, has_had and self._reason, self._is_left]
        answers = [json.loads(text) for text in self._hooks.agree(json.dumps(own))]
        reasons = {rank: reason for rank, (has_had, reason, _) in enumerate(answers) if has_had}
        if len({*reasons.values()}) > 1:
            raise shared(_ended_by_some(reasons))
        left = [rank for rank, (_, _, is_left) in enumerate(answers) if is_left]
        reason = next(iter(reasons.values()), "")
        # It would have ended a longer run too, unlike `ALL_STEPS`, so it is the reason to keep.
        if reason and state.progress.finished in ("", ALL_STEPS):
            state.progress.finished, state.progress.ended_by_loop = reason, True
            return True
        if left and not state.stop_reason:
            everyone = len(left) == len(answers)
            state.stop_reason = LEFT if everyone else f"{LEFT} on rank {left[0]}"
        return False

    def _step(self, result: StepResult) -> Step:
        parts, progress = self._parts, self._state.progress
        evaluated = {}
        if progress.evaluated == progress.step:
            splits = [name for name in parts.evaluations if is_validation(name)]
            starts = tuple(f"{name}/" for name in splits)
            evaluated = {k: v for k, v in progress.metrics.items() if k.startswith(starts)}
        return Step(
            progress.step,
            parts.sampler.epoch(progress.step - 1),
            result.means(("loss", *parts.compute.metrics)),
            evaluated,
            result.lr,
            parts.model,
            self._runtime.is_first,
        )


def _ended_by_some(reasons: Mapping[int, str]) -> TaskError:
    one = next(rank for rank, reason in reasons.items() if reason)
    other = next(rank for rank, reason in reasons.items() if reason != reasons[one])
    pair = [repr(reasons[rank]) if reasons[rank] else "nothing" for rank in (one, other)]
    return TaskError(
        f"step.stop: the loop's body ends the run on rank {one} for {pair[0]} and on rank {other} "
        f"for {pair[1]}: it must do the same on each rank, so let it depend on the step and its "
        "metrics; to stop on some rank's account, such as the time, leave the loop (break)"
    )
