"""The hooks of a LightningModule: `configure_optimizers`, and those between steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn, optim

from lockstep.config.parsing import shown
from lockstep.engine.hook import Hook, Run
from lockstep.engine.log import log
from lockstep.errors import TaskError
from lockstep.lightning.data import overrides
from lockstep.lightning.logs import is_start, load_state, metrics_in, state_of

_PLAIN = (bool, int, float, str, type(None))
_START = ("on_fit_start", "on_train_start", "on_train_epoch_start")
_MISSING = object()
_METRIC = "metric "
_NUMBER = "number "


class LightningHooks(Hook):
    """Calls a module's hooks of training, and keeps what they change in it.

    A module's own attributes stay as `__init__` has left them, so that a microbatch leaves nothing
    for another one. What hooks change of them, numbers, texts and metrics, is kept here, saved,
    and put into the module while a step or a hook runs.

    Attributes:
        step: number of optimizer steps that have been done.
        epoch: the epoch, from 0, that the next step belongs to.
        first: number of steps that had been done when that epoch began.
        sums: sum and weight of each number that is averaged over the epoch.
        kept: changed attributes by path, and states of changed metrics by path and name.
    """

    def __init__(self) -> None:
        self.step = 0
        self.epoch = 0
        self.first = 0
        self.sums: dict[str, list[float]] = {}
        self.kept: dict[str, Any] = {}

    def begin(self, module: Any) -> None:
        """Call what comes before the first step, with nothing kept yet."""
        self.load_state_dict({"step": 0, "epoch": 0, "first": 0})
        for name in _START:
            self._call(module, name)

    def on_start(self, run: Run) -> None:
        """Begin; not after a resume, when the effects of what comes first are kept."""
        if run.step == 0:
            self.begin(run.model)

    def after_step(self, run: Run) -> None:
        """Call what comes after a batch, and after an epoch."""
        module: Any = run.model
        for name in getattr(run.task, "of_epoch", ()):
            if name in run.train:
                total = self.sums.setdefault(name, [0.0, 0.0])
                total[0] += run.train[name] * run.weights[name]
                total[1] += run.weights[name]
        self.step = run.step
        if overrides(module, "on_train_batch_end"):
            output = {"loss": torch.tensor(run.train["loss"])}
            self._call(module, "on_train_batch_end", output, _NoBatch(), run.step - 1 - self.first)
        if run.is_epoch_end:
            for name, (summed, weight) in self.sums.items():
                log(f"{name}_epoch", summed / weight)
            self.sums = {}
            self._call(module, "on_train_epoch_end")
            self.epoch, self.first = run.epoch + 1, run.step
            self._call(module, "on_train_epoch_start")

    def after_evaluation(self, run: Run, split: str, metrics: dict[str, float]) -> None:
        """Take over what the hooks of the evaluation have changed."""
        pending: dict[str, Any] = getattr(run.task, "pending", {})
        self.kept.update(pending.pop(split, {}))

    def on_end(self, run: Run, status: str, reason: str) -> None:
        """Call what comes after the last step, if the run has come to its end."""
        if status == "completed":
            module: Any = run.model
            self._call(module, "on_train_end")
            self._call(module, "on_fit_end")
            self._call(module, "teardown", "fit")
            datamodule = module.trainer.datamodule
            if datamodule is not None and overrides(datamodule, "teardown"):
                datamodule.teardown("fit")

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, and what hooks have changed."""
        state: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "first": self.first}
        return state | {f"{_NUMBER}{name}": pair for name, pair in self.sums.items()} | self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        rest = dict(state)
        self.step, self.epoch, self.first = (rest.pop(name) for name in ("step", "epoch", "first"))
        self.sums = {n[len(_NUMBER) :]: v for n, v in rest.items() if n.startswith(_NUMBER)}
        self.kept = {n: v for n, v in rest.items() if not n.startswith(_NUMBER)}

    @contextmanager
    def opened(self, module: nn.Module) -> Iterator[None]:
        """Within it a step runs; then all metrics and attributes are as before.

        Raises:
            TaskError: the step has changed an attribute that hooks change too.
        """
        before = self._put(module)
        metrics = metrics_in(module).values()
        for metric in metrics:
            metric.reset()
        try:
            yield
            for path in before:
                attributes, name = _place(module, path)
                if attributes.get(name) != self.kept[path]:
                    raise TaskError(
                        f"self.{path}: is changed by a step, and depends on how many batches this "
                        "rank has; change it in on_train_batch_end, which runs once a step"
                    )
        finally:
            _restore(module, before)
            for metric in metrics:
                metric.reset()

    @contextmanager
    def changing(self, module: nn.Module, fed: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Within it hooks run, and the module has what earlier ones have left.

        Args:
            module: the module.
            fed: paths of metrics that have the states of an evaluation's steps, which end with it.

        Yields:
            What is to be kept, afterwards.
        """
        changes: dict[str, Any] = {}
        metrics, states = metrics_in(module), _states_in(self.kept)
        before = self._put(module)
        made = _plain(module) | before
        owners = {prefix for prefix, _ in module.named_modules()}
        for path, state in states.items():
            load_state(metrics[path], state, 1)
        try:
            yield changes
            now = _plain(module, owners)
            changes |= {p: v for p, v in now.items() if p in before or v != made.get(p, _MISSING)}
            for path, metric in metrics.items():
                state = state_of(metric)
                if path not in fed and (path in states or not is_start(metric, state)):
                    changes |= {f"{_METRIC}{path} {name}": value for name, value in state.items()}
        finally:
            left = _plain(module, owners)
            start = {p: made.get(p, _MISSING) for p in left}
            _restore(module, {p: v for p, v in start.items() if left[p] != v})
            for metric in metrics.values():
                metric.reset()

    def _put(self, module: nn.Module) -> dict[str, Any]:
        """Put what is kept into a module's attributes; returns what was there, or `_MISSING`."""
        before = {}
        for path, value in self.kept.items():
            if not path.startswith(_METRIC):
                attributes, name = _place(module, path)
                before[path] = attributes.get(name, _MISSING)
                attributes[name] = value
        return before

    def _call(self, module: Any, name: str, *arguments: Any) -> None:
        if not overrides(module, name):
            return
        with self.changing(module) as changes, module.trainer.during("hook", None):
            getattr(module, name)(*arguments)
        self.kept.update(changes)


class ModelChangingHooks(LightningHooks):
    """As `LightningHooks`, for modules whose hooks may change parameters and buffers."""

    changes_model: ClassVar[bool] = True


class _NoBatch:
    """What `on_train_batch_end` gets as the batch: a step has many, on several ranks."""

    def _refused(self, *_: object) -> NoReturn:
        raise TaskError(
            "on_train_batch_end: uses its batch; it is called once a step, on every rank alike, "
            "and a step's samples are on several ranks; use the batch in training_step"
        )

    __getitem__ = __iter__ = __len__ = _refused

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refused()


def _plain(module: nn.Module, owners: Collection[str] | None = None) -> dict[str, Any]:
    """Numbers and texts among the attributes of a module and of those in it, by path.

    Args:
        module: the module.
        owners: paths of the modules to look at; None for all.
    """
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, inner in module.named_modules()
        if (owners is None or prefix in owners) and not hasattr(inner, "_defaults")
        for name, value in vars(inner).items()
        if type(value) in _PLAIN and name != "training" and name[0] != "_"
    }


def _place(module: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """The attributes of the owner of one, and its name.

    They are read and set here without the owner's class, by which audits notice what steps do.
    """
    prefix, _, name = path.rpartition(".")
    return vars(module.get_submodule(prefix)), name


def _restore(module: nn.Module, values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        attributes, name = _place(module, path)
        if value is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value


def _states_in(kept: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """States of metrics by their paths and names."""
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in kept.items():
        if key.startswith(_METRIC):
            path, _, name = key[len(_METRIC) :].partition(" ")
            states.setdefault(path, {})[name] = value
    return states


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
