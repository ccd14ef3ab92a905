"""What `configure_optimizers` returns: an optimizer, and schedulers with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import optim

from lockstep.config.parsing import shown
from lockstep.errors import TaskError
from lockstep.lightning.data import overrides

_KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}
_SEVERAL = (
    "configure_optimizers: returned several optimizers; Lightning steps those in manual "
    "optimization only, and Lockstep in a Task with phases or named optimizers (docs/tasks.md)"
)


class Configured(NamedTuple):
    """What a module trains with.

    Attributes:
        optimizer: its optimizer; None leaves it to the config.
        scheduler: its scheduler, if any.
        interval: `step` or `epoch`, or `evaluation` of one that follows a metric.
        frequency: number of these from one step of the scheduler to the next.
        metric: the metric of `val` that it follows; empty for none.
    """

    optimizer: Any
    scheduler: Any = None
    interval: Literal["step", "epoch", "evaluation"] = "epoch"
    frequency: int = 1
    metric: str = ""


def configured(module: Any) -> Configured:
    """The optimizer and the scheduler of a module.

    Raises:
        TaskError: there are several, or something that Lockstep cannot honour.
    """
    if not overrides(module, "configure_optimizers"):
        return Configured(None)
    returned = module.configure_optimizers()
    where = f"{type(module).__name__}.configure_optimizers"
    if returned is None:
        raise TaskError(
            f"{where}: returned None, which trains nothing; return an optimizer, or leave the "
            "method out for the one that config.optimizer names"
        )
    schedulers: Any = []
    if isinstance(returned, Mapping):
        schedulers = [returned["lr_scheduler"]] if "lr_scheduler" in returned else []
        returned = returned.get("optimizer")
    elif isinstance(returned, (list, tuple)):
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            returned, schedulers = returned
            schedulers = schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]
        if len(returned) != 1:
            raise TaskError(_SEVERAL)
        returned = returned[0]
        if isinstance(returned, Mapping):
            schedulers = [returned["lr_scheduler"]] if "lr_scheduler" in returned else []
            returned = returned.get("optimizer")
    if not isinstance(returned, optim.Optimizer):
        raise TaskError(f"{where}: returned {shown(returned)}; must be a torch optimizer")
    if len(schedulers) > 1:
        raise TaskError(
            f"{where}: returned {len(schedulers)} schedulers of one optimizer; chain them by "
            "torch's SequentialLR or ChainedScheduler"
        )
    return _scheduled(where, returned, schedulers[0]) if schedulers else Configured(returned)


def _scheduled(where: str, optimizer: Any, given: Any) -> Configured:
    asked = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    unknown = sorted(asked.keys() - _KEYS)
    if unknown:
        raise TaskError(f"{where}: lr_scheduler has {unknown[0]!r}, which Lightning does not know")
    scheduler, frequency = asked.get("scheduler"), asked.get("frequency", 1)
    follows = isinstance(scheduler, optim.lr_scheduler.ReduceLROnPlateau)
    interval = asked.get("interval", "epoch")
    if interval not in ("step", "epoch"):
        raise TaskError(f"{where}: interval={shown(interval)}: must be 'step' or 'epoch'")
    if not follows:
        return Configured(optimizer, scheduler, interval, frequency)
    if interval == "step":
        raise TaskError(
            f"{where}: interval='step' of ReduceLROnPlateau: its metric is of evaluations; leave "
            "the interval out, and set eval_every in the config"
        )
    monitor = asked.get("monitor")
    if not monitor:
        raise TaskError(f"{where}: ReduceLROnPlateau needs 'monitor', such as 'val_loss'")
    return Configured(optimizer, scheduler, "evaluation", frequency, monitor.removeprefix("val/"))


def detached(optimizer: optim.Optimizer) -> Callable[[], None]:
    """Take off an optimizer what a scheduler that was made with it has put there.

    Lightning has both made at once, and Lockstep first the one, then the other.

    Returns:
        What puts it back.
    """
    watching = vars(optimizer).pop("step", None)
    rates = [group.pop("initial_lr", None) for group in optimizer.param_groups]

    def attach() -> None:
        if watching is not None:
            vars(optimizer)["step"] = watching
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["initial_lr"] = rate

    return attach
