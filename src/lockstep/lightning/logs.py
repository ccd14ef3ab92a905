"""What a LightningModule logs: numbers as sums with weights, and the states of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.config.parsing import shown
from lockstep.errors import TaskError


class Journal:
    """What one step of a module logs.

    Attributes:
        numbers: pairs (sum, weight) by name.
        of_epoch: names that are to be averaged over an epoch too.
        metrics: metrics of torchmetrics that are logged as such, by name.
        weight_of: weight of each number that was logged, by its name, where the step gives one.
    """

    def __init__(self, split: str, batch_size: Callable[[], int]) -> None:
        """Begin.

        Args:
            split: name of the split; a name that begins with it is logged without.
            batch_size: counts the samples of the batch.
        """
        self._split, self._batch_size = split, batch_size
        self.numbers: dict[str, tuple[Any, float]] = {}
        self.of_epoch: list[str] = []
        self.metrics: dict[str, Metric] = {}
        self.weight_of: dict[str, float] = {}
        self._values: dict[str, Tensor] = {}

    def add(self, asked: Mapping[str, Any]) -> None:
        """Take a value.

        Args:
            asked: the arguments of `self.log` that were given, by name.

        Raises:
            TaskError: it cannot be reduced as asked, or the name was logged already.
        """
        name, value = str(asked["name"]).removeprefix(f"{self._split}/"), asked["value"]
        where = f"self.log({asked['name']!r})"
        if name in self.numbers or name in self.metrics:
            raise TaskError(f"{where}: is called twice in a step; give it another name")
        if isinstance(value, Metric):
            self.metrics[name] = value
        else:
            reduction = asked.get("reduce_fx", "mean")
            if reduction not in ("mean", "avg", torch.mean):
                raise TaskError(
                    f"{where}: reduce_fx={shown(reduction)}: numbers are reduced to means over the "
                    "batch; log a metric of torchmetrics instead, in validation_step or test_step"
                )
            if asked.get("batch_size") is not None:
                self.weight_of[name] = float(asked["batch_size"])
            self.put(name, value, where)
        if asked.get("on_epoch"):
            self.of_epoch.append(name)

    def put(self, name: str, value: Any, where: str) -> None:
        """Take a number.

        Raises:
            TaskError: it is none.
        """
        try:
            number = torch.as_tensor(value).detach().double().reshape(())
        except (TypeError, ValueError, RuntimeError):
            raise TaskError(
                f"{where}: is {shown(value)}; log a number, a tensor of one element or a metric "
                "of torchmetrics"
            ) from None
        if isinstance(value, Tensor):
            self._values[name] = value
        weight = self.weight_of.get(name) or float(self._batch_size())
        self.numbers[name] = (number * weight, weight)

    def given_weight(self, loss: Tensor) -> float | None:
        """The `batch_size` that the loss was logged with, if any."""
        for name, weight in self.weight_of.items():
            value = self._values.get(name)
            if value is not None and value.numel() == 1 and bool((value == loss).detach()):
                return weight
        return None

    def numbers_beside(self, loss: Tensor | None) -> dict[str, tuple[Any, float]]:
        """The numbers that were logged, without the loss that the step returns.

        Raises:
            TaskError: another value was logged by that name.
        """
        numbers = dict(self.numbers)
        if loss is not None and "loss" in numbers:
            total, weight = numbers.pop("loss")
            if not torch.isclose(total / weight, loss.detach().double(), equal_nan=True):
                raise TaskError(
                    "self.log('loss'): is not what the step returns, which has that name; give it "
                    "another one"
                )
        return numbers

    def metric_paths(self, module: nn.Module) -> dict[str, str]:
        """The paths in a module of the metrics that were logged, by name.

        Raises:
            TaskError: one of them is not in it.
        """
        paths = {id(metric): path for path, metric in metrics_in(module).items()}
        for name, metric in self.metrics.items():
            if id(metric) not in paths:
                raise TaskError(
                    f"self.log({name!r}, {type(metric).__name__}): must be an attribute of the "
                    "module, made in __init__, and have states of its own"
                )
        return {name: paths[id(metric)] for name, metric in self.metrics.items()}


def metrics_in(module: nn.Module) -> dict[str, Metric]:
    """The metrics of torchmetrics in a module, by the paths of their attributes."""
    return {
        name: inner
        for name, inner in module.named_modules()
        if isinstance(inner, Metric) and inner._defaults
    }


def state_of(metric: Metric) -> dict[str, Any]:
    """The states of a metric, by name: tensors, or lists of tensors."""
    return {
        name: list(value) if isinstance(value, list) else value.detach().clone()
        for name in metric._defaults
        for value in [getattr(metric, name)]
    }


def load_state(metric: Metric, state: Mapping[str, Any], count: int) -> None:
    """Give a metric a state, as after some updates."""
    metric.reset()
    for name, value in state.items():
        now = getattr(metric, name)
        device = now.device if isinstance(now, Tensor) else metric.device
        if isinstance(value, list):
            setattr(metric, name, [part.to(device) for part in value])
        else:
            setattr(metric, name, value.to(device))
    metric._update_count = count
    metric._computed = None


def is_start(metric: Metric, state: Mapping[str, Any]) -> bool:
    """Whether a metric's state is that before any update."""
    for name, default in metric._defaults.items():
        value = state[name]
        if isinstance(default, list) or isinstance(value, list):
            if len(value):
                return False
        elif not torch.equal(value.cpu(), default.cpu().to(value.dtype)):
            return False
    return True


class Holder:
    """A reference that copies of a metric share."""

    def __init__(self, function: Callable[[str, Mapping[str, dict[str, Any]], int], Any]) -> None:
        self.call = function

    def __deepcopy__(self, memo: object) -> Holder:
        return self


class ModuleMetrics(Metric):
    """All metrics of a module as one, whose result is what the module logs at an epoch's end.

    Each evaluation batch gives the states of all metrics after its step. They are combined over
    batches and ranks as those of any metric.
    """

    full_state_update = False
    which: Tensor

    def __init__(self, module: nn.Module, names: tuple[str, ...], finish: Holder) -> None:
        """Take over the states of a module's metrics.

        Args:
            module: module that has them.
            names: names of splits.
            finish: function of a split's name, the states of each metric by its path, and the
                number of batches; returns the results by name.
        """
        super().__init__()
        self._names, self._finish = names, finish
        self._places: dict[str, tuple[str, str]] = {}
        self.add_state("which", torch.tensor(-1), dist_reduce_fx="max")
        for number, (path, metric) in enumerate(metrics_in(module).items()):
            for state, default in metric._defaults.items():
                own_name = f"of_{number}_{state}"
                self._places[own_name] = path, state
                start: Any = default.clone().cpu() if isinstance(default, Tensor) else []
                self.add_state(own_name, start, dist_reduce_fx=metric._reductions[state])

    def update(self, split: str, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the states after one batch.

        Args:
            split: name of the split.
            states: states of each metric, by its path.
        """
        self.which = torch.tensor(self._names.index(split))
        for own, (path, state) in self._places.items():
            setattr(self, own, states[path][state])

    def compute(self) -> Any:
        """What the module logs at the end of this epoch, by name."""
        states: dict[str, dict[str, Any]] = {}
        for own, (path, state) in self._places.items():
            states.setdefault(path, {})[state] = getattr(self, own)
        split = self._names[int(self.which)]
        return self._finish.call(split, states, self._update_count)
