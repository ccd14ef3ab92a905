"""What a task does after each optimizer step, alike on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from torch import nn, optim

from lockstep.comm.transport import Transport
from lockstep.data.batch_source import BatchSource
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.engine.audit.held_state import held_state
from lockstep.engine.audit.reachable import optimizers_in
from lockstep.engine.checkpoint.task_state import capture_task, restore_task
from lockstep.engine.runtime import Raised, everywhere
from lockstep.engine.step.buffers import ForwardState
from lockstep.engine.step.flat import FlatTensors
from lockstep.engine.task import Task, is_scratch, made_anew
from lockstep.errors import LockstepError, TaskError


class AfterStep:
    """Calls `Task.after_step`, if the task has one; costs nothing if not.

    It runs when a step is committed, before anyone is told. So an exception is kept until all ranks
    can hear of it. The step is not done again then, since what was half done cannot be undone.

    In steps whose number is a power of two, what it changes is compared with what a checkpoint
    would bring back.

    Attributes:
        has_failed: whether the task has raised an exception on some rank; the same on all.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: optim.Optimizer,
        flat: FlatTensors,
        loader: BatchSource,
        seed: int,
    ) -> None:
        self._task = task
        self._model = model
        self._optimizers = list(optimizers_in(optimizer).values())
        self._flat = flat
        self._loader = loader
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
        is_checked = step & (step - 1) == 0
        before = self._held() if is_checked else {}
        seed_all(random_key(self._seed, Stream.AFTER_STEP, step))
        try:
            self._task.after_step(self._model, step)
            self._flat.take_back()
            if is_checked:
                self._check_saved(before)
        except (Exception, SystemExit) as error:
            self._error = error
        state.mark()
        self._loader.watched.mark()

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

    def _held(self) -> dict[str, str]:
        # Apart, since a dataset may be reached from the task too.
        inside = held_state({"dataset('train')": self._loader.dataset})
        modes = {f"model.{n}.training": str(m.training) for n, m in self._model.named_modules()}
        # What an optimizer keeps here is saved, also where the task holds the optimizer.
        saved = [v for o in self._optimizers for v in (o.state, o.param_groups, *o.param_groups)]
        return held_state({"task": self._task, "model": self._model}, saved) | inside | modes

    def _check_saved(self, before: Mapping[str, str]) -> None:
        """Refuse changes that a resumed run, or a process that fetches data, would not see.

        Raises:
            TaskError: naming the first.
        """
        now = self._held()
        changed = [
            path
            for path in dict.fromkeys((*before, *now))
            if before.get(path) != now.get(path) and not is_scratch(self._task, path)
        ]
        own = [path for path in changed if path.startswith("task")]
        back = self._brought_back() if own else {}
        for path in changed:
            name = path.rstrip("!")
            if path.startswith("dataset"):
                if self._loader.num_workers:
                    raise TaskError(
                        f"{name}: is changed by after_step, and the processes that fetch data have "
                        "copies of it; set data.num_workers=0, or use it in Task.loss"
                    )
                if not own:
                    raise TaskError(
                        f"{name}: is changed by after_step, and no checkpoint holds it; keep it in "
                        "the task, and save it by Task.state_dict"
                    )
            elif path.startswith("model"):
                raise TaskError(
                    f"{name}: is changed by after_step, and no checkpoint holds it; make it a "
                    "buffer of the model, or keep it in the task, save it by Task.state_dict, and "
                    "set it in each Task.loss"
                )
            elif back is not None and back.get(path) != now.get(path):
                raise TaskError(
                    f"{name}: is changed by after_step, and does not come back by "
                    f"{type(self._task).__name__}.state_dict and load_state_dict; a resumed run "
                    "would go on without it"
                )

    def _brought_back(self) -> dict[str, str] | None:
        """What a task that is made anew holds after loading this one's state; None if unknown."""
        tensors, values = capture_task(self._task)
        fresh = None
        with contextlib.suppress(Exception):  # its `__init__` may need more than a config
            fresh = made_anew(self._task, self._task.config)
        if fresh is None:
            return None if tensors or values else {}
        restore_task(fresh, tensors, values)
        return held_state({"task": fresh})
