"""Calls the hooks of a task, and its `after_step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import Tensor, nn, optim

from lockstep.config import TrainConfig
from lockstep.data.random import Stream, random_key, seed_all
from lockstep.engine.assembly import Parts
from lockstep.engine.audit.pass_state import is_check_due
from lockstep.engine.audit.reachable import optimizers_in
from lockstep.engine.audit.saved_state import SavedState, forgetting
from lockstep.engine.events import Warned
from lockstep.engine.hook import MAY_CHANGE, Hook, Run
from lockstep.engine.log import Logbook
from lockstep.engine.passes.buffers import Constants
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Raised, Runtime, everywhere, shared_texts
from lockstep.engine.step.sums import StepResult
from lockstep.engine.task import Task
from lockstep.engine.task_config import length_reads, watched
from lockstep.errors import TaskError, shared
from lockstep.nn.cutting import region_of

MAY_LOG = ("on_start", "after_step", "after_evaluation", "on_end")
"""Methods of a hook that may call `lockstep.log`: all ranks have the same state in them."""
_CALLED_BY_SOME = ("on_start", "after_checkpoint")
"""Methods that not all ranks call at once: ranks may join later, and rank 0 writes checkpoints."""

_BODY = "the body of the loop over lockstep.steps"
_NOT_IN_BODY = (
    f"{_BODY}: calls the model, whose shards are on several ranks (mesh.tp), and the run could not "
    "go on if one of them died meanwhile; compute it in Task.evaluate, or set mesh.tp=1"
)


class Hooks:
    """Calls `Task.after_step` and the hooks, each as soon as its moment is committed.

    There is no communication at these moments. So an exception is kept until the next collective
    of all ranks. What a hook has done halfway cannot be undone, so the step is not repeated then.

    In steps for which `is_check_due` is true, and at the ends of such epochs, changes are compared
    with what a checkpoint would restore.

    Attributes:
        has_failed: whether a hook has raised an exception on some rank; the same on all ranks.
    """

    def __init__(self, config: TrainConfig, runtime: Runtime, parts: Parts, run_dir: Path) -> None:
        self._seed = config.seed
        self._runtime = runtime
        self._parts = parts
        task, optimizer = parts.task_state.task, parts.train_step.flat_optimizer.optimizer
        self._task = task
        self._hooks = parts.task_state.hooks
        reads = length_reads(task.config)
        seen = config if reads is None else watched(config, reads)
        self._run = Run(task, seen, parts.model, optimizer, run_dir, parts.total_steps)
        self._optimizers = list(optimizers_in(optimizer).values())
        self._saved = SavedState(parts.task_state, parts.model, self._optimizers, parts.loader)
        self._constants = Constants(parts.model, ())
        self._logbook = Logbook(runtime.emit)
        self._has_after_step = type(task).after_step is not Task.after_step
        # The same on all ranks, also for hooks that only rank 0 runs.
        self._watch_steps = any(type(h).after_step is not Hook.after_step for h in self._hooks)
        self._num_evaluations = 0
        self._started: set[int] = set()
        self._error: Raised | None = None
        self._ended = ""
        self.has_failed = False

    def start(self, progress: Progress) -> None:
        """Call `on_start` of the hooks that run in this process and have not started."""
        self._update_run(progress)
        waiting = [i for i in self._running("on_start") if i not in self._started]
        self._started |= {*waiting}
        self._call("on_start", waiting)
        self._saved.note()

    def after_step(self, progress: Progress, result: StepResult) -> str:
        """Call `after_step` of the task and of its hooks.

        Returns:
            Why a hook ends the run; empty if none does.
        """
        if not self._hooks and not self._has_after_step:
            return ""
        hooks = self._running("after_step")
        if not hooks and not self._has_after_step:
            return ""
        step = progress.step
        self._update_run(progress, result)

        def task_first() -> None:
            if self._has_after_step:
                seed_all(random_key(self._seed, Stream.AFTER_STEP, step))
                with modes_kept(self._parts.model, "after_step"), self._logbook.opened(step):
                    self._task.after_step(self._parts.model, step)

        run = self._run
        is_checked = is_check_due(step) or (run.is_epoch_end and is_check_due(run.epoch + 1))
        self._call("after_step", hooks, is_checked=is_checked, before=task_first)
        return self._taken_stop_reason()

    def after_evaluation(self, progress: Progress, split: str, metrics: dict[str, float]) -> str:
        """Call `after_evaluation`; returns why a hook ends the run, as `after_step`."""
        hooks = self._running("after_evaluation")
        if not hooks:
            return ""
        self._update_run(progress)
        self._num_evaluations += 1
        is_checked = is_check_due(self._num_evaluations)
        self._call("after_evaluation", hooks, split, dict(metrics), is_checked=is_checked)
        return self._taken_stop_reason()

    def after_checkpoint(self, progress: Progress, folder: Path) -> None:
        """Call `after_checkpoint`; on rank 0 only."""
        self._update_run(progress)
        self._call("after_checkpoint", self._running("after_checkpoint"), folder)

    def end(self, progress: Progress, status: str, reason: str) -> None:
        """Call `on_end`; a collective.

        Raises:
            LockstepError: a hook has raised an exception on some rank; on all ranks.
        """
        self._update_run(progress)
        self._call("on_end", self._running("on_end"), status, reason)
        self.check()

    def check_step(self) -> None:
        """As `check`, after each step; does nothing if no hook has `after_step`."""
        if self._has_after_step or self._watch_steps:
            self.check()

    def check(self) -> None:
        """Raise the exceptions of hooks; a collective.

        Raises:
            LockstepError: a hook has raised an exception on some rank; on all ranks.
        """
        if not self._hooks and not self._has_after_step:
            return
        reasons = self.agree(self._ended)
        if len({*reasons}) > 1:
            self.has_failed = True
            raise shared(_ended_by_some(reasons))

    def agree(self, text: str) -> list[str]:
        """The texts of all ranks, by rank; a collective.

        Raises:
            LockstepError: a hook, or the body of a loop, has raised an exception on some rank; on
                all ranks.
        """
        error, texts = shared_texts(self._runtime.transport, self._error, text)
        if error is not None:
            self.has_failed = True
            raise error
        return texts

    @contextmanager
    def around_body(self, step: int) -> Iterator[None]:
        """The context of the body of a user's own loop, which may change as little as a hook may.

        Args:
            step: number of optimizer steps that have been done.
        """
        why = _NOT_IN_BODY if self._parts.placement.mesh.tp > 1 else ""
        seed_all(random_key(self._seed, Stream.HOOK, step, len(self._hooks)))
        with self._changes_kept(_BODY, is_check_due(step), with_shared=False):
            self._constants.mark(step)
            rates = self._parts.train_step.rates
            values = rates.values()
            modes = modes_kept(self._parts.model, _BODY)
            logs = self._logbook.opened(step)
            with modes, logs, self._closed(why):
                yield
            self._constants.check(_BODY, changed_by_body)
            if changed := rates.changed(values):
                raise TaskError(f"{_BODY}: {changed_by_body(changed)}")
        self._runtime.heartbeat.beat()

    def check_saved(self, step: int) -> None:
        """Make sure that what task and hooks have changed can be saved, or warn; a collective.

        Raises:
            TaskError: something cannot; on all ranks.
        """
        rates = self._parts.train_step.rates
        if rates.schedulers:
            everywhere(self._runtime.transport, rates.check)
        passes = self._parts.pass_state
        if paths := everywhere(self._runtime.transport, lambda: self._saved.check_again(passes)):
            self._runtime.emit(Warned(step=step, message=forgetting(paths)))

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

    def _call(
        self,
        name: str,
        hooks: list[int],
        *arguments: object,
        is_checked: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Call a method of hooks; keep its exception, and restore the engine's own state.

        Args:
            name: name of the method.
            hooks: indices of the hooks.
            arguments: further arguments of the method.
            is_checked: whether to compare their changes with what a checkpoint would restore.
            before: function that is called first, likewise.
        """
        # A hook of the first rank may keep anything anywhere; other ranks see what others change.
        with_shared = not any(self._hooks[index].first_only for index in hooks)
        with self._changes_kept(name, is_checked, with_shared):
            before()
            self._each(name, hooks, *arguments)

    @contextmanager
    def _changes_kept(self, name: str, is_checked: bool, with_shared: bool) -> Iterator[None]:
        """Keep an exception of user code that runs within it, and restore the engine's own state.

        Args:
            name: what the code is called in messages.
            is_checked: whether to compare its changes with what a checkpoint would restore.
            with_shared: whether to look at classes and modules too.
        """
        state = self._saved.state(with_shared) if is_checked else {}
        try:
            yield
            self._parts.train_step.flat.take_back()
            self._parts.train_step.rates.take_over()
            if is_checked:
                self._saved.check(state, name, with_shared)
        except (Exception, SystemExit) as error:
            self._error = self._error or error
        self._parts.train_step.state.mark()
        self._parts.loader.watched.mark()

    def _each(self, name: str, hooks: list[int], *arguments: object) -> None:
        step = self._run.step
        for index in hooks:
            hook = self._hooks[index]
            self._run.called_by(hook, name)
            # A seed for each hook: rank 0 may run hooks that other ranks do not.
            seed_all(random_key(self._seed, Stream.HOOK, step, index))
            may_change = hook.changes_model and name in MAY_CHANGE
            if not may_change:
                self._constants.mark(step)
            marks = optimizer_marks(self._optimizers) if hook.first_only else []
            rates = self._parts.train_step.rates
            values = rates.values() if name not in MAY_CHANGE else []
            where = f"{type(hook).__name__}.{name}"
            # Each process sets its modes at the start, unless the hook runs on rank 0 only.
            is_everywhere = name == "on_start" and not hook.first_only
            modes = nullcontext() if is_everywhere else modes_kept(self._parts.model, where)
            logs = self._logbook.opened(step) if name in MAY_LOG else nullcontext()
            with modes, logs, self._not_computed(hook, name):
                getattr(hook, name)(self._run, *arguments)
            if not may_change:
                self._constants.check(where, changed_by_hook)
            changed = rates.changed(values) if name not in MAY_CHANGE else ""
            if changed and not hook.first_only:
                raise TaskError(
                    f"{where}: {changed} was changed; change it in after_step or after_evaluation, "
                    "which every rank calls"
                )
            if hook.first_only and optimizer_marks(self._optimizers) != marks:
                raise TaskError(
                    f"{where}: the optimizer was changed, on the first rank only; let the hook run "
                    "on every rank"
                )

    @contextmanager
    def _not_computed(self, hook: Hook, name: str) -> Iterator[None]:
        """Refuse calls of a model whose shards are on several ranks that do not all call it.

        Otherwise this rank would wait for other ranks' shards, and they for its next message.
        """
        placement = self._parts.placement
        is_alone = hook.first_only or name in _CALLED_BY_SOME
        is_spare = placement.replica_number == len(placement.mesh.replicas)
        if placement.mesh.tp == 1 or not (is_alone or is_spare):
            yield
            return
        who = "runs on some ranks only" if is_alone else "runs on a spare rank too, with no replica"
        why = (
            f"{type(hook).__name__}.{name}: calls the model, whose shards are on several ranks "
            f"(mesh.tp), but {who}; compute it in Task.evaluate, or in after_evaluation of a hook "
            "that runs on every rank (with a number of ranks that mesh.pp x mesh.tp divides), or "
            "set mesh.tp=1"
        )
        with self._closed(why):
            yield

    @contextmanager
    def _closed(self, why: str) -> Iterator[None]:
        """Refuse sums over the shards of the model, unless `why` is empty."""
        region = region_of(self._parts.model) if why else None
        if region is None:
            yield
            return
        region.axis.closed = why
        try:
            yield
        finally:
            region.axis.closed = ""

    def _update_run(self, progress: Progress, result: StepResult | None = None) -> None:
        """Update the `Run` that hooks get."""
        run, sampler = self._run, self._parts.sampler
        run.step, run.evaluated = progress.step, dict(progress.metrics)
        run.epoch = sampler.epoch(max(0, progress.step - 1))
        run.is_epoch_end = progress.step > 0 and sampler.is_epoch_end(progress.step)
        if result is not None:
            names = ("loss", *self._parts.compute.metrics)
            run.train = result.means(names)
            weights = zip(names, result.scalars[1::2], strict=True)
            run.weights = {name: weight for name, weight in weights if weight}
            run.lr, run.grad_norm = result.lr, result.grad_norm
            run.phase = self._parts.compute.phases.at(progress.step - 1).name


@contextmanager
def modes_kept(model: nn.Module, where: str) -> Iterator[None]:
    """Refuse user code that leaves the model in another mode, such as evaluation mode.

    Raises:
        TaskError: naming a module whose mode has changed.
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
    """Values that change when hyperparameters or state of optimizers do."""
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


def changed_by_hook(name: str) -> str:
    """The error message about a tensor that a hook has changed and must not."""
    return (
        f"{name} was changed; set `changes_model = True` on the hook's class, and let it run on "
        "every rank, in after_step or after_evaluation"
    )


def changed_by_body(name: str) -> str:
    """The error message about a tensor that the body of a loop has changed."""
    return (
        f"{name} was changed; change it in Task.after_step(model, step), or in a hook's after_step "
        "(with `changes_model = True` where it is of the model)"
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
