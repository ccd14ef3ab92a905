"""Calls what a task and its hooks do beside training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import Tensor, nn, optim

from lockstep.config import TrainConfig
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.engine.assembly import Parts
from lockstep.engine.audit.constants import Constants
from lockstep.engine.audit.pass_state import is_looked_at
from lockstep.engine.audit.reachable import optimizers_in
from lockstep.engine.audit.saved_state import SavedState
from lockstep.engine.hook import MAY_CHANGE, Hook, Run
from lockstep.engine.log import Logbook
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Raised, Runtime, everywhere, shared_words
from lockstep.engine.step.sums import StepResult
from lockstep.engine.task import Task
from lockstep.engine.task.rebuilt import asked_of, watched
from lockstep.errors import TaskError, shared
from lockstep.nn.cutting import region_of

MAY_LOG = ("on_start", "after_step", "after_evaluation", "on_end")
"""Methods of a hook that may call `lockstep.log`: all ranks have the same state."""
_CALLED_BY_SOME = ("on_start", "after_checkpoint")
"""Methods that not all ranks call at once: joining ranks begin later, rank 0 writes checkpoints."""


class Hooks:
    """Calls `Task.after_step` and the hooks, each as soon as its moment is committed.

    Nobody is told at such a moment. So an exception is kept until all ranks can hear of it. What
    the hook has half done cannot be undone: the step is not done again then.

    In the steps that `is_looked_at` names, and at the ends of such epochs, what is changed is
    compared with what a checkpoint would bring back.

    Attributes:
        has_failed: whether a hook has raised an exception on some rank; the same on all.
    """

    def __init__(self, config: TrainConfig, runtime: Runtime, parts: Parts, run_dir: Path) -> None:
        self._seed = config.seed
        self._runtime = runtime
        self._parts = parts
        task, optimizer = parts.task_state.task, parts.train_step.flat_optimizer.optimizer
        self._task = task
        self._hooks = parts.task_state.hooks
        asked = asked_of(task.config)
        seen = config if asked is None else watched(config, asked)
        self._run = Run(task, seen, parts.model, optimizer, run_dir, parts.total_steps)
        self._optimizers = list(optimizers_in(optimizer).values())
        self._saved = SavedState(parts.task_state, parts.model, self._optimizers, parts.loader)
        self._constants = Constants(parts.model, ())
        self._logbook = Logbook(runtime.emit)
        self._has_after_step = type(task).after_step is not Task.after_step
        # Alike on all ranks, also for hooks that only the first one runs.
        self._look_at_steps = any(type(h).after_step is not Hook.after_step for h in self._hooks)
        self._num_evaluations = 0
        self._started: set[int] = set()
        self._error: Raised | None = None
        self._ended = ""
        self.has_failed = False

    def start(self, progress: Progress) -> None:
        """Call `on_start` of the hooks that run in this process and have not begun."""
        self._look_at(progress)
        waiting = [i for i in self._running("on_start") if i not in self._started]
        self._started |= {*waiting}
        self._guarded(lambda: self._each("on_start", waiting))

    def after_step(self, progress: Progress, result: StepResult) -> str:
        """Call `after_step` of the task and of its hooks.

        Returns:
            Why a hook ends the run; empty if none does.
        """
        hooks = self._running("after_step")
        if not hooks and not self._has_after_step:
            return ""
        step = progress.step
        self._look_at(progress, result)

        def call() -> None:
            if self._has_after_step:
                seed_all(random_key(self._seed, Stream.AFTER_STEP, step))
                with modes_kept(self._parts.model, "after_step"), self._logbook.opened(step):
                    self._task.after_step(self._parts.model, step)
            self._each("after_step", hooks)

        run = self._run
        is_checked = is_looked_at(step) or (run.is_epoch_end and is_looked_at(run.epoch + 1))
        self._guarded(call, "after_step" if is_checked else "")
        return self._taken_stop_reason()

    def after_evaluation(self, progress: Progress, split: str, metrics: dict[str, float]) -> str:
        """Call `after_evaluation`; returns why a hook ends the run, as `after_step`."""
        hooks = self._running("after_evaluation")
        if not hooks:
            return ""
        self._look_at(progress)
        self._num_evaluations += 1
        is_checked = is_looked_at(self._num_evaluations)
        self._guarded(
            lambda: self._each("after_evaluation", hooks, split, dict(metrics)),
            "after_evaluation" if is_checked else "",
        )
        return self._taken_stop_reason()

    def after_checkpoint(self, progress: Progress, folder: Path) -> None:
        """Call `after_checkpoint`; on rank 0 only."""
        self._look_at(progress)
        self._guarded(
            lambda: self._each("after_checkpoint", self._running("after_checkpoint"), folder)
        )

    def end(self, progress: Progress, status: str, reason: str) -> None:
        """Call `on_end`; a collective.

        Raises:
            LockstepError: a hook has raised an exception on some rank; on all ranks.
        """
        self._look_at(progress)
        hooks = self._running("on_end")
        self._guarded(lambda: self._each("on_end", hooks, status, reason))
        self.check()

    def check_step(self) -> None:
        """As `check`, after each step: costs nothing where no hook looks at steps."""
        if self._has_after_step or self._look_at_steps:
            self.check()

    def check(self) -> None:
        """Make sure that all went well; a collective.

        Raises:
            LockstepError: it did not on some rank; on all ranks.
        """
        if not self._hooks and not self._has_after_step:
            return
        error, reasons = shared_words(self._runtime.transport, self._error, self._ended)
        if error is None and len({*reasons}) > 1:
            error = shared(_ended_by_some(reasons))
        if error is not None:
            self.has_failed = True
            raise error

    def check_saved(self) -> None:
        """Make sure that what the task and its hooks have changed can be saved; a collective.

        Raises:
            TaskError: something can't; on all ranks.
        """
        if self._hooks or self._has_after_step:
            everywhere(self._runtime.transport, self._saved.check_again)

    def _taken_stop_reason(self) -> str:
        reason = self._run.taken_stop_reason()
        self._ended = self._ended or reason
        return reason

    def _running(self, name: str) -> list[int]:
        """Indices of the hooks that have a method of this name and run in this process."""
        return [
            i
            for i, hook in enumerate(self._hooks)
            if getattr(type(hook), name) is not getattr(Hook, name)
            and (self._runtime.is_first or not hook.first_only)
        ]

    def _guarded(self, call: Callable[[], None], checked: str = "") -> None:
        """Run user code; keep its exception, and leave the engine's own state as it must be.

        Args:
            call: the code.
            checked: what it is called where its changes are to be checked, else empty.
        """
        before = self._saved.held() if checked else {}
        try:
            call()
            self._parts.train_step.flat.take_back()
            if checked:
                self._saved.check(before, checked)
        except (Exception, SystemExit) as error:
            self._error = self._error or error
        self._parts.train_step.state.mark()
        self._parts.loader.watched.mark()

    def _each(self, name: str, hooks: list[int], *arguments: object) -> None:
        step = self._run.step
        for index in hooks:
            hook = self._hooks[index]
            self._run.called_by(hook, name)
            # Each for itself: rank 0 may run hooks that others do not.
            seed_all(random_key(self._seed, Stream.HOOK, step, index))
            may_change = hook.changes_model and name in MAY_CHANGE
            if not may_change:
                self._constants.mark(step)
            marks = optimizer_marks(self._optimizers) if hook.first_only else []
            where = f"{type(hook).__name__}.{name}"
            # What is set at the start is set in each process, unless on the first rank alone.
            is_everywhere = name == "on_start" and not hook.first_only
            modes = nullcontext() if is_everywhere else modes_kept(self._parts.model, where)
            logs = self._logbook.opened(step) if name in MAY_LOG else nullcontext()
            with modes, logs, self._not_computed(hook, name):
                getattr(hook, name)(self._run, *arguments)
            if not may_change:
                self._constants.check(where, changed_by_hook)
            if hook.first_only and optimizer_marks(self._optimizers) != marks:
                raise TaskError(
                    f"{where}: the optimizer was changed, on the first rank only; let the hook run "
                    "on every rank"
                )

    @contextmanager
    def _not_computed(self, hook: Hook, name: str) -> Iterator[None]:
        """Refuse calls of a model whose shards are on several ranks that do not all call it.

        Without it this rank would wait for the shards of others, and they for its next message.
        """
        placement, region = self._parts.placement, region_of(self._parts.model)
        is_alone = hook.first_only or name in _CALLED_BY_SOME
        is_spare = placement.replica_number == len(placement.mesh.replicas)
        if region is None or placement.mesh.tp == 1 or not (is_alone or is_spare):
            yield
            return
        who = "runs on some ranks only" if is_alone else "runs on a spare rank too, with no replica"
        region.axis.closed = (
            f"{type(hook).__name__}.{name}: calls the model, whose shards are on several ranks "
            f"(mesh.tp), but {who}; compute it in Task.evaluate, or in after_evaluation of a hook "
            "that runs on every rank (with a number of ranks that mesh.pp x mesh.tp divides), or "
            "set mesh.tp=1"
        )
        try:
            yield
        finally:
            region.axis.closed = ""

    def _look_at(self, progress: Progress, result: StepResult | None = None) -> None:
        """Show hooks what the run has come to."""
        run, sampler = self._run, self._parts.sampler
        run.step, run.evaluated = progress.step, dict(progress.metrics)
        run.epoch = sampler.epoch(max(0, progress.step - 1))
        run.is_epoch_end = progress.step > 0 and sampler.is_epoch_end(progress.step)
        if result is not None:
            names = ("loss", *self._parts.compute.metrics)
            pairs = zip(names, result.scalars[::2], result.scalars[1::2], strict=True)
            run.train = {name: total / weight for name, total, weight in pairs if weight}
            run.lr, run.grad_norm = result.lr, result.grad_norm
            run.phase = self._parts.compute.phases.at(progress.step - 1).name


@contextmanager
def modes_kept(model: nn.Module, where: str) -> Iterator[None]:
    """Refuse user code that leaves the model in evaluation mode, say, after looking at it.

    Raises:
        TaskError: a module is in another mode than before; naming it.
    """
    before = [module.training for module in model.modules()]
    yield
    for (name, module), was in zip(model.named_modules(), before, strict=False):
        if module.training != was:
            path = f"model.{name}" if name else "model"
            raise TaskError(
                f"{path}.training: is changed by {where}, and no checkpoint holds it; call "
                f"{'train' if was else 'eval'}() before it returns, or set it in each Task.loss"
            )


def optimizer_marks(optimizers: Sequence[optim.Optimizer]) -> list[object]:
    """What changes when somebody changes hyperparameters or state of optimizers."""
    groups = [
        {key: repr(value) for key, value in group.items() if key != "params"}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    versions = [
        (key, value._version if isinstance(value, Tensor) else repr(value))
        for optimizer in optimizers
        for state in optimizer.state.values()
        for key, value in state.items()
    ]
    return [*groups, *versions]


def changed_by_hook(what: str) -> str:
    """What to say of a tensor that a hook has changed and must not."""
    return (
        f"{what} was changed; set `changes_model = True` on the hook's class, and let it run on "
        "every rank, in after_step or after_evaluation"
    )


def _ended_by_some(reasons: Sequence[str]) -> TaskError:
    ending = next(rank for rank, reason in enumerate(reasons) if reason)
    other = next(rank for rank, reason in enumerate(reasons) if reason != reasons[ending])
    there = repr(reasons[other]) if reasons[other] else "nothing"
    return TaskError(
        f"a hook ends the run on rank {ending} ({reasons[ending]!r}) and on rank {other} for "
        f"{there}: it must do the same on each rank, so let it depend on the step and on metrics "
        "of whole evaluations, not on what batches of this rank have left"
    )
