"""What a task does after each optimizer step, alike on every rank."""

from __future__ import annotations

from torch import nn

from lockstep.comm.transport import Transport
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.errors import LockstepError
from lockstep.train.buffers import ForwardState
from lockstep.train.runtime import Raised, everywhere
from lockstep.train.task import Task


class AfterStep:
    """Calls `Task.after_step`, if the task has one; costs nothing if not.

    It runs when a step is committed, before anyone is told. So an exception is kept until all ranks
    can hear of it. The step is not done again then, since what was half done cannot be undone.

    Attributes:
        has_failed: whether the task has raised an exception on some rank; the same on all.
    """

    def __init__(self, task: Task, model: nn.Module, seed: int) -> None:
        self._task = task
        self._model = model
        self._seed = seed
        self._is_there = type(task).after_step is not Task.after_step
        self._error: Raised | None = None
        self.has_failed = False

    def run(self, step: int, state: ForwardState) -> None:
        """Let the task do what it does after a step; what it raises is for `check`.

        Args:
            step: how many optimizer steps have been done.
            state: the buffers that forward passes change; the task may change them here too.
        """
        if not self._is_there:
            return
        seed_all(random_key(self._seed, Stream.AFTER_STEP, step))
        try:
            self._task.after_step(self._model, step)
        except (Exception, SystemExit) as error:
            self._error = error
        state.mark()

    def check(self, transport: Transport) -> None:
        """Make sure that it went well; a collective.

        Raises:
            LockstepError: it did not on some rank; on all ranks.
        """
        if not self._is_there:
            return
        try:
            everywhere(transport, self._raise)
        except LockstepError:
            self.has_failed = True
            raise

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
