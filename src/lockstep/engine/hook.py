"""Hooks, which users write to do something beside training, and the run as hooks see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from lockstep.config import TrainConfig
from lockstep.config.parsing import shown
from lockstep.engine.task import Task
from lockstep.engine.task_config import TOTAL_STEPS, length_reads
from lockstep.errors import TaskError

MAY_CHANGE = ("after_step", "after_evaluation")
"""Methods of a hook that may change the model, if that is declared, and end the run."""


class Run:
    """A run as hooks see it.

    Attributes:
        task: the task.
        config: the config of the run.
        model: the model, in training mode.
        optimizer: the optimizer; over flat tensors if it is element-wise. Of several, one that has
            the parameter groups of all, and them in `by_name`.
        run_dir: the run directory.
        step: number of optimizer steps that have been done, 1 after the first.
        epoch: the epoch, from 0, of the newest step.
        is_epoch_end: whether the newest step was the last one of its epoch.
        phase: name of the phase that the newest step belonged to; empty for a task without phases.
        train: loss and metrics of the newest step, means over the global batch, by name.
        weights: the weights of these means.
        evaluated: metrics of the newest evaluation of each split, by "split/name".
        lr: learning rate of the first parameter group in the newest step; of several optimizers,
            that of the first one, or of the one whose phase it was.
        grad_norm: norm of the mean gradient of the newest step, before clipping.
    """

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        run_dir: Path,
        total_steps: int,
    ) -> None:
        self.task = task
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.run_dir = run_dir
        self._total_steps = total_steps
        self.step = 0
        self.epoch = 0
        self.is_epoch_end = False
        self.phase = ""
        self.train: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.evaluated: dict[str, float] = {}
        self.lr = 0.0
        self.grad_norm = 0.0
        self._caller: Hook | None = None
        self._moment = ""
        self._stop_reason = ""

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run; a run whose code reads it cannot be made longer."""
        reads = length_reads(self.config)
        if reads is not None and not (self._caller is not None and self._caller.first_only):
            reads.add([TOTAL_STEPS])
        return self._total_steps

    def stop(self, reason: str) -> None:
        """End the run after this step: it is then complete, with this reason.

        Raises:
            TaskError: called elsewhere than in `after_step` and `after_evaluation`; or the hook
                runs on the first rank only, so the others would not know.
        """
        if self._moment not in MAY_CHANGE:
            raise TaskError(
                f"{type(self._caller).__name__}.{self._moment}: cannot end the run; call run.stop "
                f"in {' or '.join(MAY_CHANGE)}"
            )
        if self._caller is not None and self._caller.first_only:
            raise TaskError(
                f"{type(self._caller).__name__}: has first_only = True, so it cannot end the run; "
                "let it run on every rank"
            )
        self._stop_reason = self._stop_reason or reason

    def called_by(self, hook: Hook, moment: str) -> None:
        """Note which method of which hook is called; the engine calls this."""
        self._caller, self._moment = hook, moment

    def taken_stop_reason(self) -> str:
        """Why a hook ends the run, once; empty if none does. The engine calls this."""
        reason, self._stop_reason = self._stop_reason, ""
        return reason


class Hook:
    """Something to do beside training; subclass it and return it by `Task.hooks`.

    Methods that are not overridden cost nothing. By default a hook runs on every rank alike, with
    the same random state, and must do the same on each: it must not look at ranks, time or files.
    What it keeps between steps is saved in checkpoints by `state_dict`. With `first_only` it runs
    on rank 0 alone, may print, write and send, and keeps nothing. Should rank 0 die, it runs on its
    successor, which may see the newest moment once more or not at all. An exception in a hook ends
    the run. Where the model is on several ranks (`mesh.tp`), it can be called in `after_evaluation`
    and `on_end` of a hook that runs on every rank, and nowhere else. A model in stages (`mesh.pp`)
    cannot be called by hooks.

    Attributes:
        first_only: whether the hook runs on rank 0 alone.
        changes_model: whether the hook changes parameters or buffers of the model, in place; in
            `after_step` and `after_evaluation` only, and never with `first_only`.
    """

    first_only: ClassVar[bool] = False
    changes_model: ClassVar[bool] = False

    def on_start(self, run: Run) -> None:
        """Called when a process begins to train: at a start, after a resume, as a joining rank.

        The state of the hook and of the model is there by then.
        """

    def after_step(self, run: Run) -> None:
        """Called once for each step, after `Task.after_step`."""

    def after_evaluation(self, run: Run, split: str, metrics: dict[str, float]) -> None:
        """Called after an evaluation.

        Args:
            run: the run.
            split: name of the split.
            metrics: the split's loss and metrics, by name.
        """

    def after_checkpoint(self, run: Run, folder: Path) -> None:
        """Called on rank 0 when a checkpoint is complete on disk, whether `first_only` or not.

        It must change nothing that other ranks have, since they do not call it. A checkpoint is
        written in the background: by then the run may be some steps further.
        """

    def on_end(self, run: Run, status: str, reason: str) -> None:
        """Called when a session of the run ends in order, after the last checkpoint.

        Args:
            run: the run.
            status: `completed`, or `stopped` where the run can be resumed.
            reason: why it ends.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the hook keeps between steps, by name: tensors, and values that JSON can hold."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, before training goes on.

        Raises:
            TaskError: there is state, and the hook does not say how to load it.
        """
        if state:
            raise TaskError(
                f"{type(self).__name__}.load_state_dict: is missing; there is state to load: "
                f"{', '.join(sorted(state))}"
            )


def checked_hooks(task: Task) -> tuple[Hook, ...]:
    """The task's hooks.

    Raises:
        TaskError: one of them is not a hook, or has settings that exclude each other.
    """
    hooks: object = task.hooks()
    where = f"{type(task).__name__}.hooks"
    if not isinstance(hooks, (list, tuple)):
        raise TaskError(f"{where}: must return a list of hooks, returned {shown(hooks)}")
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise TaskError(f"{where}: {shown(hook)} is no lockstep.Hook")
        if hook.first_only and hook.changes_model:
            raise TaskError(
                f"{where}: {type(hook).__name__} has first_only = True and changes_model = True; "
                "what changes the model must run on every rank"
            )
    return tuple(hooks)
