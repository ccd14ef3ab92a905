"""Learning-rate schedulers of `torch.optim.lr_scheduler`, which a task attaches to its optimizers.

They are stepped on every rank alike, once a step, epoch or evaluation is committed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.config import TrainConfig
from lockstep.config.parsing import shown
from lockstep.engine.audit.pass_state import is_check_due
from lockstep.engine.audit.reachable import fingerprints, optimizers_in
from lockstep.engine.optimizer.choice import check_none_attached, own_groups, parts_of, stepping_in
from lockstep.engine.optimizer.optimizer_state import from_json, to_json
from lockstep.engine.optimizer.schedule import decoded, encoded
from lockstep.engine.task import Task
from lockstep.errors import CheckpointError, ConfigError, TaskError, shared

_CPU = torch.device("cpu")
_INTERVALS = ("step", "epoch", "evaluation")


@dataclass(frozen=True)
class Scheduler:
    """When a learning-rate scheduler is stepped; what `Task.build_scheduler` may return.

    Attributes:
        scheduler: one of `torch.optim.lr_scheduler`, or of a class that is derived from it.
        interval: after each `step` of its optimizer, after the last step of each `epoch`, or after
            each `evaluation` of the validation splits.
        frequency: it is stepped in every so many of these.
        metric: metric of the evaluation that `ReduceLROnPlateau` goes by, by the names that
            `watch` takes; empty for `watch` itself.
    """

    scheduler: LRScheduler
    interval: Literal["step", "epoch", "evaluation"] = "step"
    frequency: int = 1
    metric: str = ""


class Schedulers:
    """The schedulers of a run, by the names of their optimizers ("" for a single one)."""

    def __init__(
        self, by_name: Mapping[str, Scheduler], optimizers: Mapping[str, optim.Optimizer]
    ) -> None:
        """Take checked schedulers, before the first step.

        Args:
            by_name: schedulers by the name of their optimizer.
            optimizers: all optimizers by name.
        """
        self._by_name = dict(by_name)
        # Of all optimizers: a scheduler may set rates of others than its own.
        inner = [stepping_in(one) for one in optimizers.values()]
        self._groups = [g for one in inner for g in chain(*own_groups(one).values())]
        self._counts = dict.fromkeys(by_name, 0)
        self.description = {
            f"scheduler {name}".rstrip(): _described(one) for name, one in by_name.items()
        }

    def __bool__(self) -> bool:
        return bool(self._by_name)

    @property
    def go_by_evaluations(self) -> bool:
        """Whether some are stepped after evaluations."""
        return any(one.interval == "evaluation" for one in self._by_name.values())

    def check_metrics(self, metrics: Mapping[str, object], watch: str) -> None:
        """Make sure that evaluations have the metrics that schedulers go by.

        Args:
            metrics: metrics of evaluations, by the names that `watch` takes.
            watch: the config's.

        Raises:
            TaskError: naming one that they lack.
        """
        for one in self._by_name.values():
            if one.interval != "evaluation":
                continue
            if not metrics:
                raise TaskError(
                    f"build_scheduler: {_kind(one)} goes by evaluations, but the task's "
                    "dataset('val') is None; give it a validation split"
                )
            if (one.metric or watch) not in metrics:
                raise TaskError(
                    f"build_scheduler: {_kind(one)} goes by {one.metric or watch!r}; the "
                    f"evaluation has {', '.join(sorted(metrics))}"
                )

    def after_step(self, phase: str, is_epoch_end: bool) -> None:
        """Step those that are due after a step.

        Args:
            phase: the step's phase, which has an optimizer of its own; empty if all have stepped.
            is_epoch_end: whether the step was the last one of an epoch.

        Raises:
            TaskError: one does not come back by its `state_dict`.
        """
        for name, one in self._by_name.items():
            has_stepped = not phase or name in ("", phase)
            is_due = {"step": has_stepped, "epoch": is_epoch_end, "evaluation": False}
            if is_due[one.interval]:
                self._count(name, one.scheduler.step)

    def after_evaluation(self, metrics: Mapping[str, float], watch: str) -> None:
        """Step those that are due after an evaluation of the validation splits.

        Args:
            metrics: metrics by the names that `watch` takes.
            watch: the config's.

        Raises:
            TaskError: as above.
        """
        for name, one in self._by_name.items():
            if one.interval != "evaluation":
                continue
            if one.metric or isinstance(one.scheduler, ReduceLROnPlateau):
                step: Callable[..., None] = one.scheduler.step
                self._count(name, partial(step, metrics[one.metric or watch]))
            else:
                self._count(name, one.scheduler.step)

    def state_dict(self) -> dict[str, Any]:
        """The state of all, as JSON, by name."""
        return {
            name: {"count": self._counts[name], "state": encoded(one.scheduler.state_dict())}
            for name, one in self._by_name.items()
        }

    def load_state_dict(self, saved: Any) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            CheckpointError: it is not the state of such schedulers.
        """
        if not isinstance(saved, dict) or {*saved} != {*self._by_name}:
            raise shared(
                CheckpointError(
                    f"learning_rates.schedulers: has the state of {shown(saved)}, the task has "
                    f"schedulers {list(self._by_name)}; resume with the same task"
                )
            )
        for name, one in self._by_name.items():
            try:
                count, state = saved[name]["count"], saved[name]["state"]
                _load(one.scheduler, state)
                self._counts[name] = int(count)
            except CheckpointError:
                raise
            except Exception as error:  # the class's own code reads it
                raise shared(
                    CheckpointError(
                        f"learning_rates.schedulers: {_kind(one)} cannot load its state: {error}"
                    )
                ) from None

    def _count(self, name: str, step: Callable[[], None]) -> None:
        self._counts[name] += 1
        count, one = self._counts[name], self._by_name[name]
        if count % one.frequency == 0:
            with _explained(one):
                if is_check_due(count // one.frequency):
                    self._step_twice(one, step)
                else:
                    step()

    def _step_twice(self, one: Scheduler, step: Callable[[], None]) -> None:
        """Step, go back by `load_state_dict`, and step again: it must come to the same."""
        scheduler, groups, kind = one.scheduler, self._groups, _kind(one)
        versions = self._versions()
        before = encoded(scheduler.state_dict())
        values, hidden = [_options(group) for group in groups], _hidden(scheduler)
        step()
        after = encoded(scheduler.state_dict()), [_options(group) for group in groups]
        _load(scheduler, before)
        for group, options in zip(groups, values, strict=True):
            _restore_options(group, options)
        step()
        again = encoded(scheduler.state_dict()), [_options(group) for group in groups]
        if _text(after) != _text(again) or _hidden(scheduler) != hidden:
            raise TaskError(
                f"build_scheduler: {kind} comes to something else when its state is loaded again "
                "and the same step is done, so a resumed run would have other learning rates; keep "
                "what it counts in attributes that are numbers, text, arrays, or lists and dicts "
                "of these, and let its functions depend on their argument alone"
            )
        if self._versions() != versions:
            raise TaskError(
                f"build_scheduler: {kind} changes parameters; do that in Task.after_step"
            )

    def _versions(self) -> list[int]:
        return [p._version for group in self._groups for p in group["params"]]


@contextmanager
def _explained(one: Scheduler) -> Iterator[None]:
    """Say of an error of torch's own classes what it means.

    Raises:
        TaskError: the scheduler refuses to be stepped.
    """
    try:
        yield
    except ValueError as error:
        if not type(one.scheduler).__module__.startswith("torch.optim."):
            raise
        text = " ".join(str(error).split())
        raise TaskError(f"build_scheduler: {_kind(one)} cannot be stepped: {text}") from None


def build_schedulers(task: Task, optimizer: optim.Optimizer, config: TrainConfig) -> Schedulers:
    """The schedulers that a task attaches to its optimizers; none if it has no `build_scheduler`.

    Args:
        task: the task.
        optimizer: its optimizer, or all of them (`choice.NamedOptimizers`).
        config: config of the run.

    Raises:
        TaskError: something that is returned cannot be stepped, or schedules something else.
        ConfigError: the config has a schedule too.
    """
    if type(task).build_scheduler is Task.build_scheduler:
        check_none_attached(optimizer)
        return Schedulers({}, {})
    where = f"{type(task).__name__}.build_scheduler"
    parts = parts_of(optimizer)
    is_single = [*parts] == [""]
    made: Any = task.build_scheduler(parts[""] if is_single else parts)
    if made is None:
        return Schedulers({}, {})
    if type(task).lr_factor is not Task.lr_factor:
        raise TaskError(f"{where}: the task has lr_factor too; leave one of them out")
    if config.schedule.name != "constant" or config.schedule.warmup_steps:
        raise ConfigError(
            f"schedule.name={config.schedule.name}, schedule.warmup_steps="
            f"{config.schedule.warmup_steps}: {where} sets the learning rates; set constant and 0"
        )
    schedulers = {
        name: _checked(where, name, one, parts)
        for name, one in _by_name(where, made, parts).items()
    }
    for name in schedulers:
        # They are stepped by the engine, after each step; torch need not watch the order.
        vars(parts[name])["_opt_called"] = True
    return Schedulers(schedulers, parts)


def _by_name(where: str, made: Any, parts: Mapping[str, optim.Optimizer]) -> dict[str, Any]:
    """What the task has returned, by the name of its optimizer."""
    if isinstance(made, Mapping):
        unknown = [name for name in made if name not in parts]
        if unknown or not made or [*parts] == [""]:
            names = [name for name in parts if name]
            raise TaskError(
                f"{where}: returned schedulers for {shown(list(made))}; "
                + (f"the optimizers are {names}" if names else "there is one optimizer: return one")
            )
        return dict(made)
    scheduler = made.scheduler if isinstance(made, Scheduler) else made
    owner = getattr(scheduler, "optimizer", None)
    names = [name for name, one in parts.items() if _has(one, owner)]
    return {names[0] if names else next(iter(parts)): made}


def _has(part: optim.Optimizer, owner: object) -> bool:
    """Whether a scheduler's optimizer is this one, or one inside of it."""
    return any(owner is inner for inner in optimizers_in(part).values())


def _checked(where: str, name: str, made: Any, parts: Mapping[str, optim.Optimizer]) -> Scheduler:
    """What a task returned for one optimizer, if that can be stepped.

    Raises:
        TaskError: it cannot.
    """
    one = made if isinstance(made, Scheduler) else Scheduler(made)
    kind = type(one.scheduler).__name__
    if not isinstance(one.scheduler, LRScheduler):
        raise TaskError(
            f"{where}: must return a scheduler of torch.optim.lr_scheduler, lockstep.Scheduler, or "
            f"these by the names of optimizers; returned a {kind}"
        )
    if not _has(parts[name], one.scheduler.optimizer):
        others = [repr(n) for n, part in parts.items() if _has(part, one.scheduler.optimizer)]
        owner = (
            f"the optimizer of {others[0]}" if others else "an optimizer that the run does not step"
        )
        named = f"of {name!r} " if name else ""
        raise TaskError(
            f"{where}: the {kind} {named}is built over {owner}; build it over the one that it is "
            "given"
        )
    if isinstance(one.scheduler, ReduceLROnPlateau):
        if not isinstance(made, Scheduler):
            one = Scheduler(made, "evaluation")
        if one.interval != "evaluation":
            raise TaskError(
                f"{where}: {kind} goes by a metric of evaluations, so its interval is "
                f"'evaluation', not {one.interval!r}"
            )
    elif one.metric and (
        one.interval != "evaluation" or type(one.scheduler).__module__.startswith("torch.optim.")
    ):
        raise TaskError(
            f"{where}: {kind} goes by no metric at interval={one.interval!r}, so "
            f"metric={one.metric!r} has no use; leave it out"
        )
    if one.interval not in _INTERVALS:
        raise TaskError(f"{where}: interval={one.interval!r}: must be one of {[*_INTERVALS]}")
    if not isinstance(one.frequency, int) or isinstance(one.frequency, bool) or one.frequency < 1:
        raise TaskError(f"{where}: frequency={one.frequency!r}: must be an integer of at least 1")
    encoded(one.scheduler.state_dict())
    return one


def _kind(one: Scheduler) -> str:
    return type(one.scheduler).__name__


def _described(one: Scheduler) -> str:
    """What a run's result depends on, for people and for comparing."""
    digest = hashlib.sha256(_text(encoded(one.scheduler.state_dict())).encode()).hexdigest()
    of = f" of {one.metric}" if one.metric else ""
    return f"{_kind(one)} every {one.frequency} {one.interval}{of} ({digest[:16]})"


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _hidden(scheduler: LRScheduler) -> dict[str, object]:
    """Fingerprints of what its state holds that has no form in JSON."""
    state = scheduler.state_dict()
    return fingerprints({k: v for k, v in state.items() if "built" in _text(encoded(v))}, set())


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of all values of a parameter group that a scheduler may change, as JSON."""
    options = {}
    for key, value in group.items():
        with suppress(TypeError):
            options[key] = to_json(value)
    return options


def _restore_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, saved in options.items():
        own = group[key]
        if isinstance(own, Tensor):
            own.copy_(from_json(saved, own.device))
        else:
            group[key] = from_json(saved, _CPU)


def _load(scheduler: LRScheduler, saved: Any) -> None:
    """Load an encoded state; what it does not hold stays as the scheduler has it."""
    own = scheduler.state_dict()
    scheduler.load_state_dict(decoded(saved, own))
