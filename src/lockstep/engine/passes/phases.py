"""Which loss and parameters each step has: those of the task, or of one of its phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Signature, signature
from typing import Any

from torch import Tensor

from lockstep.config.parsing import shown
from lockstep.engine.optimizer.choice import named_optimizers
from lockstep.engine.task import Phase, Task, has_batch_loss, has_carry
from lockstep.errors import TaskError

_PLAIN = ""
"""Name of the only phase of a task without phases."""


class Phases:
    """The phases of a task, in turn: which one a step has depends on its number alone.

    Attributes:
        all: the phases; one without a name, with `Task.loss`, for a task that has none.
        first_steps: for each phase, the first step that has it.
        are_several: whether the task has phases of its own.
    """

    def __init__(self, task: Task) -> None:
        """Take the phases from a task.

        Raises:
            TaskError: they are not what they must be, or the task has neither phases nor a loss.
        """
        self._task = type(task).__name__
        self.all = _checked(task)
        self.are_several = self.all[0].name != _PLAIN
        self._cycle = [i for i, phase in enumerate(self.all) for _ in range(phase.steps)]
        self.first_steps = [self._cycle.index(i) for i in range(len(self.all))]
        self._parameters: dict[str, list[Tensor]] = {}

    def at(self, step: int) -> Phase:
        """The phase of a step, counted from 0."""
        return self.all[self._cycle[step % len(self._cycle)]]

    def parameters(self, step: int) -> list[Tensor] | None:
        """The parameters that a step's backward pass is for; None for all."""
        return self._parameters.get(self.at(step).name)

    def optimizer(self, made: object) -> object:
        """One optimizer over all parameters, from what `Task.build_optimizer` has returned.

        Args:
            made: an optimizer, or several by name: one for each phase, where there are phases.

        Raises:
            TaskError: they are not what they must be, the names are not those of the phases, or a
                phase would train nothing.
        """
        if not isinstance(made, Mapping):
            return made
        where = f"{self._task}.build_optimizer"
        if not self.are_several:
            return named_optimizers(made, where)
        names = [phase.name for phase in self.all]
        if {*made} != {*names}:
            raise TaskError(
                f"{where}: returned optimizers for {shown(list(made))}; the phases are {names}"
            )
        optimizers = named_optimizers({name: made[name] for name in names}, where)
        for name, one in optimizers.by_name.items():
            stepped = [p for group in one.param_groups for p in group["params"] if p.requires_grad]
            if not stepped:
                raise TaskError(
                    f"{where}: the optimizer of {name!r} has no parameter that requires a "
                    "gradient; leave the phase out, or give it one"
                )
            self._parameters[name] = stepped
        return optimizers

    def metric_names(self, metrics: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Names of the metrics of all phases.

        Args:
            metrics: names of the task's metrics in each phase, by the phase's name.
        """
        if not self.are_several:
            return metrics.get(_PLAIN, ())
        return tuple(
            f"{phase.name}_{name}"
            for phase in self.all
            for name in ("loss", *metrics.get(phase.name, ()))
        )

    def description(self) -> list[list[Any]]:
        """Names and lengths of the phases, as JSON."""
        return [[phase.name, phase.steps] for phase in self.all]


def _checked(task: Task) -> list[Phase]:
    if has_carry(task):
        _check_carry_arguments(task)
    phases: Any = task.phases()
    where = f"{type(task).__name__}.phases"
    if not isinstance(phases, Sequence) or not all(isinstance(p, Phase) for p in phases):
        raise TaskError(f"{where}: must return a list of lockstep.Phase, returned {shown(phases)}")
    if _check_batch_loss(task, has_phases=bool(phases)):
        return [Phase(_PLAIN, task.loss)]
    if not phases:
        if type(task).loss is Task.loss:
            raise TaskError(
                f"{type(task).__name__}.loss: is missing; write it, or give losses by `phases`"
            )
        _check_arguments(task, f"{type(task).__name__}.loss", task.loss)
        return [Phase(_PLAIN, task.loss)]
    names = [phase.name for phase in phases]
    for phase in phases:
        if not phase.name.isidentifier() or names.count(phase.name) > 1:
            raise TaskError(
                f"{where}: the name {phase.name!r}: must be an identifier that no other phase has"
            )
        if phase.steps < 1:
            raise TaskError(f"{where}: {phase.name}: steps={phase.steps}: must be at least 1")
        if not callable(phase.loss):
            raise TaskError(f"{where}: {phase.name}: loss={shown(phase.loss)}: is no function")
        _check_arguments(task, f"{where}: {phase.name}: loss", phase.loss)
    return list(phases)


def _check_batch_loss(task: Task, has_phases: bool) -> bool:
    """Whether a task has a loss over the whole batch.

    Raises:
        TaskError: it lacks a part of one, or has another loss too.
    """
    kind, has_outputs = type(task), type(task).outputs is not Task.outputs
    is_without = has_phases or kind.loss is not Task.loss  # and `outputs` a method of its own
    if not has_batch_loss(task) and (is_without or not has_outputs):
        return False
    for name, is_there, takes in (
        ("outputs", has_outputs, "(model, batch) and returns tensors with a row for each sample"),
        ("batch_loss", has_batch_loss(task), "(outputs, batch) and returns lockstep.Loss"),
    ):
        if not is_there:
            raise TaskError(
                f"{kind.__name__}.{name}: is missing; a loss over the whole batch needs outputs "
                f"and batch_loss: write {name}, which takes {takes}"
            )
        method = getattr(task, name)
        if not callable(method) or not _can_bind(signature(method), 2):
            raise TaskError(f"{kind.__name__}.{name}: must be a method that takes {takes}")
    other = "phases" if has_phases else "loss" if kind.loss is not Task.loss else ""
    if other:
        raise TaskError(
            f"{kind.__name__}.batch_loss: the task has {other} too, and a step has one loss; leave "
            f"one of them out{' (`loss = lockstep.Task.loss`)' if other == 'loss' else ''}"
        )
    return True


def _check_arguments(task: Task, where: str, loss: Callable[..., Any]) -> None:
    """Refuse a loss that takes a carry where there is none, or takes none where there is one.

    Raises:
        TaskError: saying which.
    """
    try:
        takes = signature(loss)
    except (TypeError, ValueError):
        return  # some callables of C do not say
    carried = has_carry(task)
    if _can_bind(takes, 2 + carried):
        return
    if not carried and _can_bind(takes, 3):
        raise TaskError(
            f"{where}: takes (model, batch, carry), but {type(task).__name__}.carry is missing; "
            "write it: it returns what a microbatch carries into its first step"
        )
    if carried and _can_bind(takes, 2):
        raise TaskError(
            f"{where}: must take (model, batch, carry) and return (lockstep.Loss, carry), since "
            f"there is a {type(task).__name__}.carry"
        )


def _check_carry_arguments(task: Task) -> None:
    """Refuse a carry, or an `evaluate` beside it, that does not take a model and a batch.

    Raises:
        TaskError: naming it.
    """
    for name in ("carry", "evaluate"):
        method = getattr(task, name)
        if not callable(method) or not _can_bind(signature(method), 2):
            raise TaskError(
                f"{type(task).__name__}.{name}: must be a method that takes (model, batch)"
                + ("; evaluation batches start with a new carry" if name == "evaluate" else "")
            )


def _can_bind(takes: Signature, count: int) -> bool:
    try:
        takes.bind(*range(count))
    except TypeError:
        return False
    return True
